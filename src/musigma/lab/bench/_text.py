"""The table, a line a row as it is measured; the summary; and both as markdown."""

from __future__ import annotations

from collections.abc import Iterator

from musigma.lab.bench._row import AS_IT_COMES, REUSED, Measured, Row, Run, Times
from musigma.lab.bench._summary import PEERS, bars, means

# What a missed bar lists at most in the terminal; JSON and documentation have all
SHOWN = 12

NAME = 60
HEAD = (
    f"{'':{NAME}}{'as it comes, µs':^43}{'times as fast as':>20}  {'buffers reused':^26}\n"
    f"{'':{NAME}}{'copy':>7}{'eager':>12}{'compiled':>12}{'ours':>12}{'eager':>10}{'compiled':>10}"
    f"  {'eager':>8}{'compiled':>10}{'copies':>8}"
)
_SHORTER = {
    "float32": "f32",
    "bfloat16": "bf16",
    "channels_last": "last",
    "forward+backward": "fwd+bwd",
    " threads": "t",
    " thread": "t",
}


def line(row: Measured) -> str:
    """One row: medians in microseconds with their interquartile range in percent, and ratios."""
    name = row.name
    for word, shorter in _SHORTER.items():
        name = name.replace(word, shorter)
    name = name.ljust(NAME)
    if not row.right:
        worst = max(row.errors, key=lambda error: error.ours)
        return f"{name}WRONG: {worst.result} is off by {worst.ours:.3g}, torch's by {worst.torchs:.3g}"
    times = row.times.get(AS_IT_COMES, {})
    shown = [
        _micro(times, "copy", 7, spread=False),
        *(_micro(times, who, 12) for who in ("eager", "compiled", "ours")),
    ]
    shown += [_ratio(row.speedup(peer, AS_IT_COMES), 10) for peer in PEERS]
    shown += ["  ", *(_ratio(row.speedup(peer, REUSED), 8 + 2 * i) for i, peer in enumerate(PEERS))]
    shown.append(_ratio(row.copies() if isinstance(row, Row) else None, 8, ""))
    return f"{name}{''.join(shown)}".rstrip()


def _micro(times: Times, who: str, width: int, *, spread: bool = True) -> str:
    if who not in times:
        return " " * width
    t = times[who]
    value = t.median * 1e6
    shown = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return f"{shown}{f' ±{t.iqr:.0%}' if spread else ''}".rjust(width)


def _ratio(value: float | None, width: int, unit: str = "×") -> str:
    return " " * width if value is None else f"{value:.2f}{unit}".rjust(width)


def summary(run: Run, *, shown: int = SHOWN) -> Iterator[str]:
    """The means and the bars, a line each, and under a missed bar the cells that miss it."""
    for mean in means(run):
        mark = "" if mean.met else f", which misses {PEERS[mean.over]:g}"
        told = f"{mean.value:.2f} times {mean.over} over {mean.cells} rows"
        yield f"geometric mean, {mean.allocator}: {told}{mark}"
    for bar in bars(run):
        missed = bar.missed
        yield f"{bar.title}: {len(bar.judged) - len(missed)} of {len(bar.judged)}"
        for judged in missed[:shown]:
            yield f"    {judged.value:.2f} {_asked(judged.value, judged.limit)}  {judged.name}"
        if len(missed) > shown:
            yield f"    and {len(missed) - shown} more"
    wrong = [row for row in run.all if not row.right]
    if wrong:
        yield f"wrong, and so not timed: {len(wrong)}"


def _asked(value: float, limit: float) -> str:
    return f"(at {'least' if value < limit else 'most'} {limit:g})"
