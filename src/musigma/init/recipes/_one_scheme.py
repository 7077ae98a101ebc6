"""One scheme for every weight, whatever follows it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from musigma.graph import Graph, kinds
from musigma.init._rule import Rule, make_rule
from musigma.init.meanfield import gain
from musigma.init.recipes._recipe import Weights, changed, graph_of, redrawn
from musigma.init.schemes import SCHEMES

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan


@dataclass(frozen=True)
class OneScheme:
    """Weights by one scheme, biases 0, norms 1: what a loop over `model.modules()` does, with true fans.

    The scheme is told the effective fans, the number of stacked matrices and, if it asks for one, the
    activation that really follows.

    Args:
        name: a name in SCHEMES.
        options: what the scheme is called with.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> plan = ms.init.plan(net, torch.ones(2, 8), scheme="xavier_uniform")
        >>> plan["2.weight"].scheme, plan["2.bias"].scheme
        ('xavier_uniform', 'zeros')

    References:
        None.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rule: Rule) -> OneScheme:
        """The recipe for a scheme that was looked up, with the options that a `functools.partial` fixes.

        Raises:
            ValueError: the scheme needs options that are missing.
        """
        if rule.scheme is None:
            raise ValueError(
                f"scheme must be one of SCHEMES, a recipe, or a functools.partial of a scheme, got "
                f"{rule.label}; for a function of your own use "
                f"musigma.init.apply(model, {{'*.weight': function}})"
            )
        taken = inspect.signature(rule.scheme.function).parameters.values()
        needed = [
            p.name for p in taken if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name in rule.open
        ]
        if needed:
            listed = ", ".join(f"{name}=…" for name in needed)
            raise ValueError(
                f"{rule.scheme.name} needs {listed}; pass "
                f"functools.partial(musigma.init.{rule.scheme.name}_, {listed}) as scheme"
            )
        return cls(rule.scheme.name, rule.options)

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with every weight from the scheme; see `Recipe`."""
        rule = make_rule("*", SCHEMES[self.name].function)
        graph, weights = graph_of(plan), Weights(plan, model)
        entries: dict[str, Entry] = {}
        for entry in plan.entries:
            if len(entry.shape) > 1 and entry.op not in kinds.NORMS and entry.scheme != "ones":
                options = {**self._told(graph, weights, entry, rule), **self.options}
                entries[entry.tensor] = redrawn(entry, self.name, "every weight, as asked for", **options)
            elif len(entry.shape) == 1 and (entry.std > 0 or entry.scheme == "block_constant"):
                entries[entry.tensor] = redrawn(entry, "zeros", "a bias starts at 0")
        return changed(plan, entries, scheme=self.name)

    def _told(self, graph: Graph, weights: Weights, entry: Entry, rule: Rule) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if "fans" in rule.open:
            options["fans"] = weights.fans(entry)
        if "groups" in rule.open and entry.parts > 1:
            options["groups"] = entry.parts
        if "nonlinearity" in rule.open:
            found = graph.following_activation(entry.tensor)
            known = found is not None and (found.name, dict(found.kwargs))
            options["nonlinearity"] = _nonlinearity(known) if known else "linear"
        return options


def _nonlinearity(known: tuple[str, dict[str, Any]]) -> object:
    activation = known if known[1] else known[0]
    try:
        gain(activation)
    except (TypeError, ValueError):
        return "linear"
    return activation
