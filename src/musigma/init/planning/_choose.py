"""The law of every tensor, decided when the walk comes to its first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from musigma.graph import Edge, Node, Parameter, Source, kinds
from musigma.init._fans import Fans
from musigma.init.planning import _packed as packed
from musigma.init.planning._book import Book, Note
from musigma.init.planning._entry import Layer
from musigma.init.planning._purpose import Purpose, Purposes
from musigma.init.planning._signal import EXAMPLE, HERE, PLACE, Signal
from musigma.init.planning._taps import effective_fans
from musigma.init.planning._targets import LOGIT_BIAS, POSITION, Target, Targets
from musigma.init.planning._walk import Walk
from musigma.init.planning.families._recurrent import Recurrence


class Chooser:
    """Decides laws as the walk goes.

    Attributes:
        book: where they are written.
        heads: node index → second moment that a head read in the last walk, for tied tensors.
        sent_back: node index → second moment of the gradient at a layer's input, by that at its output.

    Args:
        book: the model's tensors.
        purposes: what every layer is for.
    """

    def __init__(self, book: Book, purposes: Purposes) -> None:
        self.book = book
        self.purposes = purposes
        self.targets = Targets(purposes)
        self.heads: dict[int, float] = {}
        self.sent_back: dict[int, float] = {}

    def again(self) -> None:
        """Forget the laws, keep what was learned about heads."""
        self.book.entries.clear()

    def layer(self, walk: Walk, node: Node) -> None:
        """Decide a layer's weight and bias, and put what it gives."""
        weight = walk.graph.weights(node)[0]
        signal = _read(walk, node)
        purpose = self._purpose(walk, node, weight)
        shape, direct = self._shape(walk, node, weight)
        source = next((s for s in node.inputs if walk.graph.is_live(s)), None)
        fan_in, fan_out = effective_fans(node, shape, walk.shape(source) if source is not None else ())
        known = signal or Signal(walk.draws.plain(1.0, node.index))
        looked_up = node.op in kinds.EMBEDDINGS
        why = known.measured if signal is not None or looked_up else "not known, taken as 1"
        target = self.targets.of(walk, node, purpose, known, has_bias=self._bias(node) is not None)
        if node.op in kinds.EMBEDDINGS:
            target = self._embedding(walk, node, weight, purpose, target)
        note = self._note(node, weight, purpose, Fans(fan_in, fan_out), target)
        variance = self._weight(
            walk, node, weight, known.second, fan_in, purpose, target, note, direct=direct
        )
        bias = self._bias_law(node, weight, target)
        self.sent_back[node.index] = fan_out * variance
        if node.op in kinds.EMBEDDINGS:
            out = _looked_up(walk, node, variance)
        else:
            out = self.mixed(walk, node, known, fan_in * variance, bias, units=_units(node, shape))
        if purpose.kind == "head":
            out = self._with_own_row(walk, node, weight, known, out)
            self.heads[node.index] = known.second
        walk.put(node, out)
        self.expect(walk, node, purpose.kind, known, out, target, why, fan_in)

    def _with_own_row(self, walk: Walk, node: Node, weight: str, read: Signal, out: Signal) -> Signal:
        """Where the head's weight is the look-up table, a token's own logit is large from the start."""
        table = next((u for u in walk.graph.uses(weight) if u.op in kinds.EMBEDDINGS), None)
        row = walk.signal(Edge(table.index)) if table is not None else None
        shape = walk.shape(Edge(node.index))
        if row is None or not shape or out.second <= 0:
            return out
        width = walk.shape(Edge(table.index))[-1] if table is not None else 1
        own = width * float((read.values[HERE] * row.values[HERE]).mean())
        return out.like(out.values * math.sqrt(1 + own**2 / shape[-1] / out.second))

    def mixed(
        self, walk: Walk, node: Node, read: Signal, factor: float, bias: float, *, units: float, key: int = 0
    ) -> Signal:
        """A sum of many inputs: normal, and off by what a finite number of them leaves to chance."""
        out = read.like(walk.draws.normal(factor * read.covariance + bias, node.index + key))
        share = factor * read.second / max(factor * read.second + bias, 1e-300)
        source = next((s for s in node.inputs if walk.signal(s) is not None), None)
        examples, places = walk.sizes(source)
        variance = read.log_drift**2 + read.noise(examples, places) / max(units, 1.0)
        return replace(out, drift=out.values[HERE] * (share * math.sqrt(variance) / 2))

    def expect(
        self,
        walk: Walk,
        node: Node,
        kind: str,
        read: Signal,
        out: Signal,
        target: Target | None,
        why: str,
        fan_in: float,
    ) -> None:
        """Write down what a layer is expected to give."""
        c = out.covariance
        walk.layers[node.index] = Layer(
            node.index,
            node.module,
            node.op,
            walk.graph.weights(node),
            kind,
            read.second,
            math.sqrt(max(out.second - out.mean**2, 0.0)),
            float(c[HERE, EXAMPLE] / c[HERE, HERE]) if float(c[HERE, HERE]) > 0 else math.nan,
            spread=_spread(walk, node, out, fan_in),
            measured=why if why not in ("", "the example's own values") else "",
            rms=math.sqrt(out.second),
            target=math.sqrt(target.second) if target is not None else math.nan,
        )

    def norm_scale(self, node: Node) -> float:
        """Ones and zeros for a norm; the size of its weight."""
        scale = 1.0
        for role, value in (("weight", 1.0), ("bias", 0.0)):
            for source in node.arguments.get(role, ()):
                name = _parameter(self.purposes.graph, source)
                if name is None:
                    continue
                note = Note(node.op, node.module)
                said = "a norm starts with the weight 1" if value else "a norm starts with the bias 0"
                entry = self.book.write(name, "ones" if value else "zeros", {}, said, note)
                if role == "weight":
                    scale = math.hypot(entry.mean, entry.std) if entry is not None else self._rms(name)
        return scale

    def added(self, walk: Walk, node: Node, source: Source) -> Signal | None:
        """What a parameter brings that an op combines with a signal; decides its law if it has none."""
        name = _parameter(walk.graph, source)
        if name is None or self.book.is_kept(name):
            return None
        entry = self.book.entry(name)
        if entry is None:
            self._decide_added(walk, node, name)
            entry = self.book.entry(name)
        if entry is None:
            return None
        shared = torch.ones(3, 3, dtype=torch.float64, device="cpu")
        if sum(size > 1 for size in entry.shape) > 1:  # positions: each has numbers of its own
            shared[HERE, PLACE] = shared[PLACE, HERE] = shared[PLACE, EXAMPLE] = shared[EXAMPLE, PLACE] = 0.0
        return Signal(walk.draws.normal(entry.std**2 * shared, node.index) + entry.mean)

    def _decide_added(self, walk: Walk, node: Node, name: str) -> None:
        tensor = self.book.tensor(name)
        assert tensor is not None
        note = Note(node.op, node.module)
        shape = [size for size in tensor.shape if size > 1]
        if node.op in kinds.CONCATENATIONS:
            beside = [s.second for _, s in walk.inputs(node)]
            std = POSITION * math.sqrt(beside[0] if beside else 1.0)
            self.book.write(name, "normal", {"std": std}, "a learned token beside the others: small", note)
        elif node.op in kinds.ADDITIONS | kinds.SUBTRACTIONS and len(shape) > 1:
            beside = [s.second for _, s in walk.inputs(node)]
            std = POSITION * math.sqrt(beside[0] if beside else 1.0)
            said = "learned positions: a quarter of the signal that they are added to"
            self.book.write(name, "normal", {"std": std}, said, note)
        elif node.op in kinds.ADDITIONS | kinds.SUBTRACTIONS and not _is_constant_sum(walk, node):
            self.book.write(name, "zeros", {}, "a bias starts at 0", note)
        elif node.op == "mul" and self._scales_a_norm(walk, node):
            self.book.write(name, "ones", {}, "a norm starts with the weight 1", note)
        elif node.op in kinds.SCALINGS:
            self.book.keep(name, "a learned scale: left at the model's own start")
        elif node.op == "prelu":
            self.book.keep(name, "the slope of a PReLU: left at the model's own start")

    def _scales_a_norm(self, walk: Walk, node: Node) -> bool:
        normed = {norm.node.index for norm in walk.graph.norms()}
        pending = [s for s in node.inputs if isinstance(s, Edge) and walk.graph.is_live(s)]
        while pending:
            at = walk.graph.nodes[pending.pop()]
            if at.index in normed:
                return True
            if at.op in kinds.VIEWS and at.inputs:
                pending += [s for s in at.inputs[:1] if isinstance(s, Edge)]
        return False

    def _purpose(self, walk: Walk, node: Node, weight: str) -> Purpose:
        """A tied tensor serves its head: what the other use gets follows from that."""
        for use in walk.graph.uses(weight):
            if use.index != node.index and self.purposes.is_head(use) and use.op not in kinds.EMBEDDINGS:
                return replace(
                    self.purposes.of(node, weight), kind="tied", place=None, scale=float(use.index)
                )
        return self.purposes.of(node, weight)

    def _weight(
        self,
        walk: Walk,
        node: Node,
        weight: str,
        second: float,
        fan_in: float,
        purpose: Purpose,
        target: Target,
        note: Note,
        *,
        direct: bool,
    ) -> float:
        """Write the weight's law, and give E[w²]."""
        second = second if second > 0 else 1.0
        if purpose.kind == "tied":
            head = walk.graph.nodes[int(purpose.scale)]
            read = self.heads.get(head.index, 1.0)
            wanted = self.targets.of(
                walk, head, Purpose("head"), Signal(walk.draws.plain(read, head.index)), has_bias=False
            )
            fan = float(walk.shape(head.inputs[0])[-1]) if head.inputs else fan_in
            target = replace(
                wanted, reason="also the output layer's weight: small, so that logits start small"
            )
            second, fan_in, note = read, fan, replace(note, target=None)
        variance = max(target.second - target.bias_var, 0.0) / (max(fan_in, 1e-9) * second)
        if not direct:
            return self._computed(walk, node, weight, variance, fan_in, target, note)
        if self.book.is_kept(weight):
            return self._rms(weight, variance) ** 2
        entry = self.book.write(weight, "normal", {"std": math.sqrt(variance)}, target.reason, note)
        return entry.std**2 + entry.mean**2 if entry is not None else variance

    def _computed(
        self, walk: Walk, node: Node, weight: str, variance: float, fan: float, target: Target, note: Note
    ) -> float:
        """A weight that is made from parameters: by weight norm, or in a way whose size is not ours."""
        for source in node.arguments.get("weight", ()):
            made = walk.graph.producer(source)
            if made is not None and made.op == "weight_norm":
                packed.weight_norm(self.book, made, variance, fan, target, note)
                return variance
        walk.unknown[node.index] = "its weight is computed from other tensors"
        for name in walk.graph.weights(node):
            tensor = self.book.tensor(name)
            if tensor is not None and tensor.dim() > 1:
                std = 1 / math.sqrt(max(math.prod(tensor.shape[1:]), 1))
                said = "the op that makes the layer's weight from it decides the size: LeCun's variance"
                self.book.write(name, "normal", {"std": std}, said, note)
            else:
                self.book.keep(name, "a part of a weight that is computed: left at the model's own start")
        return variance

    def _bias(self, node: Node) -> str | None:
        """The trainable bias of a layer."""
        role = "input" if node.op in ("addmm", "addmv", "baddbmm", "addbmm") else "bias"
        for source in node.arguments.get(role, ()):
            name = _parameter(self.purposes.graph, source)
            if name is not None:
                return None if self.book.is_kept(name) else name
        return None

    def _bias_law(self, node: Node, weight: str, target: Target) -> float:
        name = self._bias(node)
        if name is None:
            return 0.0
        note = Note(node.op, node.module)
        if target.bias_var > 0 and not self.book.is_kept(weight):
            std = math.sqrt(target.bias_var)
            said = f"carries {target.bias_var / target.second:.1%} of the variance, which keeps it stable"
            entry = self.book.write(name, "normal", {"std": std}, said, note)
        else:
            entry = self.book.write(name, "zeros", {}, "a bias starts at 0", note)
        return entry.std**2 + entry.mean**2 if entry is not None else 0.0

    def _embedding(self, walk: Walk, node: Node, weight: str, purpose: Purpose, target: Target) -> Target:
        factor = 1.0
        readers = walk.graph.consumers(node)
        if len(readers) == 1 and readers[0].op in kinds.SCALINGS:
            from musigma.init.planning._purpose import constant_factor

            factor = constant_factor(readers[0])
        if self._is_logit_bias(walk, node):
            return Target(LOGIT_BIAS**2, "added to attention logits: no place is preferred at the start")
        beside = _added_to(walk, node)
        if beside is not None:
            return Target(
                POSITION**2 * beside.second, "learned positions: a quarter of what they are added to"
            )
        if purpose.kind == "norm":
            return target
        said = "a look-up table: one row is a signal of variance 1"
        return Target(
            1 / factor**2, said if factor == 1 else f"{said} after the factor {factor:.3g} behind it"
        )

    def _is_logit_bias(self, walk: Walk, node: Node) -> bool:
        pending, seen = [node], {node.index}
        while pending and len(seen) < 24:
            at = pending.pop()
            for reader in walk.graph.consumers(at):
                masks = reader.arguments.get("attn_mask", ())
                if reader.op in kinds.SOFTMAXES or any(
                    int(s) == at.index for s in masks if isinstance(s, Edge)
                ):
                    return True
                step = reader.op in kinds.VIEWS | kinds.ELEMENTWISE | kinds.CONCATENATIONS
                if step and reader.index not in seen:
                    seen.add(reader.index)
                    pending.append(reader)
        return False

    def _note(self, node: Node, weight: str, purpose: Purpose, fans: Fans, target: Target) -> Note:
        owner = self.book.owner(weight)
        return Note(
            node.op,
            node.module,
            fans,
            packed.parts(owner),
            purpose.activation.name if purpose.activation is not None else None,
            purpose.norm.module if purpose.norm is not None else None,
            (purpose.place.index, purpose.place.count) if purpose.place is not None else None,
            math.sqrt(target.second),
        )

    def _shape(self, walk: Walk, node: Node, weight: str) -> tuple[tuple[int, ...], bool]:
        """The shape of the weight as the op reads it, and whether it is the parameter itself."""
        for role, sources in node.arguments.items():
            if role in ("input", "bias") and node.op not in ("matmul", "mm", "mv", "bmm", "einsum"):
                continue
            for source in sources:
                if not walk.graph.is_live(source):
                    name = _parameter(walk.graph, source)
                    if name is not None or isinstance(source, Edge):
                        return walk.shape(source), name is not None
        return walk.shape(Parameter(walk.graph.canonical(weight))), True

    def _rms(self, name: str, variance: float = 1.0) -> float:
        tensor = self.book.tensor(name)
        if tensor is None or tensor.is_meta or not tensor.numel():
            return math.sqrt(variance)
        return float(tensor.detach().to(torch.float64).square().mean().sqrt())

    def projection(self, walk: Walk, node: Node, name: str, signal: Signal) -> float:
        """fan_in·Var(W) of one of the projections of torch's own attention."""
        return packed.projection(self.book, node, name, signal)

    def output_projection(self, walk: Walk, node: Node, signal: Signal) -> Signal:
        """What the output projection of torch's own attention gives."""
        name = walk.graph.weights(node)[-1]
        purpose = self.purposes.of(node, name)
        target = self.targets.of(walk, node, purpose, signal, has_bias=False)
        width = float(signal_width(node))
        note = self._note(node, name, purpose, Fans(width, width), target)
        variance = self._weight(
            walk, node, name, signal.second, width, purpose, target, note, direct=True
        )  # fmt: skip
        packed.zero_biases(self.book, node)
        self.sent_back[node.index] = width * variance
        out = self.mixed(walk, node, signal, width * variance, 0.0, units=width, key=2)
        self.expect(walk, node, purpose.kind, signal, out, target, signal.measured, width)
        return out

    def expect_states(self, walk: Walk, node: Node, read: Signal, out: Signal) -> None:
        """Write down what a recurrent layer is expected to give: no theory says how far it strays."""
        self.expect(walk, node, "recurrent", read, out, None, read.measured, 1.0)
        walk.layers[node.index] = replace(walk.layers[node.index], spread=math.nan)

    def recurrence(self, node: Node) -> Iterable[Callable[[Signal], Recurrence]]:
        """The layers of a recurrent op, each decided when it is known what it reads."""
        return packed.recurrence(self.book, node)


