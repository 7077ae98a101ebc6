"""Layers in a row without a norm between: how the signal's size changes along them, and by whose fault."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from musigma.graph import Edge, Graph, Node, kinds
from musigma.init.auditing._facts import Facts
from musigma.init.auditing._scene import Scene
from musigma.init.auditing._signal import Spread
from musigma.init.meanfield import gain

# A gain that is off by less costs less than 5 % of the standard deviation a layer.
_TOLERANCE = math.log(1.1)
_MIXING = kinds.WEIGHT_OPS - kinds.EMBEDDINGS - kinds.RECURRENT - kinds.ATTENTIONS


@dataclass(frozen=True)
class Chain:
    """Weight layers from the last place where the scale began anew, in execution order.

    Attributes:
        layers: the nodes, at least one.
        received: what each received.
        produced: what the last one put out.
    """

    layers: tuple[Node, ...]
    received: tuple[Spread, ...]
    produced: Spread

    @property
    def depth(self) -> int:
        """How many layers the signal has crossed when the last one receives it."""
        return len(self.layers) - 1

    def chance(self, crossed: int) -> float:
        """The standard deviation that finite widths give the logarithm of the second moment.

        A Gaussian ReLU layer of n units multiplies ‖x‖² by a factor whose logarithm has the variance 5/n
        (Hanin & Rolnick 2018); other activations vary less.
        """
        return math.sqrt(
            sum(5 / max(spread.units, 1) for spread in (*self.received, self.produced)[1 : crossed + 1])
        )


def chains(scene: Scene, resets: Callable[[Node], bool]) -> Iterator[Chain]:
    """The longest chain that ends in each weight layer.

    Args:
        scene: a model that was recorded.
        resets: whether a node's output begins a new scale.

    Yields:
        Chains whose layers were all measured, in execution order of their ends.

    References:
        None.
    """
    graph, signal = scene.graph, scene.signal
    assert graph is not None
    assert signal is not None
    # Written-out norms count as much as called ones.
    normed = {norm.node.index for norm in graph.norms() if norm.node.op not in kinds.NORMS}
    paths: dict[int, tuple[int, ...]] = {}
    for node in graph.nodes:
        path = max((paths.get(int(s), ()) for s in node.inputs if isinstance(s, Edge)), key=len, default=())
        if node.op in _MIXING and graph.weights(node) and node.index in signal.received:
            path = (*path, node.index)
            if node.index in signal.outputs:
                layers = tuple(graph.nodes[i] for i in path)
                yield Chain(layers, tuple(signal.received[i] for i in path), signal.outputs[node.index])
        paths[node.index] = () if resets(node) or node.index in normed else path


def normalizes(node: Node) -> bool:
    """Whether a node's output has a size of its own: after a norm, a softmax, an embedding, a recurrence.

    Example:
        >>> from musigma.graph import record
        >>> import torch
        >>> [normalizes(n) for n in record(torch.nn.LayerNorm(2), torch.ones(1, 2))]
        [True]
    """
    return (
        node.op in kinds.NORMS | kinds.SOFTMAXES | kinds.EMBEDDINGS | kinds.RECURRENT
        or node.op == "normalize"
    )


Culprit = tuple[Facts, float, float]


def blame(
    scene: Scene, found: Sequence[tuple[Chain, float]], sign: int
) -> Iterator[tuple[Chain, float, Culprit]]:
    """Who is to blame for chains in which the signal is lost, each weight once.

    Args:
        scene: a model that was recorded.
        found: the chains, each with a number of the caller's.
        sign: −1 where the signal vanishes, 1 where it explodes.

    Yields:
        (chain, its number, culprit). The longest chain comes first: what it explains needs no second word.
        Where no weight is off by itself, the last one of the shortest chain stands for all.

    References:
        None.
    """
    said: set[str] = set()
    innocent: list[tuple[Chain, float, Culprit]] = []
    for chain, number in sorted(found, key=lambda pair: -len(pair[0].layers)):
        # What a layer receives is not its own doing; what the last one puts out is.
        suspects, guilty = culprits(scene, chain.layers[:-1] if sign < 0 else chain.layers, sign)
        if not guilty:
            innocent += [(chain, number, suspect) for suspect in suspects]
            continue
        for suspect in suspects:
            if suspect[0].name not in said:
                said.add(suspect[0].name)
                yield chain, number, suspect
    if not said:
        yield from innocent[-1:]


def culprits(scene: Scene, layers: Sequence[Node], sign: int) -> tuple[list[Culprit], bool]:
    """The weights whose own gain is off in the direction of a drift.

    Args:
        scene: a model that was recorded.
        layers: the chain's layers.
        sign: −1 where the signal vanishes, 1 where it explodes.

    Returns:
        (weight, its E[z²]/E[x²], the factor that musigma's plan or else the activation behind it wants), each
        weight once, none where one is constant; and whether they are to blame: where none is off by itself,
        the last one stands for all.

    References:
        None.
    """
    found: dict[str, tuple[Facts, float, float, bool]] = {}
    signal = scene.signal
    assert signal is not None
    if any(facts.std == 0 for node in layers for facts in scene.weights(node)):
        return [], True  # a constant weight is a finding by itself, and no wonder
    for node in layers:
        made, got = signal.outputs.get(node.index), signal.received.get(node.index)
        for facts in scene.weights(node):
            if made is None or got is None or facts.name in found:
                continue
            factor = _factor(facts, made.square / got.square if got.square > 0 else 0.0)
            law = scene.expected.get(facts.name)
            if law is not None and law.std > 0:
                wanted = factor * law.var / facts.std**2
                off = not scene.as_planned(facts) and sign * (facts.std - law.std) > 0
            else:
                wanted = _wanted(scene, facts)
                off = sign * math.log(factor / wanted) > _TOLERANCE if factor > 0 else sign < 0
            found[facts.name] = (facts, factor, wanted, off)
    guilty = [entry for entry in found.values() if entry[3]]
    return [
        (facts, factor, wanted) for facts, factor, wanted, _ in guilty or list(found.values())[-1:]
    ], bool(guilty)


def _factor(facts: Facts, measured: float) -> float:
    """E[z²]/E[x²] of a layer without its bias: Var(W)·fan_in, or as measured where weights have a mean."""
    # A mean counts where it is beyond five standard errors and adds a percent.
    shifted = facts.mean**2 * facts.count > 25 * facts.std**2
    if facts.fans is None or (shifted and facts.mean**2 * facts.fans.fan_in > 0.01 * facts.std**2):
        return measured
    return float(facts.std**2 * facts.fans.fan_in)


def _wanted(scene: Scene, facts: Facts) -> float:
    """gain² of the activation that follows; 1 where none does or its gain can't be computed."""
    graph = scene.graph
    assert isinstance(graph, Graph)
    found = graph.following_activation(facts.name)
    if found is None or found.fn is None:
        return 1.0
    try:
        return gain(found.name if not found.kwargs else found.fn) ** 2
    except (TypeError, ValueError):
        try:
            return gain(found.fn) ** 2
        except (TypeError, ValueError):
            return 1.0
