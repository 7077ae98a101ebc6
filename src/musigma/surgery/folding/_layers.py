"""Layers that a scale and a shift of their inputs or outputs can move into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from musigma.graph import Edge, Node, Parameter, Source, kinds
from musigma.statistics import moments
from musigma.surgery._places import Observed, why_not_module, why_not_parameter

Edit = Callable[[nn.Module], None]
"""A change of a model in place."""

_WITH_BIAS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One call of a layer whose weight multiplies its input.

    Args:
        node: the call.
        weight: the weight's name.
        bias: the bias's name; where there is none yet, the name that it would get.
        role: the argument that the weight is.
        bias_role: the argument that the bias is.
        groups: groups of a convolution, 1 elsewhere.
        rows: which rows of weight and bias are meant, first and one past the last; None for all. Attention
            packs three projections into one weight.
    """

    node: Node
    weight: str
    bias: str
    role: str = "weight"
    bias_role: str = "bias"
    groups: int = 1
    rows: tuple[int, int] | None = None

    @property
    def embeds(self) -> bool:
        """Whether its weight is a table of outputs, with no bias beside it."""
        return self.node.op in kinds.EMBEDDINGS

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.node.op in kinds.TRANSPOSED_CONVOLUTIONS

    @property
    def spatial(self) -> int:
        """How many dims follow the channels."""
        return int(self.node.op[-2]) if self.node.op[-1] == "d" else 0

    def axis(self, ndim: int) -> int:
        """The dim of the channels, of the input as of the output."""
        return ndim - self.spatial - 1

    def blocks(self, weight: Tensor) -> Tensor:
        """The weight as (groups, outputs, inputs, taps): a view, where it can be one.

        torch keeps (out, in) for linear, (in, out) for addmm and embedding, (out, in/groups, *taps) for a
        convolution and (in, out/groups, *taps) for a transposed one: the trap that public folds fell into.
        """
        if self.embeds or self.node.op in _PRODUCTS:
            return weight.t()[None, :, :, None]
        if not self.spatial:
            return weight[None, :, :, None]
        blocks = weight.unflatten(0, (self.groups, -1)).flatten(3)
        return blocks.transpose(1, 2) if self.transposed else blocks

    def unblocked(self, blocks: Tensor) -> Tensor:
        """The weight of these blocks; what follows its first two dims is flat."""
        if self.embeds or self.node.op in _PRODUCTS:
            return blocks[0, :, :, 0].t()
        if not self.spatial:
            return blocks[0, :, :, 0]
        return (blocks.transpose(1, 2) if self.transposed else blocks).flatten(0, 1)


_PRODUCTS = frozenset(("addmm", "matmul", "mm"))
# The arguments of an op that are its weight, its bias and its input, where they aren't called so.
_WEIGHTS = {"addmm": "mat2", "matmul": "other", "mm": "mat2"}
_BIASES = {"addmm": "input"}
_SIGNALS = {"addmm": "mat1"}
_PACKED = ("query", "key", "value")


def layer_of(observed: Observed, node: Node) -> Layer | None:
    """The layer that makes a node's output, or None if it is none whose weight is understood."""
    if node.op == "multi_head_attention":
        return _layer(observed, node, "out_proj_weight", "out_proj_bias")
    known = kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | {"linear", "embedding"} | _PRODUCTS
    if node.op not in known or node.op == "convolution":
        return None
    layer = _layer(observed, node, _WEIGHTS.get(node.op, "weight"), _BIASES.get(node.op, "bias"))
    if layer is not None and node.op in _PRODUCTS:
        plain = node.options.get("alpha", 1) == 1 and node.options.get("beta", 1) == 1
        return layer if plain and observed.model.get_parameter(layer.weight).ndim == 2 else None
    return layer


def layers_reading(observed: Observed, node: Node, edge: Edge) -> list[Layer]:
    """The layers that take a value as their input, and as nothing else; none if the node is no such layer."""
    roles = {role for role, sources in node.arguments.items() if _among(edge, sources)}
    if node.op == "multi_head_attention":
        return _packed(observed, node, roles) if roles <= {*_PACKED} else []
    layer = layer_of(observed, node)
    signal = _SIGNALS.get(node.op, "input")
    if layer is None or layer.embeds or roles != {signal} or len(node.arguments[signal]) > 1:
        return []
    return [layer]


