"""Every normalization call: what it divides by, over how many values, and what it remembers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from musigma.graph import Node
from musigma.statistics import Moments, moments

__all__ = ["NormMeasure", "measure_norm"]

# The positional parameters of torch.nn.functional's norms, which musigma.functional's share.
_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "instance_norm": (
        "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps",
    ),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {"training": False, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5}


@dataclass(frozen=True)
class NormMeasure:
    """One call of a normalization op.

    Args:
        node: the graph node.
        kind: "batch_norm", "instance_norm", "layer_norm", "group_norm" or "rms_norm".
        path: qualified name of the module that ran it; the function's caller where there is no norm module.
        module: that module.
        batch_statistics: whether it normalizes with the moments of its input (False: with running ones).
        statistics: moments of its input over the axes it normalizes, whether it used them or not; one per
            channel for batch_norm, per example and channel for instance_norm, per row for layer_norm and
            rms_norm, per example and group for group_norm.
        elements: how many values each statistic is taken over.
        running_mean: as it was before this call; None where there is none.
        running_var: likewise.
        momentum: torch's (the weight of the new value), None for cumulative or where it has none.
        eps: what is added to the variance.
        weight: (channels,) or None.
        dtype: of its input.
        tracked: `num_batches_tracked` before this call; None where it isn't counted.
    """

    node: Node
    kind: str
    path: str
    module: nn.Module = field(repr=False)
    batch_statistics: bool
    statistics: Moments
    elements: int
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float | None
    eps: float | None
    weight: Tensor | None
    dtype: torch.dtype
    tracked: int | None


def bind(node: Node, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a norm call by name; None where it is no norm of torch.nn.functional's form."""
    names = _SIGNATURES.get(node.op)
    if names is None:
        return None
    bound = {**_DEFAULTS, **dict(zip(names, args, strict=False)), **kwargs}
    return bound if isinstance(bound.get("input"), Tensor) else None


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of every module as they are now."""
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    return {n: b.detach().clone() for n, b in model.named_buffers() if n.rpartition(".")[2] in kinds}


def measure_norm(
    model: nn.Module, before: Mapping[str, Tensor], node: Node, args: Any, kwargs: Any
) -> Iterator[NormMeasure]:
    """Measure one call if it is a normalization, else yield nothing.

    Args:
        model: what is running.
        before: its running statistics before the run, see `buffers_of`.
        node: the call.
        args: its live arguments.
        kwargs: likewise.
    """
    bound = bind(node, args, kwargs)
    if bound is None:
        return
    x, kind, module = bound["input"], node.op, model.get_submodule(node.module)
    view, dims = _statistic_axes(kind, x.detach(), bound)
    statistics = moments(view, dims)
    own = (
        bound["training"]
        if kind == "batch_norm"
        else bound["use_input_stats"]
        if kind == "instance_norm"
        else True
    )
    prefix = f"{node.module}." if node.module else ""
    tracked = before.get(f"{prefix}num_batches_tracked")
    yield NormMeasure(
        node=node,
        kind=kind,
        path=node.module,
        module=module,
        batch_statistics=bool(own),
        statistics=statistics,
        elements=int(statistics.count.max()) if statistics.count.numel() else 0,
        running_mean=before.get(f"{prefix}running_mean", _keep(bound.get("running_mean"))),
        running_var=before.get(f"{prefix}running_var", _keep(bound.get("running_var"))),
        momentum=getattr(module, "momentum", bound["momentum"])
        if kind in ("batch_norm", "instance_norm")
        else None,
        eps=bound["eps"],
        weight=_keep(bound.get("weight")),
        dtype=x.dtype,
        tracked=None if tracked is None else int(tracked),
    )


def _keep(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


def _statistic_axes(kind: str, x: Tensor, bound: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    if kind == "batch_norm":
        return x, [d for d in range(x.ndim) if d != 1]
    if kind == "instance_norm":
        return x, list(range(2, x.ndim))
    if kind == "group_norm":
        groups = x.reshape(x.shape[0], bound["num_groups"], -1)
        return groups, [2]
    return x, list(range(x.ndim - len(bound["normalized_shape"]), x.ndim))
