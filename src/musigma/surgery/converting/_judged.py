"""Certificates of changes that are exact up to the rounding of the model's types, or not exact at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from musigma.surgery._certificate import Certificate, CertificateError
from musigma.surgery._compared import ChangedModelError, compare, random_like, roundings
from musigma.surgery._places import copied


def judged(
    operation: str,
    before: nn.Module,
    after: nn.Module,
    data: Sequence[Any],
    *,
    changed: Sequence[str],
    refused: Sequence[str],
    exact: bool,
    notes: Sequence[str] = (),
    anywhere: bool = False,
) -> Certificate:
    """The certificate of a change of what a model does in evaluation.

    Both models run in float64. An exact change stores its numbers in the model's types, so that is whose
    rounding it is allowed.

    Args:
        operation: its name.
        before: the model as it was.
        after: the changed model.
        data: what to compare on.
        changed: one line per place.
        refused: likewise.
        exact: whether rounding has to account for the difference; else it is told, without a bound.
        notes: what else there is to know.
        anywhere: whether to compare on random inputs too.

    Raises:
        CertificateError: the change was to be exact, and is not.
    """
    inputs = [*data, random_like(data[0])] if anywhere else list(data)
    try:
        found = compare(
            copied(before).double(),
            copied(after).double(),
            inputs,
            (False,),
            roundings=roundings(before),
            gradients=False,
        ).outputs
    except ChangedModelError as error:
        raise CertificateError(
            f"after {operation} the model does not run ({error}); the model is untouched. Changed were: "
            f"{'; '.join(changed)}"
        ) from error
    if exact and not found.holds:
        raise CertificateError(
            f"{operation} changed what the model computes by {found.difference:.2e}, where rounding accounts "
            f"for {found.bound:.2e}; the model is untouched. Changed were: {'; '.join(changed)}"
        )
    bound = found.bound if exact else math.nan
    where = ("the calibration data", *(["random inputs of its shapes"] if anywhere else []))
    return Certificate(
        operation,
        tuple(changed),
        tuple(refused),
        found.difference,
        bound,
        found.difference,
        bound,
        where,
        notes=(*notes, "compared in evaluation"),
    )