def _packed(observed: Observed, node: Node, roles: set[str]) -> list[Layer]:
    found: list[Layer | None] = []
    for place, role in enumerate(_PACKED):
        if role not in roles:
            continue
        # Keys of another size than queries have weights of their own, but still one bias.
        packed = "in_proj_weight" in node.arguments
        layer = _layer(
            observed, node, "in_proj_weight" if packed else f"{role[0]}_proj_weight", "in_proj_bias"
        )
        size = int(node.outputs[0].shape[-1])
        rows = (place * size, (place + 1) * size)
        found.append(None if layer is None or not packed else replace(layer, rows=rows))
    return [layer for layer in found if layer is not None] if None not in found else []


def _among(edge: Edge, sources: Sequence[Source]) -> bool:
    return any(isinstance(s, Edge) and s.key == edge.key for s in sources)


def _layer(observed: Observed, node: Node, role: str, bias_role: str) -> Layer | None:
    weight, bias = node.arguments.get(role, ()), node.arguments.get(bias_role, ())
    if len(weight) != 1 or not isinstance(weight[0], Parameter):
        return None
    own = _own_name(observed, node, weight[0].name)
    name = (own.rpartition(".")[0] + ".bias").lstrip(".")
    if len(bias) == 1 and isinstance(bias[0], Parameter):
        name = bias[0].name
    groups = node.options.get("groups", 1)
    return Layer(node, own, name, role, bias_role, groups if isinstance(groups, int) else 1)


def _own_name(observed: Observed, node: Node, name: str) -> str:
    """The name that a layer's own module has for its weight, which may have others by being tied."""
    group = next(group for group in observed.graph.parameters if group[0] == name)
    prefix = f"{node.module}." if node.module else ""
    return next((n for n in group if n.rpartition(".")[0] == node.module and n.startswith(prefix)), name)


def can_untie(observed: Observed, layer: Layer) -> bool:
    """Whether a layer shares its weight with embeddings only, as the head of a language model does."""
    group = next(group for group in observed.graph.parameters if layer.weight in group)
    others = [n for n in observed.graph.consumers(Parameter(group[0])) if n.index != layer.node.index]
    own = layer.weight.rpartition(".")[0] == layer.node.module
    return len(group) > 1 and own and all(n.op in kinds.EMBEDDINGS for n in others)


def untie(layer: Layer) -> Edit:
    """Give a layer a weight of its own, and a transformers model a configuration that knows."""

    def edit(model: nn.Module) -> None:
        path, _, attribute = layer.weight.rpartition(".")
        owner = model.get_submodule(path)
        shared = getattr(owner, attribute)
        own = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        setattr(owner, attribute, own)
        for module in model.modules():
            config = getattr(module, "config", None)
            # Or loading what was saved would tie it again.
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False  # type: ignore[union-attr]

    return edit


def why_not_layer(
    observed: Observed, layer: Layer, *, shifts: bool, untied: frozenset[str] = frozenset()
) -> str | None:
    """Why a layer's numbers may not be changed, or None.

    Args:
        observed: the model as it ran.
        layer: the layer.
        shifts: whether its bias is to change too.
        untied: layers that have, or will have, a weight of their own.
    """
    node = layer.node
    reason = why_not_module(observed, node.module) if node.module else None
    if reason is None and node.module not in untied:
        reason = why_not_parameter(observed, node, layer.role)
    if reason is not None:
        return reason
    if node.options.get("max_norm") is not None:
        return "it shortens its rows in the forward (max_norm)"
    return _why_no_bias(observed, layer) if shifts and not layer.embeds else None


def _why_no_bias(observed: Observed, layer: Layer) -> str | None:
    if layer.node.arguments.get(layer.bias_role):
        return why_not_parameter(observed, layer.node, layer.bias_role)
    owner = observed.model.get_submodule(layer.bias.rpartition(".")[0])
    if isinstance(owner, _WITH_BIAS) and owner._parameters.get("bias", 0) is None:
        return None  # a subclass's own forward may ignore it, which the certificate would see
    return f"it has no bias to take the shift, and {type(owner).__name__} is not known to use one"


