"""Charts as SVG, by themselves: no library, no script, readable on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from xml.sax.saxutils import escape

# Distinct in both modes and for most eyes (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8a6fb0", "#7f7f7f")
STYLE = """<style>
svg text { font: 12px system-ui, sans-serif; fill: #24292f; }
svg .title { font-size: 14px; font-weight: 600; }
svg .quiet { fill: #57606a; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.axis { stroke: #57606a; stroke-width: 1; }
.level { stroke: #57606a; stroke-width: 1; stroke-dasharray: 5 4; }
.span { fill: #57606a; fill-opacity: 0.07; }
@media (prefers-color-scheme: dark) {
  svg text { fill: #e6edf3; } svg .quiet { fill: #9da7b1; } .grid { stroke: #30363d; }
  .axis, .level { stroke: #9da7b1; } .span { fill: #9da7b1; }
}
</style>"""
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 44, 52
_LETTER = 6.6  # width of a letter, about
_FEW = 40  # points up to which each one is a dot
_FEW_TICKS = 16  # distinct values of x up to which the axis is marked at them

Scale = Literal["log", "linear"]


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


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the x axis with a name, such as a phase."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Level:
    """A height with a name, such as an objective."""

    name: str
    value: float


def bare(chart: str) -> str:
    """A chart without its style, for a page that has STYLE once."""
    return chart.replace(f"{STYLE}\n", "")


def lines(
    title: str,
    x_title: str,
    y_title: str,
    series: Sequence[Series],
    scales: tuple[Scale, Scale] = ("log", "log"),
    spans: Sequence[Span] = (),
    levels: Sequence[Level] = (),
) -> str:
    """A chart of lines.

    Args:
        series: at least one point is needed.
        scales: of x and y. Linear ones of y begin at 0; what is not above 0 is left out of logarithmic ones.
        spans, levels: drawn behind the lines.
    """
    kept = [Series(one.name, [point for point in one.points if _fits(point, scales)]) for one in series]
    xs = [x for one in kept for x, _ in one.points] or [1.0]
    ys = [y for one in kept for _, y in one.points] or [1.0]
    ends = [edge for span in spans for edge in (span.start, span.end)] if scales[0] == "linear" else []
    heights = [one.value for one in levels if scales[1] == "linear" or one.value > 0]
    across = _axis(scales[0], [*xs, *ends], _LEFT, _WIDTH - _RIGHT)
    up = _axis(scales[1], [*ys, *heights, *([0.0] if scales[1] == "linear" else [])], _HEIGHT - _BOTTOM, _TOP)
    distinct = sorted(set(xs))
    own = scales[0] == "log" and len(distinct) <= _FEW_TICKS
    parts = [
        _text(_LEFT, 22, title, "title"),
        *_spans(spans, across),
        *_grid(across, up, _spread(distinct) if own else across.ticks()),
        *_titles(x_title, y_title),
        *_levels(levels, up),
    ]
    for index, one in enumerate(kept):
        parts += _drawn(one, COLOURS[index % len(COLOURS)], across, up)
        parts += _legend(index, one.name)
    return _svg(_wide(kept), max(_HEIGHT, _TOP + 20 * len(kept) + 20), title, parts)


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


def columns(title: str, y_title: str, groups: Sequence[str], series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Upright bars from zero, side by side in groups.

    Args:
        groups: names along the x axis, at least one.
        series: name, and a value for each group.
    """
    up = _axis("linear", [0.0, *(value for _, values in series for value in values)], _HEIGHT - _BOTTOM, _TOP)
    room = (_WIDTH - _LEFT - _RIGHT) / len(groups)
    width = 0.8 * room / max(len(series), 1)
    parts = [_text(_LEFT, 22, title, "title"), *_grid(None, up, ()), *_titles("", y_title)]
    for place, group in enumerate(groups):
        parts.append(_text(_LEFT + (place + 0.5) * room, _HEIGHT - _BOTTOM + 18, group, "quiet", "middle"))
        for index, (_, values) in enumerate(series):
            x, top = _LEFT + (place + 0.1) * room + index * width, up.place(values[place])
            size = f'width="{0.9 * width:.1f}" height="{max(_HEIGHT - _BOTTOM - top, 0.5):.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{top:.1f}" {size} fill="{COLOURS[index % len(COLOURS)]}"/>')
    for index, (name, _) in enumerate(series):
        parts += _legend(index, name)
    return _svg(_wide([Series(name, ()) for name, _ in series]), _HEIGHT, title, parts)


# ------------------------------------------------------------------------------------------------ axes


class _Axis(Protocol):
    """From values to places, and where to mark it."""

    def place(self, value: float) -> float: ...

    def ticks(self) -> list[float]: ...


class _Log:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._high = low, high if high > low else low * 10
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        part = math.log(value / self._low) / math.log(self._high / self._low)
        return self._start + part * (self._end - self._start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times the powers of ten within the range; the powers alone where that is a wide one."""
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        made = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [value for value in made if self._low <= value <= self._high]


class _Linear:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._high = low, high if high > low else low + 1.0
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """About six round values within the range."""
        rough = (self._high - self._low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [round(number * step, 12) for number in range(first, last + 1)]


def _axis(scale: Scale, values: Sequence[float], start: float, end: float) -> _Axis:
    kind = _Log if scale == "log" else _Linear
    return kind(min(values), max(values), start, end)


def _fits(point: tuple[float, float], scales: tuple[Scale, Scale]) -> bool:
    return all(value > 0 for value, scale in zip(point, scales, strict=True) if scale == "log")


def _spread(values: Sequence[float]) -> list[float]:
    """Those values above 0 that are far enough apart to be written."""
    kept: list[float] = []
    for value in values:
        if not kept or value / kept[-1] >= (values[-1] / values[0]) ** 0.07:
            kept.append(value)
    return kept


# ------------------------------------------------------------------------------------------------ parts


def _grid(across: _Axis | None, up: _Axis, xs: Sequence[float]) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    if across is not None:
        for x in xs:
            yield _line(across.place(x), _TOP, across.place(x), bottom, "grid")
            yield _text(across.place(x), bottom + 18, _number(x), "quiet", "middle")
    for y in up.ticks():
        yield _line(_LEFT, up.place(y), right, up.place(y), "grid")
        yield _text(_LEFT - 8, up.place(y) + 4, _number(y), "quiet", "end")
    yield _line(_LEFT, bottom, right, bottom, "axis")


def _titles(x_title: str, y_title: str) -> Iterator[str]:
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_title, "quiet", "middle")
    turned = f"translate(18 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)"
    yield f'<text class="quiet" text-anchor="middle" transform="{turned}">{escape(y_title)}</text>'


def _spans(spans: Sequence[Span], across: _Axis) -> Iterator[str]:
    """Every second one shaded, all of them named."""
    for index, span in enumerate(spans):
        start, end = across.place(span.start), across.place(span.end)
        if index % 2 == 0:
            size = f'width="{max(end - start, 0):.1f}" height="{_HEIGHT - _BOTTOM - _TOP}"'
            yield f'<rect class="span" x="{start:.1f}" y="{_TOP}" {size}/>'
        yield _text((start + end) / 2, _TOP - 6, span.name, "quiet", "middle")


def _levels(levels: Sequence[Level], up: _Axis) -> Iterator[str]:
    for level in levels:
        y = up.place(level.value)
        yield _line(_LEFT, y, _WIDTH - _RIGHT, y, "level")
        yield _text(_WIDTH - _RIGHT - 4, y - 4 if y > _TOP + 14 else y + 14, level.name, "quiet", "end")


def _drawn(one: Series, colour: str, across: _Axis, up: _Axis) -> Iterator[str]:
    places = [(across.place(x), up.place(y)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    name = f"<title>{escape(one.name)}</title>"
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2">{name}</polyline>'
    if len(places) <= _FEW:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)


def _legend(index: int, name: str) -> Iterator[str]:
    place, colour = _TOP + 12 + 20 * index, COLOURS[index % len(COLOURS)]
    yield f'<rect x="{_WIDTH - _RIGHT + 16}" y="{place - 9}" width="12" height="4" fill="{colour}"/>'
    yield _text(_WIDTH - _RIGHT + 34, place, name)


def _wide(series: Sequence[Series]) -> int:
    """Width of a chart whose legend has room for its names."""
    longest = max((len(one.name) for one in series), default=0)
    return _WIDTH + max(0, round(_LETTER * longest) - (_RIGHT - 38))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:,.4g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style} text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    return (
        head
        + f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">\n{STYLE}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
