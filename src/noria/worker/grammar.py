"""Grammars: compiled once, and followed by the outputs that are bound to them.

Owns everything that is said to llguidance, which is imported when the first grammar comes. A grammar is compiled
beside the steps, never on their thread, and kept for others who ask for it. Which tokens a row may yield is worked out
as soon as its last one is known: beside the kernels that compute what comes next. Knows nothing of tokenisers: what
tokens stand for is told by `Vocabulary`.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.backends.base import TokenMasks
from noria.errors import BackendError, GrammarError
from noria.guidance import make_limits, make_tokenizer
from noria.messages import Vocabulary
from noria.plan import Admission, Int32, UInt32
from noria.worker.lane import Lane

_MOST_KEPT = 32  # compiled grammars
_MOST_KEPT_CHARACTERS = 2 << 20  # of their texts
# Characters of a text whose grammar is not kept beyond the requests that need it: compiled, one may take 150 bytes for
# each of them.
_LARGE = 64 << 10
_COMPILING_THREADS = 2
_MOST_MASK_THREADS = 8
_PIECE = 32  # tokens that a matcher takes at a time, holding Python's lock


class Compiled:
    """A grammar that rows can be bound to for as long as somebody holds this.

    Copies of a matcher share its lexer, which has only so many states: what the others have led it through counts. The
    prototype is therefore replaced when a copy comes to an end that one of its own would not.
    """

    __slots__ = ("__weakref__", "make", "prototype", "text")

    def __init__(self, text: str, make: Callable[[], Any], prototype: Any) -> None:
        self.text = text
        self.make = make  # an LLMatcher at the beginning that shares nothing
        self.prototype = prototype  # one that is copied, never advanced


class Grammars:
    """Compiled grammars. All methods may be called from any thread.

    Args:
        vocab: of the model's head; its tokenizer may have more or fewer tokens.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._lane = Lane("noria-grammar-compile", _COMPILING_THREADS)
        self._lock = threading.RLock()  # a callback may run at once
        self._kept: OrderedDict[str, Future[Compiled]] = OrderedDict()  # the one asked for last comes last
        self._alive: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()
        self._tokenizer: Future[Any] = Future()
        self._told = False

    def load(self, vocabulary: Vocabulary) -> None:
        """Takes in what tokens stand for; later calls change nothing. Returns at once."""
        with self._lock:
            if self._told:
                return
            self._told = True
        # Not in the lane, where those may wait who need it.
        threading.Thread(target=self._prepare, args=(vocabulary,), name="noria-vocabulary", daemon=True).start()

    def compile(self, text: str) -> Future[Compiled]:
        """Compiles a grammar (llguidance's serialised form), once the vocabulary is there; returns at once.

        The future has what must be held until the request that needs it has ended, or a GrammarError.
        """
        with self._lock:
            future = self._kept.get(text)
            if future is None or (future.done() and future.exception() is not None):
                future = self._kept[text] = self._lane.run(lambda: self._compile(text))
                if len(text) > _LARGE:
                    future.add_done_callback(lambda _: self._forget(text))
                    return future
            self._kept.move_to_end(text)
            while len(self._kept) > _MOST_KEPT or sum(map(len, self._kept)) > _MOST_KEPT_CHARACTERS:
                if len(self._kept) == 1:
                    break
                self._kept.popitem(last=False)
            return future

    def forget(self) -> None:
        """Keeps none of those that are compiled: what outputs did with one makes it grow, by tens of megabytes at
        most, and for most of them it takes milliseconds to compile it again."""
        with self._lock:
            for text in [text for text, future in self._kept.items() if future.done()]:
                del self._kept[text]

    def find(self, text: str) -> Compiled:
        """A grammar that was compiled and is held. Raises BackendError if there is none."""
        compiled = self._alive.get(text)
        if compiled is None:
            raise BackendError("a row is bound to a grammar that was not compiled")
        return compiled

    def close(self) -> None:
        """Ends the threads."""
        self._lane.close()

    def _forget(self, text: str) -> None:
        with self._lock:
            self._kept.pop(text, None)

    def _prepare(self, vocabulary: Vocabulary) -> None:
        try:
            self._tokenizer.set_result(make_tokenizer(vocabulary, self._vocab))
        except BaseException as error:  # a panic is no Exception
            self._tokenizer.set_exception(GrammarError(f"this model's tokens do not go with grammars: {error}"))

    def _compile(self, text: str) -> Compiled:
        tokenizer = self._tokenizer.result()
        held = self._alive.get(text)  # no longer kept, but by a request
        if held is not None:
            return held
        import llguidance

        def make() -> Any:
            return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=make_limits())

        prototype = make()
        if not prototype.is_error():
            prototype.compute_bitmask()  # so that no row's first mask is the one that takes longest
        if prototype.is_error():
            raise GrammarError(f"the grammar cannot be used: {_first_line(prototype.get_error())}")
        with self._lock:
            return self._alive.setdefault(text, Compiled(text, make, prototype))


