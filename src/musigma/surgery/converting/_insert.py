"""Put a normalization into a trained network without changing what it computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

import musigma.nn as layers
from musigma.graph import unwrap
from musigma.nn import restore_identity_
from musigma.statistics import Moments, moments
from musigma.surgery._certificate import Certificate
from musigma.surgery._layers import duplicate, materialized
from musigma.surgery.converting._convert import calibration_data
from musigma.surgery.converting._fit import calls_of
from musigma.surgery.converting._judged import judged
from musigma.surgery.converting._kinds import default_groups

Kind = Literal["batchnorm", "layernorm", "rmsnorm", "groupnorm", "instancenorm"]
SUFFIX = "_norm"
_FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)


def insert(
    model: nn.Module,
    example: Any,
    *,
    after: str | Sequence[str],
    kind: Kind = "batchnorm",
    eps: float = 1e-5,
    groups: int | None = None,
    loader: Any = None,
    max_batches: int | None = None,
) -> tuple[nn.Module, Certificate]:
    """Put a normalization behind layers of a trained network, which computes what it did: it undoes itself.

        weight = √(σ² + eps),   bias = μ

    with μ and σ² of what the layer gives on the data. For a BatchNorm they are its running statistics, and in
    evaluation the network is the same for any input. A norm of examples has one weight for all of them, so it
    can be undone only where their moments agree, and is refused else, with what they are.

    In an `nn.Sequential` the norm stands behind its layer under the layer's name and ``_norm``, and no
    other name changes. Elsewhere the layer and its norm are put into a Sequential in the layer's place, with
    names ``layer`` and ``norm``.

    Args:
        model: a trained module; left as it is.
        example: what the model is called with.
        after: qualified names of the layers.
        kind: "batchnorm", "layernorm", "rmsnorm", "groupnorm" or "instancenorm".
        eps: of the norm, in units of its input².
        groups: of a GroupNorm; as in `convert` if None.
        loader: what to measure on: batches as in `recalibrate`, kept in memory. The example if None.
        max_batches: read only so many.

    Returns:
        a copy with the norms, and the certificate: outputs in evaluation are what they were on the data, and
        for a BatchNorm on random inputs.

    Raises:
        ValueError: no such layer, a layer that the data do not reach or that gives no tensor, features in
            the last dim of a sequence, which no BatchNorm takes, or moments that do not agree.
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        >>> normed, certificate = ms.surgery.insert(net, x, after="0")
        >>> list(normed._modules), torch.allclose(normed.eval()(x), net(x), atol=1e-6)
        (['0', '0_norm', '1'], True)

    References:
        Ioffe & Szegedy 2015, "Batch Normalization", section 3, on restoring the identity.
    """
    before = duplicate(unwrap(materialized(model, example)))
    data = calibration_data(before, example, loader, max_batches)
    names = [after] if isinstance(after, str) else list(after)
    twin = duplicate(before)
    modules = dict(twin.named_modules())
    missing = [name for name in names if not name or name not in modules]
    if missing:
        raise ValueError(
            f"after must name modules inside the model, got {missing[0]!r}; it has {list(modules)[1:]}"
        )
    changed: list[str] = []
    for name in names:
        norm = _norm(before, name, data, kind, eps, groups).train(modules[name].training)
        changed.append(f"{name}: {type(norm).__name__} behind it, {_put(twin, modules[name], norm)}")
    general = kind == "batchnorm"
    certificate = judged(
        "insert",
        before,
        twin,
        data,
        changed=changed,
        refused=(),
        exact=True,
        anywhere=general,
        notes=("in training a BatchNorm normalizes by its batch",) if general else (),
    )
    return twin, certificate


def _norm(
    model: nn.Module, name: str, data: Sequence[Any], kind: Kind, eps: float, groups: int | None
) -> nn.Module:
    """The norm that undoes itself on what a layer gives."""
    outputs = [y for batch in data for y in calls_of(model, name, batch, lambda _, y: y)]
    if any(not isinstance(y, Tensor) or not y.is_floating_point() for y in outputs):
        raise ValueError(
            f"{name} gives no tensor of floats but {type(outputs[0]).__name__}: nothing to normalize"
        )
    if not outputs:
        raise ValueError(f"the data do not reach {name}, so there is nothing to measure")
    layer = list(model.get_submodule(name).modules())[-1]
    last = isinstance(layer, _FEATURES_LAST)
    dims = {y.dim() for y in outputs}
    if last and max(dims) > 2 and kind not in ("layernorm", "rmsnorm"):
        raise ValueError(
            f"{name} gives sequences of shape {tuple(outputs[0].shape)} with the features last, and {kind} "
            "takes them at dim 1; insert a 'layernorm' or 'rmsnorm'"
        )
    if len(dims) > 1 or not min(dims) > 1:
        raise ValueError(
            f"{name} must give tensors (n, c, ...) of one number of dims; got {sorted(dims)} dims"
        )
    shape = outputs[0].shape
    spatial, width = len(shape) - 2, shape[1]
    options: dict[str, Any] = {"eps": eps, "device": outputs[0].device, "dtype": outputs[0].dtype}
    if kind == "batchnorm":
        return _batch_norm(outputs, max(spatial, 1), options)
    together = torch.cat([y.flatten(0, -len(y.shape[1:]) - 1) for y in outputs])
    return restore_identity_(_per_example(kind, width, shape, last, groups, options), together)


def _batch_norm(outputs: Sequence[Tensor], spatial: int, options: dict[str, Any]) -> nn.Module:
    total = Moments.merge(moments(y, [0, *range(2, y.dim())]) for y in outputs)
    norm: Any = getattr(layers, f"BatchNorm{spatial}d")(outputs[0].shape[1], **options).eval()
    var = total.var(correction=1)
    with torch.no_grad():
        norm.running_mean.copy_(total.mean)
        norm.running_var.copy_(
            torch.where(var.isnan(), total.var(), var)
        )  # one value has no unbiased variance
        norm.num_batches_tracked.fill_(len(outputs))
    return restore_identity_(norm, outputs[0])


def _per_example(
    kind: Kind,
    width: int,
    shape: Sequence[int],
    last: bool,
    groups: int | None,
    options: dict[str, Any],
) -> nn.Module:
    spatial = len(shape) - 2
    if kind == "groupnorm":
        positions = int(torch.Size(shape[2:]).numel())
        return layers.GroupNorm(
            default_groups(width, positions) if groups is None else groups, width, **options
        )
    if kind == "instancenorm":
        if not spatial:
            raise ValueError(f"InstanceNorm would normalize single values: inputs of shape {tuple(shape)}")
        norm: nn.Module = getattr(layers, f"InstanceNorm{spatial}d")(width, affine=True, **options)
        return norm
    if last or not spatial:
        return (layers.LayerNorm if kind == "layernorm" else layers.RMSNorm)(shape[-1], **options)
    if kind == "rmsnorm":
        raise ValueError(
            f"RMSNorm takes its features in the last dim, and here they are at dim 1 of {tuple(shape)}"
        )
    found: nn.Module = getattr(layers, f"LayerNorm{spatial}d")(width, **options)
    return found


def _put(model: nn.Module, layer: nn.Module, norm: nn.Module) -> str:
    """Let the norm follow the layer wherever that stands, and say under which name."""
    named: dict[str, None] = {}
    for path, parent in list(model.named_modules()):
        slots = [name for name, child in parent._modules.items() if child is layer]
        for slot in slots:
            prefix = f"{path}." if path else ""
            if type(parent) is nn.Sequential:
                parent._modules = _behind(parent._modules, slot, norm)
                named[f"{prefix}{slot}{SUFFIX}"] = None
            else:
                parent._modules[slot] = nn.Sequential(OrderedDict(layer=layer, norm=norm))
                named[f"{prefix}{slot}.norm"] = None
    return f"as {', '.join(named)}"


def _behind(modules: Any, slot: str, norm: nn.Module) -> Any:
    new: dict[str, nn.Module | None] = {}
    for name, child in modules.items():
        new[name] = child
        if name == slot:
            new[f"{slot}{SUFFIX}"] = norm
    return new
