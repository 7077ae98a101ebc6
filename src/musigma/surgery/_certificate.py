"""The proof that a changed model computes what it computed, or the reason why it was left alone."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from musigma.surgery._compared import ChangedModelError, Compared, Gap, Modes, compare, random_like, roundings
from musigma.surgery._places import copied


@dataclass(frozen=True)
class Measured:
    """How far the values at one changed place moved.

    Args:
        place: its qualified name.
        difference: largest |after − before| of its outputs, in float64.
        bound: what the rounding of float64 can account for there.
        rounded: the same for the model that is handed out.
        rounded_bound: what the rounding of its types can account for.
    """

    place: str
    difference: float
    bound: float
    rounded: float
    rounded_bound: float


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
        gradient: largest difference of a gradient, of the inputs or of a parameter that was left alone, in
            float64; NaN where nothing has one.
        gradient_bound: what the rounding of float64 can account for.
        places: the same measured at every place by itself, in the order of the changes.
        notes: what else there is to know.

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
    gradient: float = float("nan")
    gradient_bound: float = float("nan")
    places: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The certificate as JSON; a number that was not measured is null."""
        fields = {k: None if v != v else v for k, v in asdict(self).items()}
        return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False)

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
        if self.gradient == self.gradient:
            lines.append(f"  {self.gradient:.1e} in the gradients (bound {self.gradient_bound:.1e})")
        lines += [f"  ({note})" for note in self.notes]
        return "\n".join(lines)


class CertificateError(RuntimeError):
    """A changed model does not compute what it computed; the model that was handed in is untouched."""


class UnprovenError(CertificateError):
    """The same, with the places where it was seen first.

    Args:
        message: what happened.
        places: by place what happened there; empty where only the outputs of the model tell.
    """

    def __init__(self, message: str, places: Mapping[str, str]) -> None:
        super().__init__(message)
        self.places = dict(places)


def certified(
    operation: str,
    model: nn.Module,
    change: Callable[[nn.Module], None],
    example: Any,
    *,
    changed: tuple[str, ...],
    refused: tuple[str, ...] = (),
    modes: Modes = (False, True),
    witnesses: Mapping[str, tuple[str, ...]] | None = None,
    gradients: bool = True,
    notes: tuple[str, ...] = (),
) -> tuple[nn.Module, Certificate]:
    """A changed copy, and the proof that the change does not change the function.

    The change is made on a float64 copy, where it has to be exact but for the rounding of float64
    (`difference` against `bound`), and its results are rounded once, to the types of the copy that is handed
    out (`rounded` against `rounded_bound`).

    Args:
        operation: the operation's name.
        model: the model as it is; left so.
        change: makes the change in place, on a copy.
        example: what the model is called with; a second comparison is made on random inputs of its shapes.
        changed: one line per place that `change` changes.
        refused: one line per place that it leaves alone.
        modes: the values of `.training` to compare under.
        witnesses: by place the modules whose outputs have to stay what they were.
        gradients: whether gradients have to agree too.
        notes: what else there is to say.

    Returns:
        the changed copy, and its certificate.

    Raises:
        CertificateError: the outputs moved by more than rounding accounts for, or changed their shapes.
    """
    before, exact = (copied(model).double() for _ in range(2))
    change(exact)
    delivered = copied(model)
    change(delivered)
    _round_once(exact, delivered)
    inputs, notes = _inputs(before, example, modes, notes)
    measure = _Measure(operation, before, tuple(inputs.values()), modes, dict(witnesses or {}), changed)
    proof = measure.of(exact, roundings(before), "float64", gradients)
    rounded = measure.of(copied(delivered).double(), roundings(model), "the model's types", False)
    none = Gap(math.nan, math.nan)
    gradient = proof.gradients or none
    return delivered, Certificate(
        operation,
        changed,
        refused,
        proof.outputs.difference,
        proof.outputs.bound,
        rounded.outputs.difference,
        rounded.outputs.bound,
        tuple(inputs),
        gradient.difference,
        gradient.bound,
        tuple(
            Measured(place, here.difference, here.bound, there.difference, there.bound)
            for (place, here), there in zip(proof.places.items(), rounded.places.values(), strict=True)
        ),
        notes,
    )


def _round_once(exact: nn.Module, delivered: nn.Module) -> None:
    """Give the model that is handed out the values of the float64 one, each rounded once to its type."""
    found = dict([*exact.named_parameters(), *exact.named_buffers()])
    with torch.no_grad():
        for name, tensor in (*delivered.named_parameters(), *delivered.named_buffers()):
            if tensor.is_floating_point() and not torch.equal(tensor.double(), found[name].double()):
                tensor.copy_(found[name])


def _inputs(
    before: nn.Module, example: Any, modes: Modes, notes: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What to compare on: the example, and random inputs where the model takes any."""
    inputs = {"the example": example}
    drawn = random_like(example)
    try:
        for training in modes:
            compare(before, before, [drawn], (training,), roundings={}, gradients=False)
    except Exception as error:
        return inputs, (*notes, f"the model takes no random inputs of the example's shapes: {error}")
    return {**inputs, "random inputs of its shapes": drawn}, notes


@dataclass(frozen=True)
class _Measure:
    operation: str
    before: nn.Module
    inputs: tuple[Any, ...]
    modes: Modes
    witnesses: Mapping[str, tuple[str, ...]]
    changed: tuple[str, ...]

    def of(self, after: nn.Module, rounding: Mapping[str, float], where: str, gradients: bool) -> Compared:
        """The comparison with a changed model.

        Raises:
            UnprovenError: something moved by more than rounding accounts for.
        """
        try:
            found = compare(
                self.before,
                after,
                self.inputs,
                self.modes,
                roundings=rounding,
                witnesses=self.witnesses,
                gradients=gradients,
            )
        except ChangedModelError as error:
            raise UnprovenError(
                f"after {self.operation} the model does not run ({error}); the model is untouched. "
                f"Changed were: {'; '.join(self.changed)}",
                {},
            ) from error
        failed = {
            place: f"its outputs would move by {gap.difference:.2e} in {where}, where rounding accounts for "
            f"{gap.bound:.2e}"
            for place, gap in found.places.items()
            if not gap.holds
        }
        gaps = {"what the model computes": found.outputs, "gradients": found.gradients or found.outputs}
        for words, gap in gaps.items():
            if failed or not gap.holds:
                raise UnprovenError(
                    f"{self.operation} changed {words} by {gap.difference:.2e} in {where}, where rounding "
                    f"accounts for {gap.bound:.2e}; the model is untouched. Changed were: "
                    f"{'; '.join(failed or self.changed)}",
                    failed,
                )
        return found


def own_copy(example: Any) -> Any:
    """The example with tensors of its own, which a model may overwrite: an in-place ReLU may come first."""
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, example)
