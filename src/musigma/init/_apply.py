"""Initialize a model by rules over parameter names."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from musigma.init._fans import Fans, layer_fans
from musigma.init._names import Slot, clean, generator_for, slots
from musigma.init._packing import part_names
from musigma.init._report import ApplyReport, Written
from musigma.init._rule import Rule, SchemeLike, make_rule


@dataclass
class _Task:
    """One tensor, the rule that writes it, and what the rule's scheme is told about it."""

    slot: Slot
    name: str
    rule: Rule
    fans: Fans | None
    keywords: dict[str, Any]
    staged: Tensor | None = None


def apply(
    model: nn.Module, rules: Mapping[str, SchemeLike], *, seed: int = 0, skip: Iterable[str] = ()
) -> ApplyReport:
    """Initialize the parameters that glob patterns name, each by its scheme and its own random numbers.

    A tensor's values depend on (seed, qualified name, shape, scheme) alone: not on the order in which
    modules were registered, the device, the layout, or the dtype (half precision holds the same numbers,
    rounded). Schemes are told the effective fans of the layer that owns the tensor, and treat packed
    weights (query-key-value, gates, groups) block by block. Everything is checked before anything is
    written. The padding row of an embedding stays zero.

    Law: that of each scheme.

    Args:
        model: any module, on any device but meta.
        rules: pattern → scheme. Patterns are shell globs over qualified names ("*" crosses dots, case
            counts). A scheme is a name in `SCHEMES`, one of the functions, a `functools.partial` of one,
            or any function that fills a tensor in place.
        seed: which of all possible initializations.
        skip: names or patterns of tensors to leave bit-identical, such as those a checkpoint loaded;
            names of buffers are fine too.

    Returns:
        What was written, what was skipped and why (named in `skip`, frozen, not floating-point), and
        what no rule spoke of. A tied tensor is written once, under the name the rule matched.

    Raises:
        ValueError: a pattern matches nothing, two patterns match one tensor, an unknown scheme, a tensor
            a scheme can't fill, a parameter on the meta device or not yet initialized. Nothing has
            changed then.
        TypeError: rules are no mapping, or a rule is no scheme.

    Example:
        >>> import torch, musigma as ms
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> report = ms.init.apply(model, {"*.weight": "he_normal", "*.bias": "zeros"}, skip=["2.bias"])
        >>> sorted(report.written), report.skipped
        (['0.bias', '0.weight', '2.weight'], {'2.bias': 'in skip'})

    References:
        huggingface/transformers#46620, #35437 (an initialization that overwrote what was loaded).
    """
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules must map patterns to schemes, got {type(rules).__name__}")
    found = slots(model)
    ready = [make_rule(clean(pattern, model), scheme) for pattern, scheme in rules.items()]
    kept = [clean(name, model) for name in ([skip] if isinstance(skip, str) else skip)]
    skipped = _skipped(found, kept, model)
    tasks, untouched = _assign(found, ready, skipped)
    for task in tasks:
        _rehearse(task, seed)
    report = ApplyReport({t.name: _written(t) for t in tasks}, skipped, untouched)
    for task in tasks:
        _perform(task, seed)
    return report


def _matches(slot: Slot, pattern: str) -> list[str]:
    return sorted(name for name in slot.owners if fnmatchcase(name, pattern))


def _skipped(found: list[Slot], patterns: list[str], model: nn.Module) -> dict[str, str]:
    """Names of the tensors that `skip` protects; a pattern that protects nothing is a mistake."""
    skipped: dict[str, str] = {}
    buffers = [clean(name, model) for name, _ in model.named_buffers(remove_duplicate=False)]
    for pattern in patterns:
        hits = [names[0] for slot in found if (names := _matches(slot, pattern))]
        # A checkpoint's keys include buffers and extra state, which are never written.
        harmless = pattern.endswith("_extra_state") or any(fnmatchcase(b, pattern) for b in buffers)
        if not hits and not harmless:
            raise ValueError(f"skip entry {_no_match(pattern, found)}")
        skipped.update(dict.fromkeys(hits, "in skip"))
    return skipped


def _no_match(pattern: str, found: list[Slot]) -> str:
    names = [name for slot in found for name in slot.owners]
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    hint = f"nearest names: {', '.join(near)}" if near else f"names: {', '.join(names[:5])}…"
    return f"{pattern!r} matches no parameter; {hint}"


def _assign(
    found: list[Slot], rules: list[Rule], skipped: dict[str, str]
) -> tuple[list[_Task], tuple[str, ...]]:
    """Which rule writes which tensor; adds to `skipped` what can't or mustn't be written."""
    problems = [
        f"pattern {_no_match(r.pattern, found)}"
        for r in rules
        if not any(_matches(s, r.pattern) for s in found)
    ]
    tasks, untouched = [], []
    for slot in found:
        if not skipped.keys().isdisjoint(slot.owners):
            continue
        hits = [r for r in rules if _matches(slot, r.pattern)]
        if not hits:
            untouched.append(slot.name)
        elif len(hits) > 1:
            who = " and ".join(repr(r.pattern) for r in hits)
            problems.append(f"{' = '.join(sorted(slot.owners))} is written by {who}; narrow one of them")
        elif reason := _reason_to_skip(slot.parameter):
            skipped[_matches(slot, hits[0].pattern)[0]] = reason
        elif obstacle := _obstacle(slot.parameter):
            problems.append(f"{slot.name} {obstacle}")
        else:
            tasks.append(_task(slot, hits[0]))
    if problems:
        raise ValueError("the rules can't be applied, nothing was changed:\n  " + "\n  ".join(problems))
    return tasks, tuple(untouched)


