"""The process that compiles grammars for a server: `python -m noria.frontend.grammar_worker SECONDS MEGABYTES`.

Framed msgpack on standard input and output: first the vocabulary, answered by an empty message once the tokeniser is
ready; then a `Spec` at a time, answered by a `Verdict`. It ends with its input. What it does for one specification is
bounded in time (it kills itself, even where its parent is gone) and in memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from noria.errors import GrammarError
from noria.frontend.grammar import Spec, SpecError, compile_spec
from noria.guidance import make_tokenizer
from noria.messages import Vocabulary
from noria.wire import Frames, frame

_PIECE = 1 << 16  # bytes read at a time
# Of the thread that compiles: less than what an engine has for the same, so that what is accepted here can be compiled
# there, however deep its rules go.
_STACK = 2 << 20  # bytes
_GRACE = 2.0  # seconds that its parent has to end it before it does so itself


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """A serialised grammar, or why there is none."""

    grammar: str | None
    error: str | None = None


def verdict(spec: Spec, tokenizer: Any) -> Verdict:
    """What becomes of a specification, whatever happens short of the end of the process.

    Args:
        tokenizer: an `LLTokenizer`, or why there is none.
    """
    if isinstance(tokenizer, GrammarError):
        return Verdict(None, f"nothing can be asked of this model's answers: {tokenizer}")
    try:
        return Verdict(compile_spec(spec, tokenizer))
    except SpecError as error:
        return Verdict(None, str(error))
    except MemoryError:
        return Verdict(None, "it needs too much memory to compile")
    except BaseException as error:  # native code that gave up raises what is no Exception
        return Verdict(None, f"it cannot be compiled ({type(error).__name__})")


def bound(megabytes: int) -> None:
    """Limits the memory of this process, where the system can, and what it leaves behind when it dies."""
    size = megabytes << 20
    for kind, limit in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _messages() -> Iterator[bytes]:
    frames = Frames()
    while data := os.read(0, _PIECE):
        yield from frames.feed(data)


def _write(out: int, data: bytes) -> None:
    view = memoryview(frame(data))
    while view:
        view = view[os.write(out, view) :]


def answer_all(out: int, seconds: float) -> None:
    """Answers on `out` until the input ends; `seconds` for each."""
    messages = _messages()
    first = next(messages, None)
    if first is None:
        return
    vocabulary = msgspec.msgpack.decode(first, type=Vocabulary)
    try:
        tokenizer: Any = make_tokenizer(vocabulary)
    except GrammarError as error:
        tokenizer = error  # that is what becomes of all
    _write(out, b"")
    decoder, encoder = msgspec.msgpack.Decoder(Spec), msgspec.msgpack.Encoder()
    for message in messages:
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)
        made = verdict(decoder.decode(message), tokenizer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(out, encoder.encode(made))


def main() -> None:
    """Sets the process up and answers until its input ends."""
    seconds, megabytes = float(sys.argv[1]), int(sys.argv[2])
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is not an answer
    bound(megabytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(_STACK)
    answering = threading.Thread(target=answer_all, args=(out, seconds))
    answering.start()
    answering.join()


if __name__ == "__main__":
    main()
