"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, later `[TOOL_CALLS]name[ARGS]{…}` for each call, with or
without `[ARGS]`, and with a `[CALL_ID]` in some."""

from __future__ import annotations

from collections.abc import Collection

from noria.server.tools.calls import read_arguments, read_calls
from noria.server.tools.reader import MAX_NAME, Scanner, Steps

MARK, IDENTITY, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_LENGTH = 64  # characters, more than any has


def read(scanner: Scanner, names: Collection[str]) -> Steps[None]:
    """What follows the mark is a list of calls, or the name of a function, whatever it names."""
    while (yield from scanner.find(MARK)):
        scanner.at = len(MARK)
        yield from scanner.blanks()
        more = yield from scanner.more()
        if more and scanner.text[scanner.at] in "[{":
            made = yield from read_calls(scanner)
        else:
            made = yield from _named(scanner)
        if not made:
            scanner.say(len(MARK))


def _named(scanner: Scanner) -> Steps[bool]:
    """A name and its arguments."""
    name = yield from _word(scanner, MAX_NAME)
    if not name:
        return False
    yield from scanner.blanks()
    if (yield from scanner.literal(IDENTITY)):
        yield from _word(scanner, _ID_LENGTH)
        yield from scanner.blanks()
    yield from scanner.literal(ARGUMENTS)
    yield from scanner.blanks()
    if not (yield from scanner.more()) or scanner.text[scanner.at] != "{":
        return False
    scanner.begin(name)
    yield from read_arguments(scanner)
    return True


def _word(scanner: Scanner, longest: int) -> Steps[str]:
    """Letters, digits, `_`, `-` and `.` that come next; "" if there are more than `longest`."""
    start = scanner.at
    while (yield from scanner.more()):
        character = scanner.text[scanner.at]
        if not (character.isascii() and character.isalnum()) and character not in "_-.":
            break
        scanner.at += 1
        if scanner.at - start > longest:
            return ""
    return scanner.text[start : scanner.at]
