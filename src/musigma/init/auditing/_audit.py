"""Audit the initialization of any model, however it was made."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from musigma.graph import unwrap
from musigma.graph._example import Example
from musigma.init.auditing import checks
from musigma.init.auditing._candidates import candidates
from musigma.init.auditing._expected import entries_of, expected_of, meets
from musigma.init.auditing._facts import Facts, read
from musigma.init.auditing._identify import FEW, Identified, identify
from musigma.init.auditing._interval import critical_z, std_interval
from musigma.init.auditing._report import Audit, Finding, TensorAudit
from musigma.init.auditing._scene import CHECKS, Scene
from musigma.init.auditing._signal import Signal, measure
from musigma.init.planning import Entry, Plan
from musigma.init.planning import plan as make_plan
from musigma.init.schemes._scheme import Law

# Of a thousand healthy models one may get a false alarm from the chance of its draw.
RATE = 1e-3


def audit(
    model: nn.Module, example: Example | None = None, *, plan: Plan | None = None, seed: int | None = None
) -> Audit:
    """Look at how a model was initialized, and say what is wrong with it; nothing of it changes.

    Every tensor gets the law it most likely came from, judged by the shape of its distribution and by its
    spread. With an example the model runs once, so that what follows each layer is known, and how large the
    signal is and how much of it still tells examples apart. Weights that have been trained fit no law: that
    is said, and laws are not judged.

    Law: the standard deviation of n entries lies within σ·(1 ± z·√((κ−1)/(4n))) with the law's kurtosis κ,
    and z such that one healthy model in a thousand gets a false alarm, whatever its number of tensors.

    Args:
        model: any module, also a wrapped or compiled one, in any mode.
        example: a tensor, a tuple of arguments or a dict of keyword arguments; None judges tensors alone.
        plan: what `musigma.init.plan` made for this model: then a tensor that misses it is a finding. Without
            one, the spreads that musigma would choose stand beside the realised ones and nothing more.
        seed: what the model's own noise (dropout) starts from; default: the present state, left as it is.

    Returns:
        The findings, and a line for every tensor.

    Raises:
        TypeError: the model is no module, or the example none of the three.
        ValueError: the plan is another model's; a lazy module, given an example, is not initialized yet.
        Exception: what the model raises on the example, with a note on the call.

    Example:
        >>> import torch, musigma as ms
        >>> attention = torch.nn.MultiheadAttention(64, 4)
        >>> [(f.tensor, f.code) for f in ms.init.audit(attention)]
        [('in_proj_weight', 'packed-as-one-matrix')]

    References:
        Hanin & Rolnick 2018, How to start training; Schoenholz et al. 2017, Deep information propagation.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    graph, signal = (None, None) if example is None else measure(model, example, seed)
    facts, unread = read(model)
    # A mean and a standard deviation of every tensor are judged.
    z = critical_z(RATE, 2 * max(len(facts), 1))
    branches = 0 if graph is None else len(graph.residual_branches())
    laws = {f.name: identify(f, candidates(f, branches), z) for f in facts}
    trained = _is_trained(facts, laws)
    notes = _notes(unread, trained)
    wanted = plan
    if plan is None and example is not None and not trained:
        wanted = _chosen(model, example, notes)
    entries = {} if wanted is None else entries_of(wanted, facts)
    facts = tuple(_with_fans(f, entries.get(f.name)) for f in facts)
    expected = expected_of(entries, facts)
    scene = Scene(
        unwrap(model), facts, laws, z, graph, signal, trained, notes, entries, expected, plan is not None
    )
    findings = [finding for check in CHECKS.values() for finding in check(scene)]
    findings += [_hollow(name) for name, why in unread.items() if "meta" in why]
    given = {} if plan is None else entries
    lines = [_line(f, laws[f.name], expected.get(f.name), z, given.get(f.name)) for f in facts]
    lines += [TensorAudit(name, (), None, None, verdict=f"not read: {why}") for name, why in unread.items()]
    return Audit(_in_order(findings, lines), tuple(lines), tuple(scene.notes), trained, RATE, _told(signal))


