"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after the other."""

from __future__ import annotations

from collections.abc import Collection

from noria.server.tools.calls import read_calls
from noria.server.tools.reader import Scanner, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(scanner: Scanner, names: Collection[str]) -> Steps[None]:
    """What the tags enclose is a call, or a list of calls, whatever it names."""
    while (yield from scanner.find(OPEN)):
        scanner.at = len(OPEN)
        yield from scanner.blanks()
        if (yield from read_calls(scanner)):
            yield from scanner.after_blanks(CLOSE)
            scanner.consume()
        else:
            scanner.say(len(OPEN))
