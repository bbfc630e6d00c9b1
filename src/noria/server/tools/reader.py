"""Reading an answer while it grows.

A format is a generator that reads a `Scanner` and waits, by `yield`, for text that has not come yet. It says what each
stretch of text is; whatever it has not decided on stays in the scanner. So the parts of an answer do not depend on how
its text was cut, and the whole of an answer is read by the same code as a stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple, TypeVar

from noria.frontend.grammar import is_unicode

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where more text is needed
BLANK = " \t\r\n"
MAX_NAME = 256  # characters of a function's name that is worth waiting for
_LONGEST = 4 * MAX_NAME  # of a key or name as JSON writes it
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_JSON = re.compile(r'[^\[\]{}":,+\-._ \t\r\n0-9A-Za-z]')  # outside of strings
_NO_TEXT = re.compile(r'["\\]')  # inside of them
_NO_FILLING = re.compile(r"[^:,+\-._ \t\r\n0-9A-Za-z]")  # within brackets
_AT_ONCE = 4096  # characters that are read between two decisions


class Part(NamedTuple):
    """A stretch of an answer.

    `call`: the call's place among the answer's calls; the text of kind "call" is the function's name.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0


class Scanner:
    """Text that no decision was taken on yet, and the parts that were decided.

    White space around calls is layout: it is only content where other content follows.

    Attributes:
        text: undecided; `at`: how far the format has read into it.
        ended: no more text will come.
        calls: how many were begun.
    """

    __slots__ = ("_blank", "_limit", "_parts", "_silent", "at", "calls", "ended", "text")

    def __init__(self, limit: int | None = None) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.calls = 0
        self._limit = limit
        self._parts: list[Part] = []
        self._blank = ""
        self._silent = False  # beyond the limit of calls

    def take(self) -> list[Part]:
        """What was decided since the last time."""
        parts, self._parts = self._parts, []
        return parts

    # -------------------------------------------------------------------------------------------- what it is

    def say(self, end: int) -> None:
        """The text before `end` is content."""
        text = self.text[:end]
        self._drop(end)
        kept = text.rstrip(BLANK)
        if not kept:
            self._blank += text  # not looked at again: a model may write nothing but lines that are empty
            return
        if not self._silent:
            self._parts.append(Part("content", self._blank + kept))
        self._blank = text[len(kept) :]

    def close(self) -> None:
        """The rest is content, and the answer is over."""
        self.say(len(self.text))
        if self._blank and not self.calls:
            self._parts.append(Part("content", self._blank))

    def begin(self, name: str) -> None:
        """A call begins; what was read belongs to it."""
        self._drop(self.at)
        self._blank = ""
        self._silent = self._limit is not None and self.calls >= self._limit
        if not self._silent:
            self._parts.append(Part("call", name, self.calls))
            self.calls += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the latest call. What was read belongs to them."""
        self._drop(self.at)
        if text and not self._silent:
            self._parts.append(Part("arguments", text, self.calls - 1))

    def consume(self) -> None:
        """What was read is part of a call and need not be shown."""
        self._drop(self.at)

    def _drop(self, count: int) -> None:
        self.text = self.text[count:]
        self.at = max(0, self.at - count)

    # -------------------------------------------------------------------------------------------- reading

    def more(self) -> Steps[bool]:
        """Waits for a character to read; False: there is none."""
        while self.at >= len(self.text):
            if self.ended:
                return False
            yield
        return True

    def blanks(self) -> Steps[None]:
        """Goes past white space."""
        while (yield from self.more()) and self.text[self.at] in BLANK:
            self.at += 1

    def literal(self, wanted: str) -> Steps[bool]:
        """Goes past `wanted` if it is what comes next."""
        while wanted.startswith(rest := self.text[self.at : self.at + len(wanted)]):
            if rest == wanted:
                self.at += len(wanted)
                return True
            if self.ended:
                return False
            yield
        return False

    def after_blanks(self, wanted: str) -> Steps[bool]:
        """Goes past white space and `wanted`, or nowhere."""
        before = self.at
        yield from self.blanks()
        if (yield from self.literal(wanted)):
            return True
        self.at = before
        return False

    def find(self, *marks: str) -> Steps[str]:
        """Says what stands before the first of `marks` and goes to it; "" where none comes: then all was said."""
        self.at = 0
        while True:
            found = [(place, mark) for mark in marks if (place := self.text.find(mark)) >= 0]
            if found:
                place, mark = min(found)
                self.say(place)
                return mark
            kept = 0 if self.ended else max(overlap(self.text, mark) for mark in marks)
            self.say(len(self.text) - kept)
            if self.ended:
                return ""
            yield

    def string(self) -> Steps[str | None]:
        """A JSON string, decoded; None if that is not what comes next."""
        if not (yield from self.more()) or self.text[self.at] != '"':
            return None
        while (match := _STRING.match(self.text, self.at)) is None:
            if self.ended or len(self.text) - self.at > _LONGEST:
                return None
            yield
        if len(match[0]) > _LONGEST:
            return None
        self.at = match.end()
        return decode_string(match[0])

    def value(self, use: Callable[[str], None] | None = None) -> Steps[str]:
        """Goes past a JSON value, as far as brackets and quotes tell where it ends. `use` is given its text as it
        comes; the text as a whole is returned without it."""
        span, parts = Span(), []
        while True:
            end = span.end(self.text, self.at)
            piece, self.at = self.text[self.at : end], end
            if use is None:
                parts.append(piece)
            elif piece:
                use(piece)
            if span.over or not (yield from self.more()):
                return "".join(parts)


class Span:
    """Finds where a JSON value ends that comes in pieces. Does not check that it is one: a model's slip in the middle
    of an object is for whoever reads the arguments. What cannot stand outside of strings ends it."""

    __slots__ = ("_begun", "_depth", "_escaped", "_quoted", "over")

    def __init__(self) -> None:
        self.over = False
        self._begun = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end(self, text: str, at: int) -> int:
        """Goes on at `at`; returns where the value, or the text, ends."""
        while at < len(text):
            if (self._quoted or self._depth) and not self._escaped:  # what changes nothing is passed over at once
                found = (_NO_TEXT if self._quoted else _NO_FILLING).search(text, at)
                if found is None:
                    return len(text)
                at = found.start()
            character = text[at]
            if self._quoted:
                at += 1
                self._inside(character)
            elif _NO_JSON.match(character) or (not self._depth and self._ends(character)):
                self.over = True
            else:
                at += 1
                self._outside(character)
            if self.over:
                break
        return at

    def _ends(self, character: str) -> bool:
        """Whether a character that is in no brackets belongs to what follows the value."""
        return character in ",]}" or (self._begun and character in BLANK)

    def _inside(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            self.over = not self._depth

    def _outside(self, character: str) -> None:
        self._begun = True
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.over = self._depth <= 0


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def decode_string(text: str) -> str | None:
    """A JSON string's value, control characters allowed; None if it is none."""
    try:
        value: Any = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) and is_unicode(value) else None


class Reading:
    """An answer that is being read in one format."""

    __slots__ = ("_over", "_scanner", "_steps")

    def __init__(self, read: Callable[[Scanner], Steps[None]], limit: int | None = None) -> None:
        self._scanner = Scanner(limit)
        self._steps = read(self._scanner)
        self._over = False
        self._go_on()

    @property
    def calls(self) -> int:
        """How many calls were begun."""
        return self._scanner.calls

    def push(self, text: str) -> list[Part]:
        """Takes more of the answer; returns what is certain of it."""
        for start in range(0, len(text), _AT_ONCE):  # what is decided on is cut off: not from a whole long answer
            self._scanner.text += text[start : start + _AT_ONCE]
            self._go_on()
        return self._scanner.take()

    def finish(self) -> list[Part]:
        """The rest: nothing more will come."""
        self._scanner.ended = True
        self._go_on()
        self._scanner.close()
        return self._scanner.take()

    def _go_on(self) -> None:
        if not self._over:
            try:
                next(self._steps)
            except StopIteration:
                self._over = True
        if self._over:
            self._scanner.say(len(self._scanner.text))
