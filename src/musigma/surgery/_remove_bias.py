"""Remove the biases that a normalization subtracts again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from musigma.graph import Buffer, kinds, unwrap
from musigma.surgery._cancelled import CancelledBias, cancelled_biases
from musigma.surgery._certificate import Certificate, certified

# Layers whose forward takes None for a bias.
_LAYERS = frozenset(("linear", "bilinear")) | kinds.CONVOLUTIONS | kinds.TRANSPOSED_CONVOLUTIONS


def remove_bias(model: nn.Module, example: Any) -> tuple[nn.Module, Certificate]:
    """Remove every bias that a BatchNorm or InstanceNorm behind it subtracts again.

        BN(Wx + b) = BN(Wx)   while it trains;   running_mean ← running_mean − b   for test time

    Args:
        model: any module; left as it is.
        example: what the model is called with: a tensor, a tuple of arguments or a dict of keywords.

    Returns:
        a copy without the dead biases, and the certificate: same outputs in train and in eval mode.

    Raises:
        CertificateError: the outputs moved; nothing was changed.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())
        >>> lighter, certificate = ms.surgery.remove_bias(net, torch.randn(8, 4))
        >>> lighter[0].bias is None, net[0].bias is None
        (True, False)

    References:
        Ioffe & Szegedy 2015, section 3.2.
    """
    found = cancelled_biases(model, example, absorbed=True)
    reasons = {bias.name: why_it_stays(model, bias) for bias in found}
    dead = [bias for bias in found if reasons[bias.name] is None]

    def change(twin: nn.Module) -> None:
        for bias in dead:
            take_out(twin, bias)

    changed = tuple(
        f"{d.name}: {unwrap(model).get_parameter(d.name).numel()} values that "
        f"{d.norms[0].module or 'the model'} ({d.norms[0].op}) subtracts again"
        for d in dead
    )
    refused = tuple(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    return certified("remove_bias", model, change, example, changed=changed, refused=refused)


def take_out(model: nn.Module, bias: CancelledBias) -> None:
    """Remove a cancelled bias, in place."""
    _shift_running_means(model, bias)
    owner, _, attribute = bias.name.rpartition(".")
    setattr(unwrap(model).get_submodule(owner), attribute, None)


def why_it_stays(model: nn.Module, bias: CancelledBias) -> str | None:
    """Why a cancelled bias can't be removed, or None."""
    others = [node.op for node in bias.nodes if node.op not in _LAYERS]
    if others:
        return f"{others[0]} adds it, which has to be changed in the model's code"
    if bias.others:
        other = bias.others[0]
        return (
            f"its norm's running mean is also read by {other.op} in {other.module or 'the model'}, of values "
            "without this bias"
        )
    inner = unwrap(model)
    own = inner.get_parameter(bias.name)
    tied = [name for name, p in inner.named_parameters(remove_duplicate=False) if p is own]
    return f"it is tied: {', '.join(tied)}" if len(tied) > 1 else None


def _shift_running_means(model: nn.Module, bias: CancelledBias) -> None:
    """Take the bias out of what its norms subtract at test time, once from every running mean."""
    model = unwrap(model)
    value = model.get_parameter(bias.name).detach().flatten().to(torch.float64)
    shifts: dict[str, torch.Tensor] = {}
    for norm, elements in zip(bias.norms, bias.elements, strict=True):
        for source in norm.arguments.get("running_mean", ()):
            if isinstance(source, Buffer):
                channels = elements.transpose(0, 1).flatten(1)[:, 0].to(value.device)
                shifts[source.name] = value[channels]
    for name, shift in shifts.items():
        running = model.get_buffer(name)
        running.copy_(running.to(torch.float64) - shift)
