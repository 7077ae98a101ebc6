"""What a recipe is: a function from the plan of what follows each layer to a plan that knows a paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from musigma.graph import Edge, Graph, Node, Parameter, kinds
from musigma.init._fans import Fans, layer_fans
from musigma.init._names import slots
from musigma.init.meanfield import gain
from musigma.init.planning._entry import Entry
from musigma.init.recipes._structure import Block, Stream, streams
from musigma.init.schemes import SCHEMES

if TYPE_CHECKING:
    from musigma.init.planning._plan import Plan


@runtime_checkable
class Recipe(Protocol):
    """Changes a plan into what one paper prescribes.

    A recipe that needs numbers from the example has a method `fit(model, example)` as well, which runs
    after the weights are drawn.

    Attributes:
        name: what `initialize(scheme=…)` calls it.
    """

    @property
    def name(self) -> str:
        """What `initialize(scheme=…)` calls it."""

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with other entries.

        Args:
            plan: the auto plan of the model.
            model: the model; it is only looked at.

        Returns:
            A new plan.

        Raises:
            ValueError: the model has nothing that the recipe speaks of, or lacks what it needs.
        """


RECIPES: dict[str, Recipe] = {}


def register(recipe: Recipe) -> Recipe:
    """Put a recipe, with its defaults, where names are looked up.

    Args:
        recipe: the recipe.

    Returns:
        The recipe.

    Raises:
        ValueError: the name is taken.
    """
    if recipe.name in RECIPES and type(RECIPES[recipe.name]) is not type(recipe):
        raise ValueError(f"recipe names must be unique, but {recipe.name!r} is registered already")
    RECIPES[recipe.name] = recipe
    return recipe


def redrawn(entry: Entry, scheme: str, reason: str, /, **options: Any) -> Entry:
    """An entry with another law.

    Args:
        entry: what the plan said.
        scheme: a name in SCHEMES.
        reason: one sentence that names formula and source.
        options: what the scheme is called with.

    Returns:
        The new entry, with the moments of its law. What it expected of the pre-activation is dropped.
    """
    law = SCHEMES[scheme].law(entry.shape, fans=options.get("fans") or entry.fans, options=options)
    return dataclasses.replace(
        entry, scheme=scheme, options=options, mean=law.mean, std=law.std, reason=reason, target=None
    )


# Why a plan leaves a tensor alone that no recipe may touch either.
_PROTECTED = ("in skip", "frozen", "not floating-point")


def changed(
    plan: Plan, entries: Mapping[str, Entry], notes: Iterable[str] = (), *, scheme: str | None = None
) -> Plan:
    """A plan with some entries replaced, or put in for tensors that it left at the model's own start.

    Args:
        plan: the plan.
        entries: tensor → new entry. Tensors that the user protects (frozen, in `skip`) stay out.
        notes: what the user has to know or do.
        scheme: what the new plan says it was made by.

    Returns:
        The new plan.
    """
    allowed = {n: e for n, e in entries.items() if not plan.skipped.get(n, "").startswith(_PROTECTED)}
    present = {entry.tensor for entry in plan.entries}
    kept = [allowed.get(entry.tensor, entry) for entry in plan.entries]
    added = [entry for name, entry in allowed.items() if name not in present]
    skipped = {name: why for name, why in plan.skipped.items() if name not in allowed}
    return dataclasses.replace(
        plan,
        entries=(*kept, *added),
        skipped=skipped,
        notes=(*plan.notes, *notes),
        scheme=scheme or plan.scheme,
    )


