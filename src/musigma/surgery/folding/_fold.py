"""Fold away what only scales and shifts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, TypeVar

from torch import nn

from musigma.graph import unwrap
from musigma.surgery._certificate import Certificate, UnprovenError, certified
from musigma.surgery._places import observe, why_not_module
from musigma.surgery.folding._affine import (
    Affine,
    RefusalError,
    affine_module,
    affine_paths,
    running_norms,
    why_read_elsewhere,
)
from musigma.surgery.folding._backward import fold_backward
from musigma.surgery.folding._bias import fold_biases
from musigma.surgery.folding._centering import fold_centering
from musigma.surgery.folding._forward import fold_forward
from musigma.surgery.folding._merge import merge
from musigma.surgery.folding._own_affine import OwnAffine, fold_own_affine, own_affines
from musigma.surgery.folding._place import Place, Plan

Found = TypeVar("Found", Affine, OwnAffine)

KINDS: Final = ("backward", "forward", "affine", "centering", "merge", "bias")


def fold(model: nn.Module, example: Any, *, kinds: Iterable[str] = KINDS) -> tuple[nn.Module, Certificate]:
    """Fold every norm that only scales and shifts at test time into the layers around it.

        W·(…)·s + t   of a BatchNorm with s = weight / √(running_var + eps), t = bias − running_mean · s
        becomes one layer with the weight s · W and the bias s · b + t

    Args:
        model: any module; left as it is. One in training mode is folded as in eval mode; the copy keeps its
            `.training` flags.
        example: what the model is called with: a tensor, a tuple of arguments or a dict of keywords.
        kinds: which folds to make: `"backward"` into the layers in front; `"forward"` into the layers behind;
            `"affine"`, weight and bias of a norm that stays (LayerNorm, RMSNorm, GroupNorm, and those written
            out in a model's code) into the layers behind; `"centering"`, a LayerNorm's mean into whatever
            writes its input, so that it becomes an RMSNorm; `"merge"`, a scale and shift into a BatchNorm
            behind it that has to stay; `"bias"`, biases that a norm subtracts again.

    Returns:
        a copy with the same outputs in eval mode, and the certificate, which says for every place where it
        went or why it stayed.

    Raises:
        ValueError: an unknown kind.

    Example:
        >>> import torch, musigma as ms
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> folded, certificate = ms.surgery.fold(net, torch.randn(2, 3, 8, 8))
        >>> folded
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): Identity()
          (2): ReLU()
        )
        >>> certificate.changed
        ('1: into 0, which feeds it',)

    References:
        Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
        Inference", section 3.2.
    """
    wanted = _checked(kinds)
    excluded: dict[str, str] = {}
    observed = observe(model, example)
    while True:
        plan = Plan(observed, excluded)
        _plan(plan, example, wanted)
        try:
            return _proven(model, example, plan)
        except UnprovenError as failure:
            excluded |= _culprits(model, example, plan, failure)


def _culprits(model: nn.Module, example: Any, plan: Plan, failure: UnprovenError) -> dict[str, str]:
    """What to leave alone after a fold that did not hold: at least one place, with what happened."""
    order = {node.module: node.index for node in reversed(plan.observed.graph.nodes)}
    failed = sorted((path for path in failure.places if path in plan.done), key=lambda p: order.get(p, 0))
    if failed:  # what comes behind the first may only have been given other values
        return {failed[0]: failure.places[failed[0]]}
    alone: dict[str, str] = {}
    if len(plan.places) > 1:
        for place in plan.places:
            try:
                _proven(model, example, replace(plan, places=[place]))
            except UnprovenError as error:
                alone[place.key] = error.places.get(place.key, str(error))
    return alone or {place.key: str(failure) for place in plan.places}


def _checked(kinds: Iterable[str]) -> tuple[str, ...]:
    given = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    unknown = [kind for kind in given if kind not in KINDS]
    if unknown:
        raise ValueError(f"kinds must be of {', '.join(KINDS)}; got {', '.join(map(repr, unknown))}")
    return given


def _plan(plan: Plan, example: Any, wanted: tuple[str, ...]) -> None:
    found = _affines(plan)
    if "backward" in wanted:
        for affine in found.values():
            _try(plan, affine, fold_backward)
    behind: list[Affine | OwnAffine] = []
    if "forward" in wanted:
        behind += [affine for path, affine in found.items() if path not in plan.done]
    if "affine" in wanted:
        behind += [own for own in own_affines(plan.observed) if _allowed(plan, own.path)]
    # The last first: what one of them feeds may be another, which is out of the way by then.
    for place in sorted(behind, key=lambda place: -int(place.exit)):
        if isinstance(place, Affine):
            _try(plan, place, fold_forward)
        else:
            _try(plan, place, fold_own_affine)
    if "centering" in wanted:
        fold_centering(plan)
    if "merge" in wanted:
        for path, affine in reversed(found.items()):
            if path not in plan.done:
                _try(plan, affine, merge)
    if "bias" in wanted:
        fold_biases(plan, example)


def _allowed(plan: Plan, path: str) -> bool:
    if path in plan.excluded:
        plan.refuse(path, plan.excluded[path])
    return path not in plan.excluded


def _affines(plan: Plan) -> dict[str, Affine]:
    found: dict[str, Affine] = {}
    norms = {node.module for node in running_norms(plan.observed)}
    for path in affine_paths(plan.observed):
        if not _allowed(plan, path):
            continue
        try:
            reason = why_not_module(plan.observed, path)
            if reason is None:
                affine = affine_module(plan.observed, path)
                reason = why_read_elsewhere(plan.observed, path)
            if reason is None:
                found[path] = affine
        except RefusalError as refusal:
            reason = str(refusal)
        if reason is not None and path in norms:
            plan.refuse(path, reason)
    return found


def _try(plan: Plan, found: Found, how: Callable[[Plan, Found], Place | None]) -> None:
    try:
        place = how(plan, found)
    except RefusalError as refusal:
        plan.refuse(found.path, str(refusal))
        return
    plan.refused.pop(found.path, None)
    if place is not None:
        plan.places.append(place)


def _proven(model: nn.Module, example: Any, plan: Plan) -> tuple[nn.Module, Certificate]:
    def change(twin: nn.Module) -> None:
        inner = unwrap(twin)
        for place in plan.places:
            place.apply(inner)

    training = any(m.training for m in model.modules())
    notes = ("folded as in eval mode: the copy keeps its .training flags",) if training else ()
    return certified(
        "fold",
        model,
        change,
        example,
        changed=tuple(map(str, plan.places)),
        refused=tuple(f"{path}: {'; '.join(reasons)}" for path, reasons in plan.refused.items()),
        modes=(False,),
        witnesses=plan.witnesses(),
        notes=notes,
    )
