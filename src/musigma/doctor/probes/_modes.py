"""The same batch in train and in eval mode, with dropout and other noise averaged out over draws."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from musigma.doctor.probes import _calls
from musigma.statistics import Moments, moments

__all__ = ["Gap", "ModesCompared", "compare_modes"]

# Averaging d draws leaves 1/√d of the noise; the estimate of that remainder is subtracted, so few are enough.
_DRAWS = 8


@dataclass(frozen=True)
class Gap:
    """How far one output in train mode is from the same output in eval mode.

    Args:
        difference: root mean square of (mean over draws in train mode − eval mode), with the part that the
            remaining noise explains taken off; in units of the output.
        scale: standard deviation of the output in eval mode.
        noise: standard error of the train-mode mean over draws, root mean square.
    """

    difference: float
    scale: float
    noise: float

    @property
    def relative(self) -> float:
        """The difference in units of the larger of scale and noise; infinite where both are 0."""
        unit = max(self.scale, self.noise)
        return self.difference / unit if unit else float("inf") if self.difference else 0.0


@dataclass(frozen=True)
class ModesCompared:
    """Train mode against eval mode.

    Args:
        output: the gap of the model's output.
        layers: module path -> gap, for every module with running statistics, in execution order. A layer's
            gap includes what the layers before it caused.
        draws: how many train-mode forwards were averaged.
        failure: what the train-mode forward raised, if it did (a batch of one in a BatchNorm).
    """

    output: Gap
    layers: Mapping[str, Gap]
    draws: int
    failure: Exception | None = None


def compare_modes(model: nn.Module, inputs: Any) -> ModesCompared | None:
    """Run a copy in both modes; None where the model has no floating output."""
    twin = copy.deepcopy(model)
    watched = {n: m for n, m in twin.named_modules() if getattr(m, "running_mean", None) is not None}
    reference = _outputs(twin.eval(), watched, inputs, seed=0)
    if not reference[""].numel():
        return None
    # In train mode running statistics move; they don't enter the outputs of that mode.
    twin.train()
    try:
        drawn = [_outputs(twin, watched, inputs, seed=s) for s in (0, 1)]
        if not torch.equal(drawn[0][""], drawn[1][""]):
            drawn += [_outputs(twin, watched, inputs, seed=s) for s in range(2, _DRAWS)]
    except (ValueError, RuntimeError) as failure:
        return ModesCompared(Gap(float("nan"), float("nan"), float("nan")), {}, 0, failure)
    gaps = {name: _gap([d[name] for d in drawn], reference[name]) for name in reference if name in drawn[0]}
    return ModesCompared(gaps.pop(""), gaps, len(drawn))


def _outputs(
    model: nn.Module, watched: Mapping[str, nn.Module], inputs: Any, *, seed: int
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            found.setdefault(name, _flat(output))

        return hook

    handles = [m.register_forward_hook(keep(n)) for n, m in watched.items() if n]
    try:
        with torch.no_grad(), _calls.forked_rng(model, seed):
            output = _calls.call(model, _calls.clone_inputs(inputs))
    finally:
        for handle in handles:
            handle.remove()
    return {**found, "": _flat(output)}


def _flat(output: Any) -> Tensor:
    parts = [t.detach().double().flatten().cpu() for t in _calls.floating_outputs(output)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _gap(drawn: list[Tensor], reference: Tensor) -> Gap:
    if any(d.shape != reference.shape for d in drawn) or not reference.numel():
        return Gap(float("nan"), float("nan"), float("nan"))
    over_draws = moments(torch.stack(drawn), 0)
    error = float((over_draws.var(correction=1) / len(drawn)).mean())
    apart = moments(over_draws.mean - reference, None)
    square = _second_moment(apart)
    return Gap(max(square - error, 0.0) ** 0.5, float(moments(reference, None).std()), error**0.5)


def _second_moment(m: Moments) -> float:
    return float(m.mean) ** 2 + float(m.var())