def _units(node: Node, weight: tuple[int, ...]) -> float:
    """How many units a layer reads, each with a variance of its own."""
    if node.op in kinds.TRANSPOSED_CONVOLUTIONS:
        return float(weight[0])
    if node.op in kinds.CONVOLUTIONS:
        return float(weight[1] * int(node.options.get("groups", 1) or 1))  # type: ignore[call-overload]
    return float(weight[-1] if node.op == "linear" else min(weight, default=1))


def _spread(walk: Walk, node: Node, out: Signal, fan_in: float) -> float:
    """Standard deviation of log E[z²] of a layer's own units, of which there are only so many.

    Given its weights a unit has the variance wᵀCw, which is 2/fan_in off even over endless places.
    """
    shape = tuple(map(int, node.shapes[0]))
    units = shape[1] if node.op in kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS else shape[-1]
    examples, places = walk.sizes(Edge(node.index))
    own = out.noise(examples, places) + 2 / max(fan_in, 1.0)
    return math.sqrt(out.log_drift**2 + own / max(units, 1))


def signal_width(node: Node) -> int:
    """How many units the first output of a node has."""
    return int(node.shapes[0][-1])


def _read(walk: Walk, node: Node) -> Signal | None:
    found = walk.inputs(node)
    return found[0][1] if found else None


