"""Lines that break between words although the text comes in pieces. Knows nothing of terminals but their width."""

from __future__ import annotations

import re

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Holds a word until it is whole, and begins a new line before one that would cross the edge.

    Args:
        width: cells of a line. A word wider than that is left to the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._gap = ""  # white space that is only shown if its line goes on
        self._word = ""

    def push(self, text: str) -> str:
        """Takes more text; returns what can be shown."""
        shown: list[str] = []
        for part in _PARTS.findall(text):
            if part[0].isspace():
                shown.append(self.flush())
                self._space(part, shown)
            else:
                self._word += part
        return "".join(shown)

    def flush(self) -> str:
        """The word at hand, with what goes before it."""
        from rich.cells import cell_len

        word, self._word = self._word, ""
        if not word:
            return ""
        gap, self._gap = self._gap, ""
        cells = cell_len(word)
        if self._column and self._column + cell_len(gap) + cells > self._width:
            gap, self._column = "\n", 0
        else:
            self._column += cell_len(gap)
        self._column += cells
        if self._column > self._width:
            self._column %= self._width
        return gap + word

    def _space(self, part: str, shown: list[str]) -> None:
        if part == "\n":
            shown.append("\n")
            self._gap, self._column = "", 0
        else:
            self._gap += part.expandtabs(4)
