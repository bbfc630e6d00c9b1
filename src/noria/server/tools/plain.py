"""Functions in JSON, for Gemma and all that were taught no format of their own: `{"name": …, "parameters": {…}}`, or a
list of such objects, as the beginning of the answer or in a block of code."""

from __future__ import annotations

from collections.abc import Collection

from noria.server.tools.calls import read_calls
from noria.server.tools.reader import Scanner, Steps

FENCE = "```"
_LANGUAGES = ("json", "tool_call", "tool_code")


def read(scanner: Scanner, names: Collection[str]) -> Steps[None]:
    """Only objects that name a known function are calls: nothing else tells them from other JSON."""
    yield from scanner.blanks()
    if (yield from read_calls(scanner, names)):
        yield from _further(scanner, names)
    while (yield from scanner.find(FENCE)):
        scanner.at = len(FENCE)
        for language in _LANGUAGES:
            if (yield from scanner.literal(language)):
                break
        yield from scanner.blanks()
        if (yield from read_calls(scanner, names)):
            yield from _further(scanner, names)
            yield from scanner.after_blanks(FENCE)
            scanner.consume()
        else:
            scanner.say(len(FENCE))


def _further(scanner: Scanner, names: Collection[str]) -> Steps[None]:
    """More calls that follow directly, with nothing but white space between."""
    while True:
        yield from scanner.blanks()
        if not (yield from read_calls(scanner, names)):
            scanner.at = 0
            return
