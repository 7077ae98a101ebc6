"""What a check is shown: the tensors with their laws, and where there is an example the model as it ran."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from musigma.graph import Branch, Graph, Node
from musigma.init.auditing._expected import meets
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._identify import Identified
from musigma.init.auditing._report import Finding
from musigma.init.planning import Entry
from musigma.init.schemes._scheme import Law

if TYPE_CHECKING:
    from musigma.init.auditing._signal import Signal


@dataclass(frozen=True)
class Scene:
    """A model under audit. Checks read it and change nothing.

    Attributes:
        model: without wrappers.
        facts: its readable tensors.
        laws: name → the law each most likely came from.
        z: standard errors at which this audit's false-alarm rate is kept over all tensors.
        graph: the model as it ran; None without an example.
        signal: what was measured as it ran.
        trained: whether the weights fit no law.
        notes: what checks could not judge, to be told to the reader.
        entries: name → what a plan says of the tensor.
        expected: name → the law it chose.
        planned: whether the caller gave that plan; else it is what musigma would choose.
    """

    model: nn.Module
    facts: tuple[Facts, ...]
    laws: Mapping[str, Identified]
    z: float
    graph: Graph | None
    signal: "Signal | None"
    trained: bool
    notes: list[str]
    entries: Mapping[str, Entry] = field(default_factory=dict)
    expected: Mapping[str, Law] = field(default_factory=dict)
    planned: bool = False

    @cached_property
    def _by_name(self) -> dict[str, Facts]:
        return {name: facts for facts in self.facts for name in facts.names}

    def find(self, name: str) -> Facts | None:
        """The tensor of a name, whichever of its names it is."""
        return self._by_name.get(name)

    def weights(self, node: Node) -> list[Facts]:
        """The readable weights that a recorded op mixes features with."""
        assert self.graph is not None
        found = {f.name: f for name in self.graph.weights(node) if (f := self.find(name)) is not None}
        return list(found.values())

    def uses(self, facts: Facts) -> tuple[Node, ...]:
        """The recorded ops that use a tensor; empty without an example."""
        if self.graph is None:
            return ()
        return self.graph.uses(facts.name) if facts.name in self._recorded else ()

    def as_planned(self, facts: Facts) -> bool:
        """Whether a tensor has the law that its plan, or musigma, chooses for it: no law to be blamed."""
        law = self.expected.get(facts.name)
        return law is not None and meets(facts, law, self.z)

    def norm_follows(self, facts: Facts) -> bool:
        """Whether a norm takes what the tensor's layer puts out, so that its spread is divided out."""
        if self.graph is None or facts.name not in self._recorded:
            return False
        return self.graph.norm_after(facts.name, only=False) is not None

    def activation_of(self, facts: Facts) -> str | None:
        """Label of the activation behind a tensor's layer."""
        if self.graph is None or facts.name not in self._recorded:
            return None
        found = self.graph.following_activation(facts.name)
        return None if found is None else found.name

    def family(self, facts: Facts) -> str:
        """The continuous family whose shape a tensor has; "" for none."""
        found = self.laws[facts.name].family
        return found if found in ("normal", "uniform", "truncated") else ""

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The residual branches of the recorded model."""
        return () if self.graph is None else self.graph.residual_branches()

    @cached_property
    def has_norms(self) -> bool:
        """Whether any layer of the model normalizes."""
        return any("norm" in type(module).__name__.lower() for module in self.model.modules())

    @cached_property
    def _recorded(self) -> frozenset[str]:
        assert self.graph is not None
        return frozenset(name for group in self.graph.parameters for name in group)


Check = Callable[[Scene], Iterator[Finding]]

# In the order in which findings are told: what makes all else meaningless first.
CHECKS: dict[str, Check] = {}


def check(code: str) -> Callable[[Check], Check]:
    """Register a check under the id of the problem it finds; its file's docstring documents it.

    Args:
        code: words with hyphens.

    Returns:
        A decorator that leaves the function as it is.

    Raises:
        ValueError: the id is taken.

    Example:
        >>> "residual-unscaled" in CHECKS
        True

    References:
        None.
    """

    def register(function: Check) -> Check:
        taken = CHECKS.get(code)
        if taken is not None and taken.__module__ != function.__module__:
            raise ValueError(f"problem ids must be unique, but {code!r} is {taken.__module__}'s")
        CHECKS[code] = function
        return function

    return register


__all__ = ["CHECKS", "Check", "Scene", "check"]
