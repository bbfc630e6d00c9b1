"""Reads a page of figures as a browser would: what it says, what it would fetch, whether its tags match."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = ("meta", "br", "link", "img")
_FETCHING = ("src", "href", "srcset", "data", "action")


@dataclass
class PageReader(HTMLParser):
    """Attributes:
    cells: text of every table cell. texts: of every piece of SVG text. lines: name of each line → its points.
    fetched: addresses that the page would load. scripts: how many there are.
    """

    cells: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    scripts: int = 0
    charts: int = 0
    open_tags: list[str] = field(default_factory=list)
    _points: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [value or "" for name, value in attrs if name in _FETCHING]
        self.scripts += tag == "script" or any(name.startswith("on") for name in given)
        self.charts += tag == "svg"
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "text":
            self.texts.append("")
        if tag == "polyline":
            pairs = (given["points"] or "").split()
            self._points = [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]
        if tag not in _VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        place = self.open_tags[-1] if self.open_tags else ""
        if any(tag in ("td", "th") for tag in self.open_tags):
            self.cells[-1] += data
        if place == "text":
            self.texts[-1] += data
        if place == "title" and "polyline" in self.open_tags:
            self.lines[data] = self._points
        if place == "style":
            assert "url(" not in data
            assert "@import" not in data


def read_page(text: str) -> PageReader:
    """Checks that the page is whole and needs nothing else."""
    reader = PageReader()
    reader.feed(text)
    reader.close()
    assert reader.open_tags == []
    assert reader.fetched == []
    assert reader.scripts == 0
    return reader
