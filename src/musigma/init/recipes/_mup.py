"""μP: spreads and learning rates that keep their meaning when a model is made wider."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from musigma.graph import Graph, Node, kinds
from musigma.init._names import slots
from musigma.init.recipes._recipe import Weights, changed, graph_of, redrawn, register
from musigma.init.recipes._structure import heads

if TYPE_CHECKING:
    from musigma.init.planning import Entry, Plan

_SOURCE = "Yang et al. 2021, table 3"
OPTIMIZERS = ("adam", "sgd")


@dataclass(frozen=True)
class Growth:
    """How much larger a tensor's layer is than the base model's, on each side.

    Attributes:
        inputs: ratio of the fan-ins; 1 where the number of inputs doesn't grow with the width.
        outputs: the same for the outputs.
    """

    inputs: float = 1.0
    outputs: float = 1.0

    @property
    def role(self) -> str:
        """ "input", "hidden" or "output", or "fixed" for what doesn't grow."""
        if self.inputs != 1:
            return "hidden" if self.outputs != 1 else "output"
        return "input" if self.outputs != 1 else "fixed"

    def lr(self, optimizer: str) -> float:
        """The factor of the learning rate.

        Formula: Adam: 1/r_in. SGD: r_out/r_in; both 1 for what doesn't grow on that side.
        """
        return 1 / self.inputs if optimizer == "adam" else self.outputs / self.inputs