def _is_trained(facts: Sequence[Facts], laws: Mapping[str, Identified]) -> bool:
    """Whether most weights fit no law in use, not even in shape, or the norms have left where they start."""
    told = [f for f in facts if f.kind in ("weight", "embedding") and f.count >= FEW and f.finite]
    lawless = [f for f in told if laws[f.name].family is None]
    # Large tensors tell more: a small one fits some law still after training.
    matrices = [f.count for f in told if f.matrix and f.trainable]
    entries = sum(f.count for f in lawless if f.matrix and f.trainable)
    # Some draw a norm's weight around 1, but nobody its bias as well.
    moved = [
        not f.constant for f in facts if f.kind == "norm" and f.finite and f.count > 1 and "bias" in f.leaf
    ]
    most = 2 * len(lawless) > len(told) or 2 * entries > sum(matrices)
    return most or 2 * sum(moved) > len(moved) > 0


def _hollow(name: str) -> Finding:
    return Finding(
        name,
        "unwritten: it is on the meta device and holds no numbers.",
        {"meta": True},
        "musigma.init.materialize(model, device) gives it memory and values",
    )


def _notes(unread: Mapping[str, str], trained: bool) -> list[str]:
    notes = [f"{name} was not read: {why}" for name, why in unread.items() if "lazy" in why]
    if trained:
        notes.append("most weights fit no law: the model has been trained, and laws were not judged")
    return notes


def _chosen(model: nn.Module, example: Example, notes: list[str]) -> Plan | None:
    """What musigma would choose, to compare with; an audit doesn't fail for want of it."""
    try:
        return make_plan(model, example)
    except Exception as error:
        notes.append(f"no plan could be made to compare with ({type(error).__name__}: {error})")
        return None


def _with_fans(facts: Facts, entry: Entry | None) -> Facts:
    """Facts with the fans of the op that uses the tensor, where its module doesn't tell them."""
    known = type(facts.owner).__module__.startswith("torch.nn")
    if known or entry is None or entry.fans is None or facts.kind != "weight":
        return facts
    return facts.counted(entry.fans)


def _line(facts: Facts, found: Identified, wanted: Law | None, z: float, entry: Entry | None) -> TensorAudit:
    law = wanted or found.law
    interval = None if law is None else std_interval(law, facts.count, z)
    verdict = "no law" if found.family is None else "named law" if found.named else "unnamed law"
    if wanted is not None and meets(facts, wanted, z):
        verdict = "as planned"
        if entry is not None:
            found = Identified(found.family, _scheme(entry), wanted, True, _also(found))
    return TensorAudit(
        facts.name,
        facts.shape,
        facts.mean,
        facts.std,
        found.label,
        None if found.law is None else found.law.std,
        found.others,
        None if law is None else law.std,
        interval,
        verdict,
        tuple(name for name in facts.names if name != facts.name),
    )


def _scheme(entry: Entry) -> str:
    options = ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in entry.options.items()
    )
    return f"{entry.scheme}({options})" if options else entry.scheme


def _also(found: Identified) -> tuple[str, ...]:
    return (found.label, *found.others) if found.label and found.named else found.others


def _in_order(findings: Sequence[Finding], lines: Sequence[TensorAudit]) -> tuple[Finding, ...]:
    place = {line.name: i for i, line in enumerate(lines)}
    return tuple(sorted(findings, key=lambda f: place.get(f.tensor, len(place))))


def _told(signal: Signal | None) -> tuple[Mapping[str, Any], ...]:
    if signal is None:
        return ()
    return tuple(
        {
            "node": index,
            "rms": spread.rms,
            "between_over_rms": None if spread.share is None else spread.share**0.5,
        }
        for index, spread in signal.outputs.items()
    )


__all__ = ["RATE", "audit", "checks"]