def _parameter(graph: Any, source: Source) -> str | None:
    """The parameter that a source is, itself or through views."""
    while isinstance(source, Edge):
        node = graph.nodes[source]
        if node.op not in kinds.VIEWS or not node.inputs:
            return None
        source = node.inputs[0]
    return source.name if isinstance(source, Parameter) else None


def _is_constant_sum(walk: Walk, node: Node) -> bool:
    """Whether a node adds a parameter to constants alone: `1 + weight`."""
    return not any(walk.graph.is_live(source) for source in node.inputs)


def _added_to(walk: Walk, node: Node) -> Signal | None:
    """The signal that positions are added to, if a look-up is one of positions."""
    graph = walk.graph
    ids = [s for name, sources in node.arguments.items() if name != "weight" for s in sources]
    if any(graph.is_live(source) for source in ids):
        return None
    for reader in graph.consumers(node):
        at, way = reader, node
        while at.op in kinds.VIEWS | kinds.DROPOUTS and graph.consumers(at):
            way, at = at, graph.consumers(at)[0]
        if at.op in kinds.ADDITIONS:
            beside = [s for s in at.inputs if isinstance(s, Edge) and int(s) != way.index]
            found = [walk.signal(s) for s in beside]
            return next((s for s in found if s is not None), None)
    return None


def _looked_up(walk: Walk, node: Node, variance: float) -> Signal:
    """Rows of a table: other places and examples ask for other rows, unless they ask for positions."""
    covariance = variance * torch.eye(3, dtype=torch.float64, device="cpu")
    ids = [s for name, sources in node.arguments.items() if name != "weight" for s in sources]
    if not any(walk.graph.is_live(source) for source in ids):
        covariance[HERE, EXAMPLE] = covariance[EXAMPLE, HERE] = variance
    elif ids:
        start = ids[0]
        while isinstance(start, Edge) and walk.graph.nodes[start].op in kinds.VIEWS:
            start = walk.graph.nodes[start].inputs[0]
        place, example = walk.facts.repeats.get(getattr(start, "name", ""), (0.0, 0.0))
        covariance[HERE, PLACE] = covariance[PLACE, HERE] = variance * place
        covariance[HERE, EXAMPLE] = covariance[EXAMPLE, HERE] = variance * example
    return Signal(walk.draws.normal(covariance, node.index))
