"""Write parameters by schemes: each tensor from its own random numbers, several at a time."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from musigma.init._fans import Fans, layer_fans
from musigma.init._names import Slot, generator_for
from musigma.init._packing import part_names
from musigma.init._pieces import global_tensor, is_sharded, keep_piece
from musigma.init._rule import Rule


@dataclass
class Task:
    """One tensor, the rule that writes it, and what the rule's scheme is told about it.

    Attributes:
        slot: the tensor and its names; `slot.name` says which random numbers are its own.
        name: the name that messages and reports use.
        rule: the scheme.
        fans: the fans the scheme is told; None if it takes none.
        keywords: everything the scheme is told.
        staged: what a foreign function made of a copy, waiting to be written.
    """

    slot: Slot
    name: str
    rule: Rule
    fans: Fans | None = None
    keywords: dict[str, Any] = field(default_factory=dict)
    staged: Tensor | None = None


def task_for(slot: Slot, rule: Rule, names: Sequence[str] = ()) -> Task:
    """Find out what a rule's scheme wants to know about a tensor.

    Args:
        slot: the tensor.
        rule: the scheme; what its options fix already is not looked up.
        names: the names of the tensor that the rule speaks of; default: all.

    Returns:
        The task; its `name` is the first of the names.

    Example:
        >>> from musigma.init._names import slots
        >>> from musigma.init._rule import make_rule
        >>> task_for(slots(nn.Linear(3, 4))[0], make_rule("weight", "he_normal")).keywords
        {'fans': Fans(fan_in=3, fan_out=4)}

    References:
        None.
    """
    names = sorted(names or slot.owners)
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
    return Task(slot, names[0], rule, keywords.get("fans"), keywords)


def obstacle(parameter: Tensor, *, meta: bool = False) -> str:
    """Why a tensor can't be written at all.

    Args:
        parameter: the tensor.
        meta: whether a tensor without memory is fine.

    Returns:
        The rest of a sentence that begins with the tensor's name; "" if it can.

    Example:
        >>> obstacle(torch.empty(2, device="meta"))[:21]
        'is on the meta device'

    References:
        None.
    """
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet; run one batch through the model first"
    if parameter.is_meta and not meta:
        return (
            "is on the meta device and holds no numbers; use musigma.init.materialize(model, device, "
            "rules=…), which gives it memory and fills it"
        )
    if any(step == 0 and size > 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
        return "is expanded: several entries share one number; call .contiguous() on it first"
    return ""


def rehearse(tasks: Iterable[Task], seed: int) -> None:
    """Have every scheme's checks run, and every foreign function on a copy: nothing is written.

    Args:
        tasks: what is to be written.
        seed: which of all possible initializations.

    Raises:
        ValueError: a scheme refuses its tensor, or a function leaves some of it unset.
    """
    for task in tasks:
        _rehearse(task, seed)


def write(tasks: Sequence[Task], seed: int) -> None:
    """Rehearse all tasks, then perform them: what `Plan.apply` and `apply` come down to.

    Args:
        tasks: what to write.
        seed: which of all possible initializations.

    Raises:
        ValueError: as `rehearse`; nothing has changed then.

    Example:
        >>> from musigma.init._names import slots
        >>> from musigma.init._rule import make_rule
        >>> layer = nn.Linear(2, 1)
        >>> write([task_for(slot, make_rule("*", "ones")) for slot in slots(layer)], seed=0)
        >>> layer(torch.tensor([2.0, 3.0])).item()
        6.0

    References:
        None.
    """
    rehearse(tasks, seed)
    perform(tasks, seed)


def perform(tasks: Sequence[Task], seed: int) -> None:
    """Write every tensor of tasks that were rehearsed.

    Each tensor has a generator of its own, so they are drawn on `torch.get_num_threads()` threads, the
    largest first, and the numbers are the same on any number of them. A DTensor gets this rank's piece of
    the tensor that one process would draw. The padding row of an embedding stays zero.

    Args:
        tasks: what to write.
        seed: which of all possible initializations.

    References:
        Graham 1969 (largest first on several machines).
    """
    # A generator that the caller fixed hands out its numbers in the order of the tasks.
    for task in tasks:
        if "generator" in task.rule.options:
            _perform(task, seed)
    free = [task for task in tasks if "generator" not in task.rule.options]
    threads = min(torch.get_num_threads(), len(free))
    if threads < 2:
        for task in free:
            _perform(task, seed)
        return
    free.sort(key=lambda task: task.slot.parameter.numel(), reverse=True)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda task: _perform(task, seed), free))


def _owner_fans(owner: nn.Module, leaf: str, parameter: Tensor) -> Fans | None:
    if parameter.dim() > 1:
        return layer_fans(owner, leaf, parameter)
    beside = owner._parameters.get(leaf.replace("bias", "weight"))
    if beside is None or beside.dim() < 2:
        return None
    return layer_fans(owner, leaf.replace("bias", "weight"), beside)


def _rehearse(task: Task, seed: int) -> None:
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
def _perform(task: Task, seed: int) -> None:
    parameter = task.slot.parameter
    # CPU numbers for every device: other devices' generators give others.
    whole = task.staged
    if whole is None:
        here = parameter.device.type == "cpu" and not is_sharded(parameter)
        whole = parameter if here else global_tensor(parameter)
        task.rule.fill(whole, generator_for(seed, task.slot.name), task.keywords)
    for owner, leaf in task.slot.owners.values():
        # The row that stands for padding is zero by definition and gets no gradient to become so.
        if (
            isinstance(owner, nn.Embedding | nn.EmbeddingBag)
            and leaf == "weight"
            and owner.padding_idx is not None
        ):
            whole[owner.padding_idx] = 0.0
    if whole is not parameter:
        keep_piece(parameter, whole)
        task.staged = None
