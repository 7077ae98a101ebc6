"""What a rule-by-rule initialization did."""

from dataclasses import dataclass

from musigma.init._fans import Fans


@dataclass(frozen=True)
class Written:
    """What was done to one tensor.

    Attributes:
        pattern: the rule's pattern.
        scheme: the scheme with its options, as text.
        shape: the tensor's shape.
        fans: the effective fans the scheme was given; None if it takes none.
        std: the standard deviation its law declares; None for functions that declare none.
        tied: the other names of the same tensor.
    """

    pattern: str
    scheme: str
    shape: tuple[int, ...]
    fans: Fans | None
    std: float | None
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class ApplyReport:
    """Every parameter of a model: written, skipped on purpose, or untouched because no rule spoke of it.

    Attributes:
        written: name → what was done.
        skipped: name → why a rule that matched was not followed, or "in skip".
        untouched: names that neither a rule nor `skip` matched.

    Example:
        >>> import torch, musigma as ms
        >>> print(ms.init.ApplyReport({}, {"a.weight": "in skip"}, ("b.bias",)))
        0 written, 1 skipped, 1 untouched
        skipped    a.weight  in skip
        untouched  b.bias
    """

    written: dict[str, Written]
    skipped: dict[str, str]
    untouched: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("written", name, _describe(w)) for name, w in self.written.items()]
        rows += [("skipped", name, reason) for name, reason in self.skipped.items()]
        rows += [("untouched", name, "") for name in self.untouched]
        width = max((len(name) for _, name, _ in rows), default=0)
        head = f"{len(self.written)} written, {len(self.skipped)} skipped, {len(self.untouched)} untouched"
        return "\n".join([head, *(f"{kind:9}  {name:{width}}  {text}".rstrip() for kind, name, text in rows)])


def _describe(written: Written) -> str:
    parts = [f"{written.scheme} by {written.pattern!r}", f"shape {tuple(written.shape)}"]
    if written.fans is not None:
        parts.append(f"fans {written.fans.fan_in:g} → {written.fans.fan_out:g}")
    if written.std is not None:
        parts.append(f"std {written.std:.4g}")
    if written.tied:
        parts.append(f"tied to {', '.join(written.tied)}")
    return ", ".join(parts)