def scale_outputs(layer: Layer, scale: Tensor, shift: Tensor) -> Edit:
    """Give a layer the outputs scale · y + shift, one scale and shift a channel."""
    shifts = bool((shift != 0).any())

    def edit(model: nn.Module) -> None:
        blocks = layer.blocks(_exact(model, layer.weight, layer.rows))
        blocks = blocks * scale.reshape(layer.groups, -1, 1, 1).to(blocks.device)
        if layer.embeds:
            blocks = blocks + shift.reshape(1, -1, 1, 1).to(blocks.device)
        assign(model, layer.weight, layer.unblocked(blocks), layer.rows)
        if not layer.embeds:
            _move_bias(model, layer, scale, shift, shifts)

    return edit


def scale_inputs(layer: Layer, scale: Tensor, shift: Tensor) -> Edit:
    """Let a layer take x where it took scale · x + shift, one scale and shift a channel of its input."""
    shifts = bool((shift != 0).any())

    def edit(model: nn.Module) -> None:
        blocks = layer.blocks(_exact(model, layer.weight, layer.rows))
        along, added = (v.reshape(layer.groups, 1, -1, 1).to(blocks.device) for v in (scale, shift))
        constant = (blocks * added).sum((2, 3)).flatten()
        assign(model, layer.weight, layer.unblocked(blocks * along), layer.rows)
        _move_bias(model, layer, torch.ones_like(constant), constant, shifts)

    return edit


def center_outputs(layer: Layer) -> Edit:
    """Take the mean over its output channels out of what a layer gives."""

    def edit(model: nn.Module) -> None:
        blocks = layer.blocks(_exact(model, layer.weight, layer.rows))
        assign(model, layer.weight, layer.unblocked(_centered(blocks, 1)), layer.rows)
        path, _, attribute = layer.bias.rpartition(".")
        if not layer.embeds and getattr(model.get_submodule(path), attribute, None) is not None:
            assign(model, layer.bias, _centered(_exact(model, layer.bias, layer.rows), 0), layer.rows)

    return edit


def center_tensor(name: str, axis: int) -> Edit:
    """Take the mean over one axis out of a parameter or buffer."""

    def edit(model: nn.Module) -> None:
        path, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), attribute)
        value = tensor.detach().to(torch.float64)
        tensor.data = _centered(value, axis % value.ndim).to(tensor)

    return edit


def _centered(value: Tensor, dim: int) -> Tensor:
    mean = moments(value, dim, keepdim=True).mean
    return value - mean


def _exact(model: nn.Module, name: str, rows: tuple[int, int] | None) -> Tensor:
    value = model.get_parameter(name).detach().to(torch.float64).contiguous()
    return value if rows is None else value[slice(*rows)]


def _move_bias(model: nn.Module, layer: Layer, scale: Tensor, shift: Tensor, shifts: bool) -> None:
    path, _, attribute = layer.bias.rpartition(".")
    owner = model.get_submodule(path)
    if getattr(owner, attribute, None) is not None:
        value = _exact(model, layer.bias, layer.rows)
        moved = value * scale.to(value.device) + shift.to(value.device)
        assign(model, layer.bias, moved, layer.rows)
    elif shifts:
        weight = model.get_parameter(layer.weight)
        setattr(owner, attribute, nn.Parameter(shift.to(weight), requires_grad=weight.requires_grad))


def assign(model: nn.Module, name: str, value: Tensor, rows: tuple[int, int] | None = None) -> None:
    """Put values into a parameter, in its type and memory format; others on its storage keep theirs."""
    parameter = model.get_parameter(name)
    fresh = (
        torch.empty_like(parameter, memory_format=torch.preserve_format).detach().copy_(parameter.detach())
    )
    part = fresh if rows is None else fresh[slice(*rows)]
    part.copy_(value.reshape(part.shape))
    parameter.data = fresh
    parameter.grad = None
