"""Give a model that was built on the meta device memory, and every tensor its values."""

import functools
import glob
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from musigma.init._apply import assign, skipped_by
from musigma.init._names import Slot, clean, slots, unwrapped
from musigma.init._own_code import OwnCode
from musigma.init._pieces import keep_piece
from musigma.init._rule import SchemeLike, make_rule
from musigma.init._write import Task, perform, rehearse
from musigma.init.schemes import SCHEMES


@runtime_checkable
class Planned(Protocol):
    """What says of every tensor which scheme draws it: a `Plan`."""

    entries: Any
    seed: int


def materialize(
    model: nn.Module,
    device: torch.device | str = "cpu",
    *,
    rules: Mapping[str, SchemeLike] | Planned | None = None,
    seed: int | None = None,
    skip: Iterable[str] = (),
) -> nn.Module:
    """Fill a model that is on the meta device: memory for every tensor, and each written exactly once.

    What a rule speaks of is drawn by its scheme, as `apply` does, with the same numbers as if the model
    had never been on the meta device. All else gets what the model's own code gives it: a module's
    `reset_parameters` or the model's `_init_weights` (drawn with the numbers of the tensor's own name),
    `reset_running_stats`, or the module's constructor, called again with the arguments that the module
    keeps as attributes, which is how rotary tables, masks and position numbers come back. What nobody can
    compute is an error, never left as it is. What a constructor did to its children afterwards (scaling
    some of them by name) is not repeated: say it in `rules`.

    Tensors that are not on the meta device, such as those a checkpoint was loaded into, keep their bits
    and are moved to the device. Tied tensors stay tied, buffers stay non-persistent, DTensors get this
    rank's piece. Until every value is known, the model is not touched.

    Args:
        model: any module, partly or wholly on the meta device.
        device: where its tensors go.
        rules: pattern → scheme, as for `apply`; or a plan, made on the meta device too (`musigma.init.plan`).
        seed: which of all possible initializations; default: the plan's, or 0.
        skip: names or patterns of tensors that hold loaded values and must stay; it is an error if one of
            them is still on the meta device. (The others off the meta device stay as well.)

    Returns:
        model, changed in place.

    Raises:
        ValueError: as `apply`; or a tensor that nobody can compute, with what to do about each.

    Example:
        >>> import torch, musigma as ms
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        >>> model = ms.init.materialize(model, "cpu", rules={"0.weight": "he_normal", "*.bias": "zeros"})
        >>> model[1].running_var
        tensor([1., 1., 1., 1.])

    References:
        huggingface/transformers#46620, #35437 (loaded tensors overwritten, missing ones left as they were);
        pytorch/pytorch#104361 (buffers lost on the meta device).
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("device must be one that holds numbers, but 'meta' holds none; pass 'cpu' or 'cuda'")
    if seed is None:
        seed = rules.seed if isinstance(rules, Planned) else 0
    given = _as_rules(rules) if isinstance(rules, Planned) else rules or {}
    tasks = _tasks(model, slots(model), given, skip)
    rehearse(tasks, seed)
    fresh = {id(t): torch.empty_like(t, device=device, requires_grad=False) for t in _hollow_tensors(model)}
    _write_rest(model, fresh, {id(task.slot.parameter) for task in tasks}, seed)
    for task in tasks:
        task.slot = Slot(fresh[id(task.slot.parameter)], task.slot.owners)
    perform(tasks, seed)
    _install(model, fresh, device)
    return model


def _as_rules(plan: Planned) -> dict[str, SchemeLike]:
    return {
        glob.escape(entry.tensor): functools.partial(SCHEMES[entry.scheme].function, **entry.options)
        for entry in plan.entries
    }


def _tasks(
    model: nn.Module, found: list[Slot], rules: Mapping[str, SchemeLike], skip: Iterable[str]
) -> list[Task]:
    ready = [make_rule(clean(pattern, model), scheme) for pattern, scheme in rules.items()]
    patterns = [clean(name, model) for name in ([skip] if isinstance(skip, str) else skip)]
    kept = skipped_by(patterns, found, model)
    hollow = [s.name for s in found if s.parameter.is_meta and not kept.keys().isdisjoint(s.owners)]
    if hollow:
        raise ValueError(
            f"what is in skip must hold loaded values, but {', '.join(hollow)} is on the meta device; load "
            f"it first (load_state_dict with assign=True), or take it out of skip"
        )
    for slot in found:
        if not slot.parameter.is_meta:
            kept[slot.name] = "holds values already"
    tasks, _ = assign(found, ready, kept, refuse=lambda parameter: "", meta=True)
    return tasks


@torch.no_grad()
def _write_rest(model: nn.Module, fresh: dict[int, Tensor], done: set[int], seed: int) -> None:
    """Write what no rule speaks of, each tensor once, by the code of the modules that hold it."""
    problems = []
    code = OwnCode(unwrapped(model), seed)
    # In alphabetical order, so that a tied tensor's values don't depend on what was registered first.
    modules = unwrapped(model).named_modules(remove_duplicate=False)
    for path, module in sorted(modules, key=lambda item: item[0]):
        wanted = {n: t for n, t in _own_tensors(module) if t.is_meta and id(t) not in done}
        if wanted:
            place = clean(path, model)
            values, reasons = code.values(path, module, wanted)
            for name, value in values.items():
                keep_piece(fresh[id(wanted[name])], value)
            problems += [f"{_qualified(place, name)}: {reason}" for name, reason in reasons.items()]
            done |= set(map(id, wanted.values()))
    if problems:
        raise ValueError(
            "every tensor must be written, but nobody can tell what these hold, and nothing was changed:\n  "
            + "\n  ".join(problems)
            + "\nName a parameter in rules=…; put a buffer's values there yourself before (what is not on "
            "the meta device is left alone), or give its class a reset_parameters() that writes it."
        )


def _qualified(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers, and the tensors it keeps as plain attributes."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
    yield from ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))


def _hollow_tensors(model: nn.Module) -> list[Tensor]:
    every = {id(t): t for module in model.modules() for _, t in _own_tensors(module) if t.is_meta}
    return list(every.values())


def _install(model: nn.Module, fresh: dict[int, Tensor], device: torch.device) -> None:
    """Put the new tensors in place of the hollow ones, and the others on the device."""
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    attributes = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                tied.setdefault(id(parameter), []).append((module, name))
        attributes += [
            (module, name, fresh[id(value)])
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and id(value) in fresh
        ]
    notes = {id(p): dict(vars(p)) for p in model.parameters()}
    moved: dict[int, Tensor] = {}

    def place(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = fresh[id(tensor)] if id(tensor) in fresh else tensor.to(device)
        return moved[id(tensor)]

    # What Module.to does, and FSDP2 hooks into.
    model._apply(place)
    for key, places in tied.items():
        (first, leaf), *others = places
        parameter = first._parameters[leaf]
        assert parameter is not None
        vars(parameter).update(notes[key])
        for module, name in others:
            module._parameters[name] = parameter
    for module, name, tensor in attributes:
        setattr(module, name, tensor)