@dataclass(frozen=True)
class Mup:
    """The maximal update parametrization, relative to a base width at which nothing changes.

    With r the ratio of a layer's width to the base model's (table 3 of the paper, written relatively):

    | | std of the auto plan times | lr for Adam | lr for SGD |
    |---|---|---|---|
    | input layer, embedding, bias, norm | 1 | 1 | r |
    | hidden layer | 1 | 1/r | 1 |
    | output layer | 1/√r | 1/r | 1/r |

    The auto plan's own std already goes as 1/√fan_in. The factors of the learning rate are in
    `plan.lr_scale`; `param_groups(model, plan, lr)` makes an optimizer's groups of them. Attention has to
    divide its logits by the width of a head, not by its root, if that grows; an output layer tied to the
    embedding has to multiply its logits by 1/r in `forward` (both are said in the notes).

    Args:
        base_width: width of the base model: the inputs of its output layer.
        base: the base model itself, on any device: what grows is then read off the shapes.
        width: this model's width; default: the inputs of its output layer.

    Example:
        >>> import torch, musigma as ms
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> make = lambda n: Sequential(Linear(8, n), ReLU(), Linear(n, 2))
        >>> plan = ms.init.plan(make(256), torch.randn(4, 8), scheme=ms.init.Mup(base_width=64))
        >>> plan.lr_scale["adam"]["0.weight"], plan.lr_scale["adam"]["2.weight"]
        (1.0, 0.25)

    References:
        Yang et al. 2021, Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter
        Transfer, table 3 and appendix B.
    """

    base_width: int | None = None
    base: nn.Module | None = None
    width: int | None = None
    name: str = "mup"

    def __post_init__(self) -> None:
        if self.base is not None and self.base_width is not None:
            raise ValueError("μP needs a base model or a base width, not both")
        for name in ("base_width", "width"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def __call__(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan with μP's laws and `lr_scale`; see `Recipe`."""
        if self.base is None and self.base_width is None:
            raise ValueError(
                "μP needs to know what the model is wider than: pass scheme=musigma.init.Mup(base_width=…), "
                "or Mup(base=…) with a model of the width that the learning rate was tuned at"
            )
        graph, weights = graph_of(plan), Weights(plan, model)
        by_shape = self.base is not None
        growth = self._by_shape(graph, model) if by_shape else self._by_role(graph, weights, model)
        entries, notes = {}, _notes(graph, growth)
        for entry in plan.entries:
            grown = growth.get(entry.tensor, Growth())
            tied = entry.op in kinds.EMBEDDINGS and _is_head(graph, entry)
            if tied and grown.outputs != 1:
                notes.append(_TIED.format(entry.tensor, grown.outputs))
                # The auto plan's is the head's, 1/√width; a look-up adds up one row, whatever the width.
                entries[entry.tensor] = _times(entry, math.sqrt(grown.outputs), "a tied embedding: √r")
            elif grown.role == "output" and entry.std > 0:
                factor = 1 / math.sqrt(grown.inputs)
                entries[entry.tensor] = _times(entry, factor, f"output layer: 1/√{grown.inputs:g}")
        scales = {o: {n: g.lr(o) for n, g in growth.items()} for o in OPTIMIZERS}
        return dataclasses.replace(changed(plan, entries, notes, scheme=self.name), lr_scale=scales)

    def _by_shape(self, graph: Graph, model: nn.Module) -> dict[str, Growth]:
        assert self.base is not None
        small = {slot.name: tuple(slot.parameter.shape) for slot in slots(self.base)}
        large = {slot.name: tuple(slot.parameter.shape) for slot in slots(model)}
        if small.keys() != large.keys() or any(len(small[n]) != len(large[n]) for n in small):
            odd = sorted(small.keys() ^ large.keys()) or [n for n in small if len(small[n]) != len(large[n])]
            raise ValueError(
                f"the base model must have the model's parameters in other widths, but {odd[0]!r} is in one "
                f"of them only; build both by the same code with another width"
            )
        found = {}
        for name, shape in large.items():
            axes = _axes(graph, name, len(shape))
            found[name] = Growth(*(1.0 if a is None else shape[a] / small[name][a] for a in axes))
        return found

    def _by_role(self, graph: Graph, weights: Weights, model: nn.Module) -> dict[str, Growth]:
        last = heads(graph)
        if not last:
            raise ValueError("μP needs an output layer, but none of the weight layers' outputs is returned")
        width = self.width or max(weights.fans(entry).fan_in for entry in weights.of(last))
        assert self.base_width is not None
        r = width / self.base_width
        outputs = {graph.canonical(n) for node in last for n in (*graph.weights(node), *node.parameters)}
        inputs = {graph.canonical(n) for node in _first(graph) for n in graph.weights(node)}
        found = {}
        for slot in slots(model):
            name = graph.canonical(slot.name)
            at_end = name in outputs
            looked_up = any(n.op in kinds.EMBEDDINGS for n in graph.uses(slot.name))
            matrix = slot.parameter.dim() > 1
            grows_in = matrix and name not in inputs and not looked_up and _has_inputs(graph, slot.name)
            grows_out = slot.parameter.numel() > 1 and (looked_up or not at_end)
            found[slot.name] = Growth(r if grows_in else 1.0, r if grows_out else 1.0)
        return found


_TIED = (
    "{} is embedding and output layer: μP wants its logits multiplied by 1/{:g} in forward, and takes their "
    "learning rate for the embedding's"
)


def _times(entry: Entry, factor: float, said: str) -> Entry:
    return redrawn(entry, "normal", f"{entry.reason}; {said} ({_SOURCE})", std=entry.std * factor)


def _is_head(graph: Graph, entry: Entry) -> bool:
    return any(entry.tensor in {graph.canonical(n) for n in graph.weights(node)} for node in heads(graph))


def _has_inputs(graph: Graph, name: str) -> bool:
    """Whether a tensor multiplies features (a table of positions or a token doesn't)."""
    return any(name in _all_names(graph, graph.weights(node)) for node in graph.uses(name))


def _all_names(graph: Graph, names: tuple[str, ...]) -> set[str]:
    groups = {group[0]: group for group in graph.parameters}
    return {name for n in names for name in groups[graph.canonical(n)]}


def _first(graph: Graph) -> list[Node]:
    """The weight layers that no other weight layer lies before."""
    layers = {node.index for node in graph.weight_layers()}
    return [n for n in graph.weight_layers() if not (graph.ancestors(n) - {n.index}) & layers]


def _axes(graph: Graph, name: str, dims: int) -> tuple[int | None, int | None]:
    """Which dimensions of a tensor run over its layer's inputs and outputs."""
    if dims == 0:
        return None, None
    uses = graph.uses(name)
    if dims == 1 or not _has_inputs(graph, name) or any(n.op in kinds.EMBEDDINGS for n in uses):
        return None, dims - 1 if dims < 3 else None
    swapped = any(
        n.op in kinds.TRANSPOSED_CONVOLUTIONS or (n.op in kinds.PRODUCTS and "weight" not in n.arguments)
        for n in uses
    )
    return (0, 1) if swapped else (1, 0)


def _notes(graph: Graph, growth: Mapping[str, Growth]) -> list[str]:
    attends = any(node.op in kinds.ATTENTIONS | kinds.SOFTMAXES for node in graph)
    if not attends or all(g.role == "fixed" for g in growth.values()):
        return []
    return [
        "μP: attention has to divide its logits by the width of a head, not by its root, if heads get wider; "
        "nothing to do if there are more of them instead"
    ]


def param_groups(
    model: nn.Module, plan: Plan, lr: float, *, optimizer: str = "adam", weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, with the learning rates that a plan asks for.

    Formula: lr·`plan.lr_scale[optimizer][name]`; a decoupled weight decay is divided by the same factor, so
    that lr·weight_decay stays what it was.

    Args:
        model: the planned model.
        plan: its plan; without `lr_scale` all get the same learning rate.
        lr: learning rate of the base model.
        optimizer: "adam" (and its relatives) or "sgd".
        weight_decay: decoupled, as `torch.optim.AdamW` has it; left out if None.

    Returns:
        Groups of trainable parameters, for the optimizer's first argument.

    Raises:
        ValueError: an unknown optimizer.

    Example:
        >>> import torch, musigma as ms
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> make = lambda n: Sequential(Linear(8, n), ReLU(), Linear(n, 2))
        >>> model = make(256)
        >>> plan = ms.init.initialize(model, torch.randn(4, 8), scheme=ms.init.Mup(base_width=64))
        >>> groups = ms.init.param_groups(model, plan, lr=0.01)
        >>> [(group["lr"], len(group["params"])) for group in groups]
        [(0.01, 3), (0.0025, 1)]

    References:
        Yang et al. 2021, table 3 and appendix B.3 (weight decay).
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {list(OPTIMIZERS)}, got {optimizer!r}")
    scales = plan.lr_scale.get(optimizer, {})
    groups: dict[float, dict[str, Any]] = {}
    for slot in slots(model):
        if slot.parameter.requires_grad:
            factor = scales.get(slot.name, 1.0)
            group = groups.setdefault(factor, {"params": [], "lr": lr * factor})
            group["params"].append(slot.parameter)
            if weight_decay is not None:
                group["weight_decay"] = weight_decay / factor
    return list(groups.values())


register(Mup())
