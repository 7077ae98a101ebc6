"""The proof that a changed model computes what it computed, or the reason why it was left alone."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from musigma.graph import call, forked_rng, tensors

Modes = tuple[bool, ...]
"""The values of `.training` under which two models are compared."""


@dataclass(frozen=True)
class Certificate:
    """What an operation changed, what it left alone and why, and how far the outputs moved.

    Args:
        operation: the operation's name.
        changed: one line per place that was changed, led by its qualified name.
        refused: one line per place that was left alone, with the reason.
        difference: largest |after − before| over every output, the change made and both models run in
            float64; NaN where the operation is meant to change the function and nothing was compared.
        bound: what the rounding of float64 can account for; NaN likewise.
        rounded: the same for the model that is handed out, whose changes are rounded to its own types.
        rounded_bound: what the rounding of its types can account for.
        inputs: what the outputs were compared on.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> _, certificate = ms.surgery.remove_bias(net, torch.randn(8, 4))
        >>> certificate.changed, certificate.difference <= certificate.bound
        (('0.bias: 3 values that 1 (batch_norm) subtracts again',), True)
    """

    operation: str
    changed: tuple[str, ...]
    refused: tuple[str, ...] = ()
    difference: float = float("nan")
    bound: float = float("nan")
    rounded: float = float("nan")
    rounded_bound: float = float("nan")
    inputs: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The certificate as JSON; a number that was not measured is null."""
        fields = {k: None if v != v else v for k, v in asdict(self).items()}
        return json.dumps(fields, indent=2, ensure_ascii=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to `path`, whole or not at all."""
        target = Path(path)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json() + "\n")
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise

    def __str__(self) -> str:
        lines = [f"{self.operation}: {len(self.changed)} changed, {len(self.refused)} left alone"]
        lines += [f"  + {line}" for line in self.changed]
        lines += [f"  - {line}" for line in self.refused]
        if self.difference == self.difference:
            where = " and ".join(self.inputs)
            lines.append(f"  largest difference on {where}:")
            lines.append(f"  {self.difference:.1e} in float64 (bound {self.bound:.1e}),")
            lines.append(
                f"  {self.rounded:.1e} rounded to the model's types (bound {self.rounded_bound:.1e})"
            )
        return "\n".join(lines)


class CertificateError(RuntimeError):
    """A changed model does not compute what it computed; the model that was handed in is untouched."""


def certified(
    operation: str,
    model: nn.Module,
    change: Callable[[nn.Module], None],
    example: Any,
    *,
    changed: tuple[str, ...],
    refused: tuple[str, ...] = (),
    modes: Modes = (False, True),
) -> tuple[nn.Module, Certificate]:
    """A changed copy, and the proof that the change does not change the function.

    The change is made twice: on a float64 copy, where it has to be exact but for the rounding of float64
    (`difference` against `bound`), and on the copy that is handed out, where its results are rounded once
    more, to the model's own types (`rounded` against `rounded_bound`).

    Args:
        operation: the operation's name.
        model: the model as it is; left so.
        change: makes the change in place, on a copy.
        example: what the model is called with; a second comparison is made on random inputs of its shapes.
        changed: one line per place that `change` changes.
        refused: one line per place that it leaves alone.
        modes: the values of `.training` to compare under.

    Returns:
        the changed copy, and its certificate.

    Raises:
        CertificateError: the outputs moved by more than rounding accounts for, or changed their shapes.
    """
    before, exact, delivered = (copy.deepcopy(model) for _ in range(3))
    before, exact = before.double(), exact.double()
    change(exact)
    change(delivered)
    inputs = {"the example": example, "random inputs of its shapes": _random_like(example)}
    difference, bound = compare(before, exact, inputs.values(), modes, roundings=_roundings(before))
    rounded, rounded_bound = compare(
        before, copy.deepcopy(delivered).double(), inputs.values(), modes, roundings=_roundings(model)
    )
    for gap, limit, where in ((difference, bound, "float64"), (rounded, rounded_bound, "the model's types")):
        if not gap <= limit:
            raise CertificateError(
                f"{operation} changed what the model computes by {gap:.2e} in {where}, where rounding "
                f"accounts for {limit:.2e}; the model is untouched. Changed were: {'; '.join(changed)}"
            )
    return delivered, Certificate(
        operation, changed, refused, difference, bound, rounded, rounded_bound, tuple(inputs)
    )


def compare(
    before: nn.Module,
    after: nn.Module,
    inputs: Iterable[Any],
    modes: Modes,
    *,
    roundings: Mapping[str, float],
) -> tuple[float, float]:
    """Largest difference between two float64 models' outputs, and what rounding can account for.

    The bound is measured: the model before is run again with every parameter and buffer off by up to one
    rounding of its type, at random, which is what another order of the same arithmetic does. Sixteen such
    steps are allowed, and never less than 2⁻⁴⁴ of the largest output (256 roundings of float64).

    Args:
        before: the model as it was, in float64.
        after: the changed model, in float64.
        inputs: what to call both with.
        modes: the values of `.training` to compare under.
        roundings: the unit roundoff of each parameter and buffer, by qualified name.

    Returns:
        difference and bound.

    Raises:
        CertificateError: the outputs differ in number, shape or finiteness.
    """
    shaken = _shaken(before, roundings)
    difference = bound = 0.0
    for given in inputs:
        for training in modes:
            old, new, moved = (_outputs(m, given, training) for m in (before, after, shaken))
            difference = max(difference, _largest_gap(old, new))
            scale = max((float(t[t.isfinite()].abs().amax()) for t in old if t.isfinite().any()), default=0.0)
            bound = max(bound, 16 * _largest_gap(old, moved), 2.0**-44 * scale)
    return difference, bound


def _outputs(model: nn.Module, example: Any, training: bool) -> list[Tensor]:
    """Every floating output of a copy, in one mode, with the same random numbers each time."""
    twin = copy.deepcopy(model).train(training)
    with torch.no_grad(), forked_rng(twin, seed=0):
        try:
            found = tensors(call(twin, own_copy(_in_float64(example))))
        except Exception as error:
            mode = "train" if training else "eval"
            error.add_note(
                f"The model was run in {mode} mode, for a changed model has to compute the same in both; "
                "pass an example that it takes in both. The model is untouched."
            )
            raise
    return [t for t in found if t.is_floating_point()]


def own_copy(example: Any) -> Any:
    """The example with tensors of its own, which a model may overwrite: an in-place ReLU may come first."""
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, example)


def _in_float64(example: Any) -> Any:
    return _map_floating(example, lambda t: t.double())


def _random_like(example: Any) -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(t: Tensor) -> Tensor:
        # Standard normal, on the CPU: the same numbers on every device. What the example's values mean (a
        # probability, a mask of floats) is unknown; a model that can't take any others fails loudly here.
        return torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t.device)

    return _map_floating(example, draw)


def _map_floating(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return pytree.tree_map(
        lambda v: function(v) if isinstance(v, Tensor) and v.is_floating_point() else v, tree
    )


def _roundings(model: nn.Module) -> dict[str, float]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: torch.finfo(t.dtype).eps for name, t in named if t.is_floating_point()}


def _shaken(model: nn.Module, roundings: Mapping[str, float]) -> nn.Module:
    """A copy in which every parameter and buffer is off by up to its own unit roundoff."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if name in roundings:
            sign = torch.randint(-1, 2, tensor.shape, generator=generator, device="cpu").to(tensor.device)
            tensor.data.mul_(1 + sign * roundings[name])
    return twin


def _largest_gap(old: list[Tensor], new: list[Tensor]) -> float:
    if [t.shape for t in old] != [t.shape for t in new]:
        raise CertificateError(
            "the outputs changed their shapes from "
            f"{[tuple(t.shape) for t in old]} to {[tuple(t.shape) for t in new]}; the model is untouched"
        )
    gap = 0.0
    for a, b in zip(old, new, strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            raise CertificateError("an output became finite or non-finite; the model is untouched")
        finite = a.isfinite()
        if finite.any():
            gap = max(gap, float((a[finite] - b[finite]).abs().max()))
    return gap
