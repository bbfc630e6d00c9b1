"""Llama 3.1 and later: `{"name": …, "parameters": {…}}` as the whole answer, or after `<|python_tag|>`; `;` between
several."""

from __future__ import annotations

from collections.abc import Collection

from noria.server.tools.calls import read_call
from noria.server.tools.reader import Scanner, Steps

TAG = "<|python_tag|>"
BETWEEN = ";"


def read(scanner: Scanner, names: Collection[str]) -> Steps[None]:
    """An answer that begins with an object which names a known function is a call; after the tag any name will do."""
    yield from scanner.blanks()
    yield from _row(scanner, names)
    while (yield from scanner.find(TAG)):
        scanner.at = len(TAG)
        yield from scanner.blanks()
        if not (yield from _row(scanner, None)):
            scanner.say(len(TAG))


def _row(scanner: Scanner, known: Collection[str] | None) -> Steps[bool]:
    """One call or several, with semicolons between them. False: not even one."""
    if not (yield from read_call(scanner, known)):
        return False
    while (yield from scanner.after_blanks(BETWEEN)):
        yield from scanner.blanks()
        if not (yield from read_call(scanner, known)):
            scanner.at = 0
            return True
    return True
