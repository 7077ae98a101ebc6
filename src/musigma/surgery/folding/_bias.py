"""Biases that a norm subtracts again, when everything else is folded."""

from __future__ import annotations

from typing import Any

from torch import nn

from musigma.surgery._cancelled import CancelledBias, cancelled_biases
from musigma.surgery._places import cast, copied, why_branched, why_hooked, why_not_module
from musigma.surgery._remove_bias import take_out, why_it_stays
from musigma.surgery.folding._layers import Edit
from musigma.surgery.folding._place import Place, Plan, names


def fold_biases(plan: Plan, example: Any) -> None:
    """Add a place for every bias that is dead in the model as planned."""
    twin = copied(plan.observed.model)
    try:
        for place in plan.places:
            place.apply(twin)
        example = cast(example, next(p.dtype for p in twin.parameters() if p.is_floating_point()))
        # At test time: a running mean subtracts no bias, and taking one in is `remove_bias`'s to offer.
        found = cancelled_biases(twin, example)
    except Exception:  # the plan doesn't hold, which the certificate will say
        return
    for bias in found:
        reason = plan.excluded.get(f"{bias.name} (bias)") or why_it_stays(twin, bias) or _why_not(plan, bias)
        if reason is not None:
            plan.refuse(bias.name, reason)
            continue
        norms = names(norm.module for norm in bias.norms)
        line = f"{twin.get_parameter(bias.name).numel()} values that {norms} subtracts again"
        between = frozenset(node.module for node in bias.nodes) - {""}
        witnesses = tuple(norm.module for norm in bias.norms if norm.module)
        plan.places.append(
            Place(bias.name, line, (_edit(bias),), witnesses, frozenset(), between, frozenset(), "bias")
        )


def _edit(bias: CancelledBias) -> Edit:
    def edit(model: nn.Module) -> None:
        take_out(model, bias)

    return edit


def _why_not(plan: Plan, bias: CancelledBias) -> str | None:
    observed = plan.observed
    for node in bias.nodes:
        reason = why_not_module(observed, node.module) if node.module else None
        if reason is not None:
            return reason
    paths = [node.module for node in (*bias.nodes, *bias.norms)]
    return why_hooked(observed.model, paths) or why_branched(observed.graph, paths)