class _Row:
    """Where one output stands in its grammar. `matcher` has taken in `output`, and is a copy of `source`."""

    __slots__ = ("compiled", "matcher", "output", "source")

    def __init__(self, compiled: Compiled, output: list[int]) -> None:
        self.compiled = compiled
        self.output = output
        self.follow(compiled.prototype)

    def follow(self, source: Any) -> None:
        """Begins again with a copy of this one."""
        self.source = source
        self.matcher = source.deep_copy()
        for at in range(0, len(self.output), _PIECE):
            if not self.matcher.consume_tokens(self.output[at : at + _PIECE]):
                return


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What background work on slots has led to: slot → why it cannot go on, and the row of one that has begun."""

    failures: dict[int, str]
    row: _Row | None = None


class Matchers:
    """Where each slot's output stands in its grammar, and which tokens may come next.

    All methods are called from the worker's thread; `grammars` may be used from any.

    Args:
        slots, vocab: of the worker.
        threads: of the kernels.
    """

    def __init__(self, slots: int, vocab: int, threads: int) -> None:
        self.grammars = Grammars(vocab)
        self._bound = np.zeros(slots, np.bool_)  # [slots] whether the slot's rows have a mask
        # Written by the background threads, and only read when they have finished with the slot.
        self._bits: UInt32 = np.zeros((slots, -(-vocab // 32)), np.uint32)
        self._threads = max(1, min(threads, _MOST_MASK_THREADS))
        self._executor: Any = None
        self._fixed: dict[int, UInt32] = {}  # slot → [words] mask of the tokens that its request allows
        self._rows: dict[int, _Row] = {}
        self._failures: dict[int, str] = {}  # slot → why it cannot go on
        self._pending: dict[int, Future[_Outcome]] = {}
        self._ending: dict[int, Future[_Outcome]] = {}  # of slots given up: their masks may still be written to
        # Rows that begin must not hold up the others: an output that comes back from a preemption may be long.
        self._beginning = Lane("noria-grammar-begin")
        self._advancing = Lane("noria-grammar-masks")

    def admit(self, admission: Admission) -> None:
        """Binds a slot to the grammar of its request, if it has one, and takes in its output so far; or to the tokens
        that the request allows."""
        slot, text = admission.slot, admission.params.grammar
        if admission.params.allowed_token_ids:
            self._fixed[slot] = _mask_of(admission.params.allowed_token_ids, self._bits.shape[1])
        if text is None:
            return
        compiled = self.grammars.find(text)
        output = admission.token_ids[admission.prompt_length :].tolist()
        before = self._ending.pop(slot, None)
        self._bound[slot] = True
        self._pending[slot] = self._beginning.run(lambda: self._begin(slot, compiled, output, before))

    def release(self, slot: int) -> None:
        """Forgets a slot's grammar."""
        self._bound[slot] = False
        self._fixed.pop(slot, None)
        self._rows.pop(slot, None)
        self._failures.pop(slot, None)
        pending = self._pending.pop(slot, None)
        if pending is not None and not pending.done():
            self._ending[slot] = pending

    def wait(self, slots: Int32) -> dict[int, str]:
        """Returns when the masks of these rows are there. Index of a row → why it cannot go on."""
        for slot in slots[self._bound[slots]].tolist() if self._pending else ():
            pending = self._pending.pop(slot, None)
            if pending is None:
                continue
            outcome = pending.result()
            if outcome.row is not None:
                self._rows[slot] = outcome.row
            if slot in outcome.failures:
                self._bound[slot] = False
                self._failures[slot] = outcome.failures[slot]
        if not self._failures:
            return {}
        return {row: self._failures[slot] for row, slot in enumerate(slots.tolist()) if slot in self._failures}

    def masks(self, slots: Int32) -> TokenMasks | None:
        """Of rows that were waited for; None if no row has one."""
        if not self._rows and not self._fixed:
            return None
        masked = self._bound[slots]
        fixed = [row for row, slot in enumerate(slots.tolist()) if slot in self._fixed] if self._fixed else []
        masked[fixed] = True
        rows = np.flatnonzero(masked)
        if not len(rows):
            return None
        bits = self._bits[slots[rows]]
        for row in fixed:
            bits[np.searchsorted(rows, row)] = self._fixed[int(slots[row])]
        return TokenMasks(rows.astype(np.int32), bits)

    def advance(self, slots: Int32, tokens: Int32) -> None:
        """Takes in the token sampled for each row, and begins to work out the next masks."""
        rows = np.flatnonzero(self._bound[slots]) if self._rows else ()
        if not len(rows):
            return
        bound, sampled = slots[rows].tolist(), tokens[rows].tolist()
        followed = [self._rows[slot] for slot in bound]
        pending = self._advancing.run(lambda: self._advance(bound, followed, sampled))
        for slot in bound:
            self._pending[slot] = pending

    def close(self) -> None:
        """Ends the threads."""
        self.grammars.close()
        self._beginning.close()
        self._advancing.close()

    # ------------------------------------------------------------------------------------------ in the background

    def _begin(self, slot: int, compiled: Compiled, output: list[int], before: Future[_Outcome] | None) -> _Outcome:
        if before is not None:
            before.exception()  # of who had the slot: until then its mask may be written to
        try:
            if self._executor is None:
                import llguidance

                self._executor = llguidance.LLExecutor(self._threads)
            row = _Row(compiled, output)
            return _Outcome(self._fill([slot], [row]), row)
        except BaseException as error:  # a panic is no Exception
            return _Outcome({slot: _excuse(str(error))})

    def _advance(self, slots: list[int], rows: list[_Row], tokens: list[int]) -> _Outcome:
        try:
            self._executor.consume_token_par([(row.matcher, token) for row, token in zip(rows, tokens, strict=True)])
            for row, token in zip(rows, tokens, strict=True):
                row.output.append(token)
            return _Outcome(self._fill(slots, rows))
        except BaseException as error:
            return _Outcome(dict.fromkeys(slots, _excuse(str(error))))

    def _fill(self, slots: list[int], rows: list[_Row]) -> dict[int, str]:
        """Works out masks, in parallel and without Python's lock. Slot → why it has none."""
        self._compute(slots, rows)
        for slot, row in zip(slots, rows, strict=True):
            if row.matcher.is_error():
                self._renew(slot, row)
        some: list[bool] = np.any(self._bits[slots], axis=1).tolist()
        failures = {
            s: _excuse(row.matcher.get_error()) for s, row in zip(slots, rows, strict=True) if row.matcher.is_error()
        }
        for slot, any_token in zip(slots, some, strict=True):
            if not any_token:
                failures.setdefault(slot, _excuse("no token is possible"))
        return failures

    def _renew(self, slot: int, row: _Row) -> None:
        """Tries a row in error again, without what other outputs have led its lexer through: it must not depend on
        them. What is in error then is in error by itself."""
        compiled = row.compiled
        if row.source is not compiled.prototype:  # another row has done so
            row.follow(compiled.prototype)
            self._compute([slot], [row])
        if row.matcher.is_error():
            row.follow(compiled.make())
            self._compute([slot], [row])
            if not row.matcher.is_error():
                compiled.prototype = row.source

    def _compute(self, slots: list[int], rows: list[_Row]) -> None:
        bits, pairs = self._bits, [(row.matcher, slot) for slot, row in zip(slots, rows, strict=True)]
        self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits))


def _mask_of(tokens: Sequence[int], words: int) -> UInt32:
    """[words] with the bits of these tokens."""
    ids = np.asarray(tokens, np.int64)
    mask = np.zeros(words, np.uint32)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask


def _excuse(error: str) -> str:
    return f"the output cannot follow the grammar any further: {_first_line(error)}"


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0]