def _reason_to_skip(parameter: Tensor) -> str:
    if not parameter.dtype.is_floating_point:
        return f"not floating-point ({parameter.dtype})"
    return "" if parameter.requires_grad else "frozen (requires_grad is False)"


def _obstacle(parameter: Tensor) -> str:
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet; run one batch through the model first"
    if parameter.is_meta:
        return "is on the meta device and holds no numbers; call model.to_empty(device=…) first"
    if any(step == 0 and size > 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
        return "is expanded: several entries share one number; call .contiguous() on it first"
    return ""


def _task(slot: Slot, rule: Rule) -> _Task:
    """Find out what the scheme wants to know about a tensor."""
    names = _matches(slot, rule.pattern)
    counted = {name: _owner_fans(*slot.owners[name], slot.parameter) for name in names}
    # An embedding tied to the output layer multiplies features there, so the larger fan-in decides.
    name = max(reversed(names), key=lambda n: f.fan_in if (f := counted[n]) else -math.inf)
    keywords: dict[str, Any] = {}
    given = counted[name]
    # A flat tensor borrows its weight's fans only where a scheme insists on some: it has none itself.
    if given is not None and "fans" in rule.open and (slot.parameter.dim() > 1 or not rule.open["fans"]):
        keywords["fans"] = given
    parts = part_names(*slot.owners[name])
    if "groups" in rule.open and len(parts) > 1:
        keywords["groups"] = len(parts)
    return _Task(slot, names[0], rule, keywords.get("fans"), keywords)


def _owner_fans(owner: nn.Module, leaf: str, parameter: Tensor) -> Fans | None:
    if parameter.dim() > 1:
        return layer_fans(owner, leaf, parameter)
    beside = owner._parameters.get(leaf.replace("bias", "weight"))
    if beside is None or beside.dim() < 2:
        return None
    return layer_fans(owner, leaf.replace("bias", "weight"), beside)


def _rehearse(task: _Task, seed: int) -> None:
    """Have the scheme's checks run, or, for a foreign function, the scheme itself on a copy."""
    parameter, rule = task.slot.parameter, task.rule
    try:
        if rule.scheme is not None:
            blank = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            rule.fill(blank, torch.Generator(), task.keywords)
            return
        # float32 whatever the parameter's dtype, so that a model in half precision gets the same numbers.
        task.staged = torch.full(parameter.shape, math.nan, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            rule.fill(task.staged, generator_for(seed, task.slot.name), task.keywords)
    except Exception as error:
        raise ValueError(
            f"{rule.label} (pattern {rule.pattern!r}) can't fill {task.name} of shape "
            f"{tuple(parameter.shape)}, nothing was changed: {error}"
        ) from error
    if bool(task.staged.isnan().any()):
        raise ValueError(
            f"{rule.label} (pattern {rule.pattern!r}) must fill {task.name} in place, but left "
            f"{int(task.staged.isnan().sum())} of {task.staged.numel()} entries unset; nothing was changed"
        )


@torch.no_grad()
def _perform(task: _Task, seed: int) -> None:
    _fill(task, task.slot.parameter, seed)
    for owner, leaf in task.slot.owners.values():
        # The row that stands for padding is zero by definition and gets no gradient to become so.
        if (
            isinstance(owner, nn.Embedding | nn.EmbeddingBag)
            and leaf == "weight"
            and owner.padding_idx is not None
        ):
            task.slot.parameter[owner.padding_idx] = 0.0


def _fill(task: _Task, parameter: Tensor, seed: int) -> None:
    if task.staged is not None:
        parameter.copy_(task.staged)
        return
    # CPU numbers for every device: other devices' generators give others.
    target = parameter
    if parameter.device.type != "cpu":
        target = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    task.rule.fill(target, generator_for(seed, task.slot.name), task.keywords)
    if target is not parameter:
        parameter.copy_(target)


def _written(task: _Task) -> Written:
    shape, rule = tuple(task.slot.parameter.shape), task.rule
    std = None
    if rule.scheme is not None and task.slot.parameter.numel():
        options = {**rule.options, **{k: v for k, v in task.keywords.items() if k != "fans"}}
        std = rule.scheme.law(shape, fans=options.get("fans") or task.fans, options=options).std
    tied = tuple(sorted(set(task.slot.owners) - {task.name}))
    return Written(rule.pattern, rule.label, shape, task.fans, std, tied)
