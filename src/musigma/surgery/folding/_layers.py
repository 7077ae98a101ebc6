"""Layers that a scale and a shift of their inputs or outputs can move into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from musigma.graph import Node, Parameter, kinds
from musigma.surgery._places import Observed, why_not_module, why_not_parameter

Edit = Callable[[nn.Module], None]
"""A change of a model in place."""

_WITH_BIAS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_FORWARDS = frozenset(kind.forward for kind in _WITH_BIAS)


@dataclass(frozen=True)
class Layer:
    """One call of a layer whose weight multiplies its input.

    Args:
        node: the call.
        weight: the weight's name.
        bias: the bias's name; where there is none yet, the name that it would get.
        groups: groups of a convolution, 1 elsewhere.
    """

    node: Node
    weight: str
    bias: str
    groups: int

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
        if self.node.op == "linear":
            return weight[None, :, :, None]
        if self.embeds or self.node.op in _PRODUCTS:
            return weight.t()[None, :, :, None]
        blocks = weight.unflatten(0, (self.groups, -1)).flatten(3)
        return blocks.transpose(1, 2) if self.transposed else blocks


_PRODUCTS = frozenset(("addmm", "matmul", "mm"))
_WEIGHTS = {"addmm": "mat2", "matmul": "other", "mm": "mat2"}
_BIASES = {"addmm": "input"}


def layer_of(observed: Observed, node: Node) -> Layer | None:
    """The layer that a node is, or None if it is none whose weight is understood."""
    known = kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS | {"linear", "embedding"} | _PRODUCTS
    if node.op not in known or node.op == "convolution":
        return None
    weight = node.arguments.get(_WEIGHTS.get(node.op, "weight"), ())
    if len(weight) != 1 or not isinstance(weight[0], Parameter):
        return None
    if node.op in _PRODUCTS and (
        observed.model.get_parameter(weight[0].name).ndim != 2
        or node.options.get("alpha", 1) != 1
        or node.options.get("beta", 1) != 1
    ):
        return None
    bias = node.arguments.get(_BIASES.get(node.op, "bias"), ())
    name = weight[0].name.rpartition(".")[0] + ".bias"
    if len(bias) == 1 and isinstance(bias[0], Parameter):
        name = bias[0].name
    groups = node.options.get("groups", 1)
    return Layer(node, weight[0].name, name.lstrip("."), groups if isinstance(groups, int) else 1)


def weight_role(node: Node) -> str:
    """The name under which an op takes its weight."""
    return _WEIGHTS.get(node.op, "weight")


def why_not_layer(observed: Observed, layer: Layer, *, shifts: bool, tied: bool = False) -> str | None:
    """Why a layer's numbers may not be changed, or None.

    Args:
        observed: the model as it ran.
        layer: the layer.
        shifts: whether its bias is to change too.
        tied: whether a tied weight is no obstacle.
    """
    node = layer.node
    reason = why_not_module(observed, node.module) if node.module else None
    if reason is not None:
        return reason
    reason = why_not_parameter(observed, node, weight_role(node))
    if reason is not None and not (tied and "is tied" in reason):
        return reason
    if node.options.get("max_norm") is not None:
        return "it shortens its rows in the forward (max_norm)"
    return _why_no_bias(observed, layer) if shifts and not layer.embeds else None


def _why_no_bias(observed: Observed, layer: Layer) -> str | None:
    role = _BIASES.get(layer.node.op, "bias")
    if layer.node.arguments.get(role):
        return why_not_parameter(observed, layer.node, role)
    owner = observed.model.get_submodule(layer.bias.rpartition(".")[0])
    if type(owner).forward in _FORWARDS and getattr(owner, "bias", 0) is None:
        return None
    return f"it has no bias to take the shift, and {type(owner).__name__} is not known to use one"


def scale_outputs(layer: Layer, scale: Tensor, shift: Tensor) -> Edit:
    """Give a layer the outputs scale · y + shift, one scale and shift a channel."""
    shifts = bool((shift != 0).any())

    def edit(model: nn.Module) -> None:
        blocks = layer.blocks(_exact(model, layer.weight))
        blocks = blocks * scale.reshape(layer.groups, -1, 1, 1).to(blocks.device)
        if layer.embeds:
            blocks = blocks + shift.reshape(1, -1, 1, 1).to(blocks.device)
        assign(model, layer.weight, _unblocked(layer, blocks))
        if not layer.embeds:
            _move_bias(model, layer, scale, shift, shifts)

    return edit


def scale_inputs(layer: Layer, scale: Tensor, shift: Tensor) -> Edit:
    """Let a layer take x where it took scale · x + shift, one scale and shift a channel of its input."""
    shifts = bool((shift != 0).any())

    def edit(model: nn.Module) -> None:
        blocks = layer.blocks(_exact(model, layer.weight))
        along, added = (v.reshape(layer.groups, 1, -1, 1).to(blocks.device) for v in (scale, shift))
        constant = (blocks * added).sum((2, 3)).flatten()
        assign(model, layer.weight, _unblocked(layer, blocks * along))
        _move_bias(model, layer, torch.ones_like(constant), constant, shifts)

    return edit


def _exact(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach().to(torch.float64).contiguous()


def _unblocked(layer: Layer, blocks: Tensor) -> Tensor:
    if layer.node.op == "linear":
        return blocks[0, :, :, 0]
    if layer.embeds or layer.node.op in _PRODUCTS:
        return blocks[0, :, :, 0].t()
    return (blocks.transpose(1, 2) if layer.transposed else blocks).flatten(0, 1)


def _move_bias(model: nn.Module, layer: Layer, scale: Tensor, shift: Tensor, shifts: bool) -> None:
    path, _, attribute = layer.bias.rpartition(".")
    owner = model.get_submodule(path)
    old = getattr(owner, attribute, None)
    if old is not None:
        value = old.detach().to(torch.float64)
        assign(model, layer.bias, value * scale.to(value.device) + shift.to(value.device))
    elif shifts:
        weight = model.get_parameter(layer.weight)
        setattr(owner, attribute, nn.Parameter(shift.to(weight), requires_grad=weight.requires_grad))


def assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Put values into a parameter, in its type and memory format; others on its storage keep theirs."""
    parameter = model.get_parameter(name)
    fresh = torch.empty_like(parameter, memory_format=torch.preserve_format)
    parameter.data = fresh.detach().copy_(value.reshape(parameter.shape))
    parameter.grad = None
