"""What an audit says: findings, and a line for every tensor; data only."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from musigma.init.auditing import _page, _table


@dataclass(frozen=True)
class Finding:
    """One tensor that does not start as it should.

    Attributes:
        tensor: its qualified name.
        problem: a stable id in kebab case, a colon, and one sentence with the numbers.
        evidence: those numbers; JSON-able.
        remedy: what to do, in the imperative.

    Example:
        >>> import torch, musigma as ms
        >>> finding = ms.init.Finding("0.weight", "unwritten: every entry is NaN", {"nan": 6}, "write it")
        >>> finding.code
        'unwritten'
    """

    tensor: str
    problem: str
    evidence: Mapping[str, Any]
    remedy: str

    @property
    def code(self) -> str:
        """The id alone."""
        return self.problem.partition(":")[0]


@dataclass(frozen=True)
class TensorAudit:
    """One tensor as it is, beside the law it most likely came from and the one a plan wants.

    Attributes:
        name: qualified name, the first of a tied tensor's.
        shape: its shape.
        mean, std: of its entries.
        law: the law it most likely came from; None where none fits, or the tensor holds no numbers.
        law_std: that law's standard deviation.
        others: laws that can't be told from it.
        expected: the standard deviation that the plan wants; without a plan, the law's.
        interval: where the realised one may lie by chance, for this audit's false-alarm rate.
        verdict: in a word or two: "as planned", "named law", "unnamed law", "no law", "not read: …".
        tied: its other names.

    Example:
        >>> import torch, musigma as ms
        >>> line = next(iter(ms.init.audit(torch.nn.Linear(64, 64)).tensors))
        >>> line.name, line.law, line.interval[0] < line.std < line.interval[1]
        ('weight', 'torch_default', True)
    """

    name: str
    shape: tuple[int, ...]
    mean: float | None
    std: float | None
    law: str | None = None
    law_std: float | None = None
    others: tuple[str, ...] = ()
    expected: float | None = None
    interval: tuple[float, float] | None = None
    verdict: str = ""
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """The findings of an audit, and what every tensor looks like.

    Iterating gives the findings; an audit without any is false, and its length is 0. `audit["name"]` is
    the line of a tensor, by any of its names.

    Attributes:
        findings: in order of the model's tensors.
        tensors: one line a tensor.
        notes: what could not be judged, and why.
        trained: whether most weights fit no law: they have been trained, and laws were not judged.
        rate: the probability of a false alarm over all tensors together that intervals are made for.

    Example:
        >>> import torch, musigma as ms
        >>> audit = ms.init.audit(torch.nn.Linear(4, 2))
        >>> len(audit), bool(audit), audit["weight"].shape
        (0, False, (2, 4))
    """

    findings: tuple[Finding, ...]
    tensors: tuple[TensorAudit, ...]
    notes: tuple[str, ...] = ()
    trained: bool = False
    rate: float = 1e-3
    signal: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, name: str) -> TensorAudit:
        for line in self.tensors:
            if name == line.name or name in line.tied:
                return line
        raise KeyError(f"{name!r} is no parameter of the audited model; see audit.tensors")

    def raise_if_any(self) -> None:
        """Raise where anything was found, for a test or a continuous-integration job.

        Raises:
            ValueError: with every finding.
        """
        if self.findings:
            raise ValueError(f"the initialization has {_table.headline(self)}\n{_table.paragraphs(self)}")

    def to_dict(self) -> dict[str, Any]:
        """The audit as plain JSON types."""
        return _jsonable(
            {
                "trained": self.trained,
                "rate": self.rate,
                "findings": [{**asdict(f), "code": f.code} for f in self.findings],
                "tensors": [asdict(line) for line in self.tensors],
                "notes": self.notes,
                "signal": self.signal,
            }
        )

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as JSON text; a number that isn't finite becomes the string "nan", "inf" or "-inf"."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    def to_html(self) -> str:
        """The audit as one HTML page that needs nothing else."""
        return _page.page(self)

    def _repr_html_(self) -> str:
        return _page.body(self)

    def __str__(self) -> str:
        return _table.text(self)


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return value
