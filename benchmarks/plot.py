"""Charts as SVG, by themselves: no library, no script, readable on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Distinct in both modes and for most eyes (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8a6fb0", "#7f7f7f")
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 14px; font-weight: 600; }
.quiet { fill: #57606a; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.axis { stroke: #57606a; stroke-width: 1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .quiet { fill: #9da7b1; } .grid { stroke: #30363d; } .axis { stroke: #9da7b1; }
}
</style>"""
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 44, 52


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name and points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """`strong`: ours. `note`: behind the figure."""

    name: str
    value: float
    note: str = ""
    strong: bool = False


def lines(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """A chart of lines over two logarithmic axes. At least one point is needed, and all must be above 0."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = [_text(_LEFT, 22, title, "title")]
    for x in _ticks(sorted(set(xs))):
        parts.append(_line(across(x), _TOP, across(x), _HEIGHT - _BOTTOM, "grid"))
        parts.append(_text(across(x), _HEIGHT - _BOTTOM + 18, _number(x), "quiet", "middle"))
    for y in up.decades():
        parts.append(_line(_LEFT, up(y), _WIDTH - _RIGHT, up(y), "grid"))
        parts.append(_text(_LEFT - 8, up(y) + 4, _number(y), "quiet", "end"))
    parts.append(_line(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, "axis"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_title, "quiet", "middle"))
    turned = f"translate(18 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)"
    parts.append(f'<text class="quiet" text-anchor="middle" transform="{turned}">{escape(y_title)}</text>')
    for index, one in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in one.points]
        place = _TOP + 12 + 20 * index
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 16}" y="{place - 9}" width="12" height="4" fill="{colour}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 34, place, one.name))
    return _svg(_WIDTH, _HEIGHT, title, parts)


def bars(title: str, unit: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from zero, in the order given."""
    left, right, step = 210, 190, 30
    height = 52 + step * len(rows) + 12
    most = max((row.value for row in rows), default=1.0) or 1.0
    parts = [_text(16, 22, title, "title"), _text(16, 40, unit, "quiet")]
    for index, row in enumerate(rows):
        top = 52 + step * index
        width = (_WIDTH - left - right) * row.value / most
        colour = COLOURS[0] if row.strong else COLOURS[7]
        parts.append(_text(left - 10, top + 15, row.name, "", "end"))
        parts.append(f'<rect x="{left}" y="{top}" width="{max(width, 1):.1f}" height="20" rx="2" fill="{colour}"/>')
        note = f" {row.note}" if row.note else ""
        parts.append(_text(left + width + 8, top + 15, f"{row.value:,.0f}{note}"))
    return _svg(_WIDTH, height, title, parts)


class _Axis:
    """A logarithmic one: from values to places."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low * 10
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self._start + part * (self._end - self._start)

    def decades(self) -> list[float]:
        """1, 2 and 5 times the powers of ten within the range; the powers alone where that is a wide one."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        made = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [value for value in made if self.low <= value <= self.high]


def _ticks(values: Sequence[float]) -> list[float]:
    """Those values that are far enough apart to be written."""
    kept: list[float] = []
    for value in values:
        if not kept or value / kept[-1] >= (values[-1] / values[0]) ** 0.07:
            kept.append(value)
    return kept


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style} text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    return (
        head
        + f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">\n{_STYLE}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
