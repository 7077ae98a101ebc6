"""Initialize a model by rules over parameter names."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from musigma.init._names import Slot, clean, slots
from musigma.init._report import ApplyReport, Written
from musigma.init._rule import Rule, SchemeLike, make_rule
from musigma.init._write import Task, obstacle, perform, rehearse, task_for

_PLAIN = re.compile(r"[^*?\[]*")


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
    skipped = skipped_by(kept, found, model)
    tasks, untouched = assign(found, ready, skipped)
    rehearse(tasks, seed)
    report = ApplyReport({t.name: _written(t) for t in tasks}, skipped, untouched)
    perform(tasks, seed)
    return report


def _matches(slot: Slot, pattern: str) -> list[str]:
    return sorted(name for name in slot.owners if fnmatchcase(name, pattern))


def skipped_by(patterns: list[str], found: list[Slot], model: nn.Module) -> dict[str, str]:
    """Names of the tensors that `skip` protects; a pattern that protects nothing is a mistake.

    Args:
        patterns: names or globs.
        found: the model's tensors.
        model: the model, whose buffers may be named too.

    Returns:
        One name a tensor → "in skip".

    Raises:
        ValueError: a pattern names neither a parameter nor a buffer.

    Example:
        >>> skipped_by(["*.bias"], slots(nn.Sequential(nn.Linear(2, 2))), nn.Sequential(nn.Linear(2, 2)))
        {'0.bias': 'in skip'}

    References:
        None.
    """
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


def _reason_to_skip(parameter: Tensor) -> str:
    if not parameter.dtype.is_floating_point:
        return f"not floating-point ({parameter.dtype})"
    return "" if parameter.requires_grad else "frozen (requires_grad is False)"


def assign(
    found: list[Slot],
    rules: list[Rule],
    skipped: dict[str, str],
    *,
    refuse: Callable[[Tensor], str] = _reason_to_skip,
    meta: bool = False,
) -> tuple[list[Task], tuple[str, ...]]:
    """Which rule writes which tensor; adds to `skipped` what can't or mustn't be written.

    Args:
        found: the model's tensors.
        rules: what is to be written.
        skipped: names of tensors to leave alone → why.
        refuse: why a tensor is left alone although a rule matches it; "" for one that isn't.
        meta: whether tensors on the meta device can be written.

    Returns:
        What to do, and the names that no rule speaks of.

    Raises:
        ValueError: a pattern that matches nothing, two for one tensor, a tensor that can't be written.

    Example:
        >>> [t.name for t in assign(slots(nn.Linear(2, 2)), [make_rule("bias", "zeros")], {})[0]]
        ['bias']

    References:
        None.
    """
    matched = _matched(found, rules)
    used = {id(rule) for hits in matched.values() for rule in hits}
    problems = [f"pattern {_no_match(r.pattern, found)}" for r in rules if id(r) not in used]
    tasks, untouched = [], []
    for slot in found:
        if not skipped.keys().isdisjoint(slot.owners):
            continue
        hits = matched[id(slot)]
        if not hits:
            untouched.append(slot.name)
        elif len(hits) > 1:
            who = " and ".join(repr(r.pattern) for r in hits)
            problems.append(f"{' = '.join(sorted(slot.owners))} is written by {who}; narrow one of them")
        elif reason := refuse(slot.parameter):
            skipped[_matches(slot, hits[0].pattern)[0]] = reason
        elif why := obstacle(slot.parameter, meta=meta):
            problems.append(f"{slot.name} {why}")
        else:
            tasks.append(task_for(slot, hits[0], _matches(slot, hits[0].pattern)))
    if problems:
        raise ValueError("the rules can't be applied, nothing was changed:\n  " + "\n  ".join(problems))
    return tasks, tuple(untouched)


def _matched(found: list[Slot], rules: list[Rule]) -> dict[int, list[Rule]]:
    """The rules that speak of each slot, by its identity."""
    by_name = {name: slot for slot in found for name in slot.owners}
    matched: dict[int, dict[int, Rule]] = {id(slot): {} for slot in found}
    for rule in rules:
        # A plan has a rule for every tensor, each of which names but one.
        plain = _PLAIN.fullmatch(rule.pattern) is not None
        one = [by_name[rule.pattern]] if rule.pattern in by_name else []
        for slot in one if plain else (s for s in found if _matches(s, rule.pattern)):
            matched[id(slot)][id(rule)] = rule
    return {key: list(hits.values()) for key, hits in matched.items()}


def _written(task: Task) -> Written:
    shape, rule = tuple(task.slot.parameter.shape), task.rule
    std = None
    if rule.scheme is not None and task.slot.parameter.numel():
        options = {**rule.options, **{k: v for k, v in task.keywords.items() if k != "fans"}}
        std = rule.scheme.law(shape, fans=options.get("fans") or task.fans, options=options).std
    tied = tuple(sorted(set(task.slot.owners) - {task.name}))
    return Written(rule.pattern, rule.label, shape, task.fans, std, tied)
