"""The run as one picture: every row a dot, by how many times as fast as each peer it is. Plain SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from musigma.lab.bench._cell import CHANNELS, ROWS
from musigma.lab.bench._row import AS_IT_COMES, Row, Run
from musigma.lab.bench._summary import geometric_mean, judged_against

WIDTH, LEFT, GAP, MARGIN = 900, 226, 34, 24
TOP, LANE, FOOT = 112, 30, 74

# Both read well on white and on near black (contrast at least 3 on each)
COLOURS = {"float32": "#3d85c8", "bfloat16": "#d9762b"}
STYLE = """
  .t { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .h { font: 600 16px system-ui, sans-serif; fill: #1f2328 }
  .s { font: 12px system-ui, sans-serif; fill: #59636e }
  .g { stroke: #d1d9e0; stroke-width: 1 }
  .one { stroke: #59636e; stroke-width: 1.5 }
  .m { stroke: #1f2328; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    .t, .h { fill: #f0f6fc }
    .s { fill: #9198a1 }
    .g { stroke: #3d444d }
    .one { stroke: #9198a1 }
    .m { stroke: #f0f6fc }
  }
"""
PANELS = {"eager": ("times as fast as torch", 3), "compiled": ("times as fast as torch.compile", 2)}
"""Each peer's heading, and its share of the width."""


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis from `low` to `high` over the pixels from `left` to `right`."""

    low: float
    high: float
    left: float
    right: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.left + min(1.0, max(0.0, share)) * (self.right - self.left)

    @property
    def ticks(self) -> list[float]:
        steps = (m * 10.0**e for e in range(-3, 5) for m in (1, 2, 5))
        near = [t for t in steps if self.low <= t <= self.high]
        return near if len(near) < 8 else [t for t in near if math.log10(t) % 1 == 0 or t < 1]


def picture(run: Run, allocator: str = AS_IT_COMES) -> str:
    """Draw it.

    Args:
        run: what was measured.
        allocator: in which state.

    Returns:
        an SVG document that follows its reader's light or dark mode.
    """
    labels = [label for label in _labels(run) if _rows(run, label)]
    height = TOP + LANE * len(labels) + FOOT
    parts = [*_head(run, allocator)]
    for i, label in enumerate(labels):
        y = TOP + LANE * (i + 0.5)
        parts.append(
            f'<text class="t" x="{LEFT - 14}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    panels = {peer: told for peer, told in PANELS.items() if _speedups(run.rows, peer, allocator)}
    room = WIDTH - LEFT - MARGIN - GAP * (len(panels) - 1)
    left, shares = float(LEFT), sum(share for _, share in panels.values())
    for peer, (title, share) in panels.items():
        right = left + room * share / shares
        parts += _panel(run, labels, peer, title, allocator, (left, right))
        left = right + GAP
    parts += _legend(height)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">\n<title>{escape(_title(run, allocator))}</title>\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _labels(run: Run) -> list[str]:
    order = (*ROWS, *CHANNELS)
    ranked = sorted(run.rows, key=lambda row: order.index(row.cell.op))
    return list(dict.fromkeys(row.cell.title for row in ranked))


def _rows(run: Run, label: str) -> list[Row]:
    return [row for row in run.rows if row.cell.title == label and row.times]


def _title(run: Run, allocator: str) -> str:
    means = [
        f"{geometric_mean(speedups):.1f} times as fast as {told}"
        for peer, told in (("eager", "torch"), ("compiled", "torch.compile"))
        if (speedups := _speedups(run.rows, peer, allocator))
    ]
    return f"In the geometric mean {' and '.join(means)}" if means else "Nothing was measured"


def _speedups(rows: Iterable[Row], peer: str, allocator: str) -> list[float]:
    return [s for row in rows if (s := row.speedup(peer, allocator)) is not None]


def _head(run: Run, allocator: str) -> Iterable[str]:
    threads = " and ".join(str(n) for n in sorted({row.cell.threads for row in run.rows}))
    told = [run.machine.get("cpu", ""), f"{threads} thread{'' if threads == '1' else 's'}"]
    told += [f"{name} {run.machine[name]}" for name in ("torch", "musigma") if name in run.machine]
    told += [f"memory {allocator}", f"{len(run.rows)} rows"]
    yield f'<text class="h" x="{MARGIN}" y="32">{escape(_title(run, allocator))}</text>'
    yield f'<text class="s" x="{MARGIN}" y="54">{escape(", ".join(part for part in told if part))}</text>'


def _panel(
    run: Run, labels: Sequence[str], peer: str, title: str, allocator: str, between: tuple[float, float]
) -> Iterable[str]:
    values = _speedups(run.rows, peer, allocator) or [1.0]
    axis = _Axis(min(0.5, *values) / 1.1, max(4.0, *values) * 1.1, *between)
    top, bottom = TOP, TOP + LANE * len(labels)
    yield f'<text class="t" x="{axis.left:.1f}" y="{top - 30}">{escape(title)}</text>'
    for tick in axis.ticks:
        x, kind = axis.at(tick), "one" if tick == 1 else "g"
        yield f'<line class="{kind}" x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="s" x="{x:.1f}" y="{top - 11}" text-anchor="middle">{tick:g}×</text>'
    for i, label in enumerate(labels):
        middle = top + LANE * (i + 0.5)
        rows = _rows(run, label)
        for row in rows:
            yield from _dot(row, peer, allocator, axis, middle)
        if speedups := _speedups(rows, peer, allocator):
            x = axis.at(geometric_mean(speedups))
            yield f'<line class="m" x1="{x:.1f}" y1="{middle - 11}" x2="{x:.1f}" y2="{middle + 11}"/>'


def _dot(row: Row, peer: str, allocator: str, axis: _Axis, middle: float) -> Iterable[str]:
    judged = judged_against(row, peer, allocator)
    if judged is None:
        return
    # Forward alone above, with its backward below
    y = middle + (5 if row.cell.backward else -5)
    colour = COLOURS[row.cell.dtype]
    fill = f'fill="{colour}" fill-opacity="0.75"' if judged.met else f'fill="none" stroke="{colour}"'
    told = f"{row.cell.name}: {judged.value:.2f}×"
    yield (
        f'<circle cx="{axis.at(judged.value):.1f}" cy="{y:.1f}" r="{3.2 if judged.met else 3.6}" {fill} '
        f'stroke-width="1.6"><title>{escape(told)}</title></circle>'
    )


def _legend(height: int) -> Iterable[str]:
    x, y = float(LEFT), height - 42
    for dtype, colour in COLOURS.items():
        yield f'<circle cx="{x + 4:.0f}" cy="{y - 4}" r="4" fill="{colour}"/>'
        yield f'<text class="s" x="{x + 14:.0f}" y="{y}">{dtype}</text>'
        x += 86
    yield f'<circle cx="{x + 4:.0f}" cy="{y - 4}" r="3.6" fill="none" stroke="#8b949e" stroke-width="1.6"/>'
    yield f'<text class="s" x="{x + 14:.0f}" y="{y}">slower, beyond noise</text>'
    yield f'<line class="m" x1="{x + 152:.0f}" y1="{y - 13}" x2="{x + 152:.0f}" y2="{y + 4}"/>'
    yield f'<text class="s" x="{x + 162:.0f}" y="{y}">geometric mean</text>'
    told = "Every dot is a row of the table: forward alone above, forward and backward below."
    yield f'<text class="s" x="{LEFT}" y="{y + 22}">{told}</text>'
