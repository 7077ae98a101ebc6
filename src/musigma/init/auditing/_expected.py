"""What a plan wants of each tensor, as laws."""

import inspect
import math
from collections.abc import Mapping

import torch

from musigma.init.auditing._facts import Facts
from musigma.init.auditing._identify import within
from musigma.init.planning import Entry, Plan
from musigma.init.schemes._scheme import SCHEMES, Law


def entries_of(plan: Plan, facts: tuple[Facts, ...]) -> dict[str, Entry]:
    """The plan's entry for each tensor that has one.

    Args:
        plan: a plan of this model.
        facts: the model's tensors.

    Returns:
        Tensor name → entry; tied tensors are found by any of their names.

    Raises:
        ValueError: the plan has none of the model's tensors: it is another model's.

    Example:
        >>> entries_of(Plan(()), ())
        {}

    References:
        None.
    """
    by_name = {name: entry for entry in plan for name in (entry.tensor, *entry.tied)}
    found = {f.name: by_name[n] for f in facts if (n := next((n for n in f.names if n in by_name), None))}
    if facts and by_name and not found:
        raise ValueError(
            f"the plan must be one of this model, but it names none of its tensors: "
            f"{next(iter(by_name))!r}, … where the model has {facts[0].name!r}, …"
        )
    return found


def law_of(entry: Entry, facts: Facts) -> Law:
    """The law that an entry draws a tensor from.

    Args:
        entry: of the plan.
        facts: the tensor.

    Returns:
        Its mean and variance are the entry's, kurtosis and bounds the scheme's.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> facts = read(nn.Linear(4, 4))[0][0]
        >>> law_of(Entry("weight", (4, 4), "normal", {"std": 0.5}, 0.0, 0.5, ""), facts).kurtosis
        3.0

    References:
        None.
    """
    scheme = SCHEMES[entry.scheme]
    options: dict[str, object] = dict(entry.options)
    if "groups" in inspect.signature(scheme.function).parameters and entry.parts > 1:
        options.setdefault("groups", entry.parts)
    fans = options.pop("fans", None) or entry.fans
    declared = scheme.law(facts.shape, fans=fans, options=options)  # type: ignore[arg-type]
    return Law(entry.mean, entry.std**2, declared.kurtosis, declared.low, declared.high)


def meets(facts: Facts, law: Law, z: float) -> bool:
    """Whether a tensor can have been drawn from a law.

    Args:
        facts: the tensor.
        law: the law.
        z: standard errors that are forgiven.

    Returns:
        Whether mean and spread lie within the sampling interval; of a constant, whether it is that number.

    Example:
        >>> from torch import nn
        >>> from musigma.init.auditing._facts import read
        >>> meets(read(nn.LayerNorm(4))[0][0], Law(1.0, 0.0, 1.0), 4.0)
        True

    References:
        None.
    """
    if not facts.finite:
        return False
    if law.var == 0:
        eps = torch.finfo(facts.values.dtype).eps
        return facts.constant and math.isclose(facts.low, law.mean, rel_tol=eps, abs_tol=1e-30)
    if law.kurtosis == 1:  # a pattern of fixed numbers: rounding alone is left
        return math.isclose(facts.std, law.std, rel_tol=0.01)
    return within(facts, law, z)


def expected_of(entries: Mapping[str, Entry], facts: tuple[Facts, ...]) -> dict[str, Law]:
    """The law of every planned tensor.

    Args:
        entries: tensor name → entry.
        facts: the model's tensors.

    Returns:
        Tensor name → law.

    Example:
        >>> expected_of({}, ())
        {}

    References:
        None.
    """
    return {f.name: law_of(entries[f.name], f) for f in facts if f.name in entries}