class Weights:
    """The tensors of a plan by the names that its graph uses, those it left at their start included."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._by_name = {name: e for e in plan.entries for name in (e.tensor, *e.tied)}
        self._graph = graph_of(plan)
        self._owners = {name: owner for slot in slots(model) for name, owner in slot.owners.items()}

    def fans(self, entry: Entry) -> Fans:
        """The fans that papers count: those of a convolution without what its borders take away."""
        for name in (entry.tensor, *entry.tied):
            owner, leaf = self._owners.get(name, (None, ""))
            if isinstance(owner, nn.modules.conv._ConvNd):
                return layer_fans(owner, leaf, owner.get_parameter(leaf))
        if entry.fans is not None:
            return entry.fans
        kernel = math.prod(entry.shape[2:])
        return Fans(math.prod(entry.shape[1:]), entry.shape[0] * kernel)

    def he_std(self, entry: Entry) -> float:
        """He's gain/√fan_in, with the gain of the activation behind the layer, or else before it."""
        return gain_of(self._graph, entry) / math.sqrt(max(self.fans(entry).fan_in, 1))

    def get(self, name: str) -> Entry | None:
        """The entry of a parameter, by any of its names; None if the plan has none."""
        return self._by_name.get(name)

    def blank(self, name: str, node: Node) -> Entry:
        """The entry of a parameter, or one to be filled in for what the plan left at its start."""
        if (known := self.get(name)) is not None:
            return known
        group = next(names for names in self._graph.parameters if name in names)
        first = min(group)
        tied = tuple(sorted(set(group) - {first}))
        shape = tuple(map(int, self._graph.specs[group[0]].shape))
        return Entry(first, shape, "zeros", {}, 0.0, 0.0, "", node.op, node.module, tied=tied)

    def of(self, nodes: Iterable[Node]) -> list[Entry]:
        """The entries of the weights of some nodes, each once, in order."""
        found = (self.get(name) for node in nodes for name in self._graph.weights(node))
        return list({entry.tensor: entry for entry in found if entry is not None}.values())

    def ends(self, block: Block) -> list[Entry]:
        """The entries of the weights that a branch ends with: of torch's attention its output projection."""
        names: list[str] = []
        for node in block.last:
            projection = [
                s.name for s in node.arguments.get("out_proj_weight", ()) if isinstance(s, Parameter)
            ]
            names += projection or self._graph.weights(node)
        found = (self.get(name) for name in names)
        return list({entry.tensor: entry for entry in found if entry is not None}.values())


def graph_of(plan: Plan) -> Graph:
    """The graph that a plan was made from.

    Args:
        plan: the plan.

    Returns:
        The graph.

    Raises:
        ValueError: the plan was made without one.
    """
    graph = plan.graph
    if graph is None:
        raise ValueError("a recipe needs the model as it ran; make the plan with an example")
    return graph


def streams_of(plan: Plan, what: str) -> tuple[Stream, ...]:
    """The residual streams of a planned model.

    Args:
        plan: the plan.
        what: the recipe, for the message.

    Returns:
        At least one.

    Raises:
        ValueError: the model has no residual branches.
    """
    found = streams(graph_of(plan))
    if not found:
        raise ValueError(
            f"{what} is about residual branches, but nothing that ran on the example adds a branch to what "
            f"it skips over (x + f(x)), so it would change nothing; use scheme='auto', or pass an example "
            f"that takes the path with the branches"
        )
    return found


def gain_of(graph: Graph, entry: Entry) -> float:
    """The gain of the activation that a weight's output goes into, else of the one that its input comes from.

    Args:
        graph: the model as it ran.
        entry: the weight.

    Returns:
        1/√E[φ(z)²]; 1 where there is no activation.
    """
    activation = graph.following_activation(entry.tensor)
    if activation is not None:
        return _gain(activation.name, dict(activation.kwargs))
    for node in graph.uses(entry.tensor):
        source = next((s for s in node.inputs if graph.is_live(s)), None)
        while isinstance(source, Edge):
            behind = graph.nodes[source]
            if behind.op in kinds.ACTIVATIONS:
                return _gain(behind.op, {})
            if behind.op not in kinds.VIEWS | kinds.DROPOUTS | kinds.POOLINGS or not behind.inputs:
                break
            source = behind.inputs[0]
    return 1.0


def _gain(name: str, options: dict[str, Any]) -> float:
    try:
        return gain((name, options) if options else name)
    except (TypeError, ValueError):
        return 1.0
