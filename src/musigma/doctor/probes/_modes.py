"""The same batch in train and in eval mode, with dropout and other noise averaged out over draws."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from musigma.doctor.probes import _calls
from musigma.doctor.probes._channels import training_twin
from musigma.doctor.probes._summary import mean_square
from musigma.statistics import moments

__all__ = ["Gap", "ModesCompared", "compare_modes"]

# Nobody asks whether chance explains a smaller gap than this, and to know costs two forwards a draw.
_SMALL = 0.5
# Averaging d draws leaves 1/√d of the noise; the estimate of that remainder is subtracted, so few are enough.
_DRAWS = 8


@dataclass(frozen=True)
class Gap:
    """How far one output in train mode is from the same output in eval mode.

    Args:
        difference: root mean square of (mean over draws in train mode − eval mode), with the part that the
            remaining noise explains taken off; in units of the output.
        scale: standard deviation of the output between examples in eval mode, root mean square over its
            elements; over all values where it has no batch axis.
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
        sampling: what the choice of the batch makes of the train-mode output, in its units: with the batch
            cut in halves, each half's statistics are as far from the whole's (σ²/n) as the whole's are
            from the truth. NaN where the batch can't be cut, or the gap is below 0.5 spreads anyway.
        failure: what the train-mode forward raised, if it did (a batch of one in a BatchNorm).
    """

    output: Gap
    layers: Mapping[str, Gap]
    draws: int
    sampling: float = float("nan")
    failure: Exception | None = field(default=None, repr=False)


def compare_modes(model: nn.Module, inputs: Any, modes: Mapping[str, bool]) -> ModesCompared | None:
    """Run copies in both modes; None where the model has no floating output.

    Args:
        model: left as it is. What its user froze by putting it in eval mode stays so in train mode.
        inputs: as the model takes them.
        modes: the flags its user gave it.
    """
    resting = copy.deepcopy(model).eval()
    reference = _outputs(resting, inputs, seed=0)
    if not reference[""].numel():
        return None
    # In train mode running statistics move; they don't enter the outputs of that mode.
    working = copy.deepcopy(training_twin(model, modes))
    try:
        drawn = [_outputs(working, inputs, seed=s) for s in (0, 1)]
        if not torch.equal(drawn[0][""], drawn[1][""]):
            drawn += [_outputs(working, inputs, seed=s) for s in range(2, _DRAWS)]
    except (ValueError, RuntimeError) as failure:
        nothing = Gap(float("nan"), float("nan"), float("nan"))
        return ModesCompared(nothing, {}, 0, failure=failure)
    gaps = {name: _gap([d[name] for d in drawn], reference[name]) for name in reference if name in drawn[0]}
    sampling = float("nan")
    if gaps[""].relative > _SMALL:
        sampling = _sampling(working, inputs, [d[""] for d in drawn], gaps[""].noise)
    return ModesCompared(gaps.pop(""), gaps, len(drawn), sampling)


def _outputs(model: nn.Module, inputs: Any, *, seed: int) -> dict[str, Tensor]:
    """What the model (under "") and each of its modules with running statistics put out."""
    found: dict[str, Tensor] = {}
    rows = _calls.batch_size(inputs)

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            found.setdefault(name, _matrix(output, rows))

        return hook

    watched = {n: m for n, m in model.named_modules() if getattr(m, "running_mean", None) is not None}
    handles = [m.register_forward_hook(keep(n)) for n, m in watched.items() if n]
    try:
        with torch.no_grad(), _calls.forked_rng(model, seed):
            output = _calls.call(model, _calls.clone_inputs(inputs))
    finally:
        for handle in handles:
            handle.remove()
    return {**found, "": _matrix(output, rows)}


def _matrix(output: Any, rows: int | None) -> Tensor:
    """(examples, values) of the floating outputs with a batch axis; (1, values) of all where none has one."""
    outputs = [t.detach().double().cpu() for t in _calls.floating_outputs(output)]
    led = [t.reshape(t.shape[0], -1) for t in outputs if t.ndim and t.shape[0] == rows]
    parts = led or [t.reshape(1, -1) for t in outputs]
    return torch.cat(parts, 1) if parts else torch.zeros(0, 0, dtype=torch.float64)


def _gap(drawn: Sequence[Tensor], reference: Tensor) -> Gap:
    if any(d.shape != reference.shape for d in drawn) or not reference.numel():
        return Gap(float("nan"), float("nan"), float("nan"))
    over_draws = moments(torch.stack(list(drawn)), 0)
    error = float(moments(over_draws.var(correction=1), None).mean) / len(drawn)
    square = mean_square(over_draws.mean - reference)
    return Gap(max(square - error, 0.0) ** 0.5, _scale(reference), error**0.5)


def _scale(x: Tensor) -> float:
    if x.shape[0] == 1:
        return float(moments(x, None).std())
    return float(moments(moments(x, 0).var(), None).mean) ** 0.5


def _sampling(model: nn.Module, inputs: Any, whole: Sequence[Tensor], noise: float) -> float:
    rows = _calls.batch_size(inputs)
    # Halves of one example have no statistics of their own.
    if rows is None or rows < 4 or whole[0].shape[0] != rows:
        return float("nan")
    try:
        # Every other example: batches are often sorted.
        halves = [
            [_outputs(model, _calls.rows_of(inputs, range(first, rows, 2)), seed=s)[""] for first in (0, 1)]
            for s in range(len(whole))
        ]
    except (ValueError, RuntimeError, IndexError):
        return float("nan")
    joined = [_interleaved(*pair) for pair in halves]
    if any(j is None or j.shape != whole[0].shape for j in joined):
        return float("nan")
    mean = moments(torch.stack(list(whole)), 0).mean
    found = _gap([j for j in joined if j is not None], mean)
    return max(found.difference**2 - noise**2, 0.0) ** 0.5


def _interleaved(even: Tensor, odd: Tensor) -> Tensor | None:
    if even.shape[1:] != odd.shape[1:]:
        return None
    joined = even.new_empty((even.shape[0] + odd.shape[0], *even.shape[1:]))
    joined[0::2], joined[1::2] = even, odd
    return joined
