"""Calls written as JSON objects, `{"name": …, "arguments": …}`: what the formats of most families have in common."""

from __future__ import annotations

import json
from collections.abc import Collection

from noria.frontend.grammar import is_unicode
from noria.server.tools.reader import MAX_NAME, Scanner, Steps

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")  # what else stands in an object that is certainly a call


class _Call:
    """What is known of a call that is being read."""

    __slots__ = ("arguments", "begun", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.begun = False


def read_calls(scanner: Scanner, known: Collection[str] | None = None) -> Steps[bool]:
    """One call, or a list of calls. False if what comes is none: then nothing was said of it. True: the scanner is
    behind the last call; what is wrong there is left to be read.

    Args:
        known: names of functions. If given, only what names one of these, and has no other members than calls have, is
            a call: for formats in which nothing else tells calls from other JSON. None: any name will do.
    """
    if not (yield from scanner.literal("[")):
        return (yield from read_call(scanner, known))
    yield from scanner.blanks()
    if not (yield from read_call(scanner, known)):
        return False
    while (yield from scanner.after_blanks(",")):
        yield from scanner.blanks()
        if not (yield from read_call(scanner, known)):
            scanner.at = 0
            return True
    yield from scanner.after_blanks("]")
    scanner.consume()
    return True


def read_call(scanner: Scanner, known: Collection[str] | None = None) -> Steps[bool]:
    """One call, as `read_calls`. Its arguments are passed on as they come, if its name stands before them."""
    if not (yield from scanner.literal("{")):
        return False
    call = _Call()
    while (yield from _member(scanner, call, known)):
        if (yield from scanner.after_blanks(",")):
            continue
        if not (yield from scanner.after_blanks("}")):
            break
        if call.name is None:
            return False
        if not call.begun:
            begin(scanner, call.name, call.arguments or "{}")
        scanner.consume()
        return True
    scanner.at = 0 if call.begun else scanner.at
    return call.begun


def _member(scanner: Scanner, call: _Call, known: Collection[str] | None) -> Steps[bool]:
    """A member of the object; False: this is no call, or goes no further."""
    yield from scanner.blanks()
    key = yield from scanner.string()
    if key is None or not (yield from scanner.after_blanks(":")):
        return False
    yield from scanner.blanks()
    if key == "name" and call.name is None:
        name = yield from scanner.string()
        if name is None or not 0 < len(name) <= MAX_NAME or (known is not None and name not in known):
            return False
        call.name = name
    elif key in _ARGUMENTS and call.arguments is None:
        if call.name is None:
            call.arguments = readable((yield from scanner.value()))
        else:
            call.arguments, call.begun = "", True
            scanner.begin(call.name)
            yield from read_arguments(scanner)
    elif known is not None and key not in _OTHERS:
        return False
    else:
        yield from scanner.value()
    return True


def read_arguments(scanner: Scanner) -> Steps[None]:
    """The arguments of the call that has just begun, as the model writes them."""
    if (yield from scanner.more()) and scanner.text[scanner.at] == "{":
        yield from scanner.value(scanner.argue)
    else:
        scanner.argue(readable((yield from scanner.value())))


def begin(scanner: Scanner, name: str, arguments: str) -> None:
    """A call that is known as a whole."""
    scanner.begin(name)
    scanner.argue(arguments)


def readable(text: str) -> str:
    """Arguments that are no object as they stand: an object that was written as a string is taken out of it, and
    none at all are an empty object."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    if value is None or value == "":
        return "{}"
    taken = isinstance(value, str) and value.lstrip().startswith("{") and is_unicode(value)
    return value if taken else text
