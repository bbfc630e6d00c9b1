"""An executor without a model, which holds every plan to the contract.

Its "cache" keeps, for each token position of each block, a digest of all tokens up to that position: what keys and
values depend on. A row that reads a position with any other digest has been given wrong blocks. Its next token is a
function of the digest of all tokens so far, so whatever changes a request's context changes its tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from noria.errors import GrammarError
from noria.messages import Vocabulary
from noria.params import SamplingParams
from noria.plan import Admission, PromptLogProbs, StepPlan, StepResult, TokenLogProbs, WorkerInfo

VOCAB = 64
TOP = 3


def digest_after(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def digests(tokens) -> list[bytes]:
    """One per position, over all tokens up to it."""
    found, before = [], b""
    for token in tokens:
        before = digest_after(before, int(token))
        found.append(before)
    return found


def next_token(digest: bytes, params: SamplingParams, choice: int, output_position: int, stop_ids) -> int:
    key = digest + f"{params.seed}/{choice}/{output_position}".encode()
    token = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") % VOCAB
    while output_position < params.min_tokens and token in stop_ids:
        token = (token + 1) % VOCAB
    return token


def alone(prompt, params: SamplingParams, stop_ids, choice, max_model_len, received=()) -> tuple[list[int], str]:
    """All output and the finish reason of a request that is alone in the world."""
    tokens = [*prompt, *received]
    limit = min(max_model_len, len(prompt) + (max_model_len if params.max_tokens is None else params.max_tokens))
    digest = digests(tokens)[-1]
    while True:
        output = len(tokens) - len(prompt)
        if output and tokens[-1] in stop_ids and output > params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt) :], "length"
        token = next_token(digest, params, choice, output, stop_ids)
        digest = digest_after(digest, token)
        tokens.append(token)


def score_of(digest: bytes) -> float:
    """The "log-probability" of a token with this digest."""
    return -float(int.from_bytes(digest[:2], "little")) / 1000.0


@dataclass
class Row:
    admission: Admission
    tokens: list[int]
    blocks: list[int]
    computed: int
    seen: list[bytes]  # digests of `tokens`


class FakeExecutor:
    """Runs plans at once, answers them in order. Every violation of the contract is an AssertionError."""

    def __init__(self, num_blocks=32, block_size=8, slots=4, max_model_len=64, budget=1 << 30, depth=2) -> None:
        self.info = WorkerInfo(
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=slots,
            backend="fake",
            isa="none",
            threads=1,
            weights="none",
            cache_dtype="f32",
            weight_bytes=0,
            cache_bytes=0,
        )
        self.budget = budget
        self.depth = depth
        self.cache: dict[tuple[int, int], bytes] = {}
        self.rows: dict[int, Row] = {}
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.computed_tokens = 0
        self.step = 0
        self.fail_at: int | None = None
        self.lonely = False
        self.closed = False
        self.vocabularies: list[Vocabulary] = []
        self.compiling: dict[str, Future[str]] = {}  # grammars that the test finishes itself
        self.dead_ends: dict[str, int] = {}  # grammar → output position at which no token is possible

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        self.vocabularies.append(vocabulary)

    def compile_grammar(self, grammar: str) -> Future[str]:
        future = self.compiling.get(grammar)
        if future is None:
            future = Future()
            if grammar.startswith("bad"):
                future.set_exception(GrammarError("the grammar cannot be used: it is bad"))
            else:
                future.set_result(grammar)
        return future

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        assert not self.lonely, "a step that was submitted alone is not collected yet"
        assert not (alone and self.results)
        self.lonely = alone
        assert plan.step == self.step + 1
        self.step = plan.step
        self.plans.append(plan)
        if plan.repeats:
            self._check_repeats(self.plans[-2], plan)
        self._apply(plan)
        self._check(plan)
        self.results.append(self._run(plan))
        assert len(self.results) <= self.depth

    def collect(self) -> StepResult:
        result = self.results.popleft()
        self.lonely = False
        if self.fail_at is not None and result.step >= self.fail_at:
            raise RuntimeError("the device caught fire")
        return result

    def close(self) -> None:
        self.closed = True

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.released.tolist():
            del self.rows[slot]
        for admission in plan.admitted:
            assert admission.slot not in self.rows
            assert 0 <= admission.slot < self.info.num_slots
            tokens = admission.token_ids.tolist()
            start = int(plan.starts[plan.slots.tolist().index(admission.slot)])
            self.rows[admission.slot] = Row(admission, tokens, admission.block_ids.tolist(), start, digests(tokens))
        for slot, block in zip(plan.append_slots.tolist(), plan.append_blocks.tolist(), strict=True):
            self.rows[slot].blocks.append(block)
        users = self._users()
        for source, target in plan.copies.tolist():
            assert source != target
            assert users[target] == 1
            for offset in range(self.info.block_size):
                self.cache.pop((target, offset), None)
                if (source, offset) in self.cache:
                    self.cache[target, offset] = self.cache[source, offset]

    def _users(self) -> Counter:
        for row in self.rows.values():
            assert len(set(row.blocks)) == len(row.blocks)
            assert all(0 <= block < self.info.num_blocks for block in row.blocks)
        return Counter(block for row in self.rows.values() for block in row.blocks)

    def _check(self, plan: StepPlan) -> None:
        slots = plan.slots.tolist()
        assert slots or len(plan.released)
        assert len(set(slots)) == len(slots)
        assert plan.tokens <= self.budget
        for column in (plan.slots, plan.starts, plan.counts, plan.append_slots, plan.append_blocks, plan.released):
            assert column.dtype == np.int32
        assert plan.sample.dtype == np.bool_
        assert len(plan.starts) == len(plan.counts) == len(plan.sample) == len(slots)
        users = self._users()
        for slot, start, count in zip(slots, plan.starts.tolist(), plan.counts.tolist(), strict=True):
            row = self.rows[slot]
            assert count >= 1
            assert start == row.computed
            assert start + count <= len(row.tokens) <= self.info.max_model_len
            assert start + count <= len(row.blocks) * self.info.block_size
            for position in range(start, start + count):
                assert users[row.blocks[position // self.info.block_size]] == 1, "a shared block is written"

    def _check_repeats(self, before: StepPlan, plan: StepPlan) -> None:
        size = self.info.block_size
        assert plan.slots.tolist() == before.slots.tolist() == [slot for slot in before.slots if slot in self.rows]
        assert before.counts.tolist() == plan.counts.tolist() == [1] * len(plan.slots)
        assert plan.starts.tolist() == [start + 1 for start in before.starts]
        assert all(start // size == (start + 1) // size for start in before.starts.tolist())
        assert before.sample.all()
        assert plan.sample.all()
        for changes in (plan.admitted, plan.append_slots, plan.append_blocks, plan.copies, plan.released):
            assert not len(changes)
        assert not plan.prompt_logprobs

    def _run(self, plan: StepPlan) -> StepResult:
        slots, tokens, chosen, pieces, failed = [], [], [], [], {}
        for number, slot in enumerate(plan.slots.tolist()):
            row, count = self.rows[slot], int(plan.counts[number])
            self._read_and_write(row, count)
            self.computed_tokens += count
            if number in plan.prompt_logprobs:
                pieces.extend(self._score(slot, row, row.computed - count, count))
            if plan.sample[number]:
                assert row.computed == len(row.tokens)
                admission = row.admission
                position = len(row.tokens) - admission.prompt_length
                token = next_token(row.seen[-1], admission.params, admission.choice, position, admission.stop_ids)
                row.tokens.append(token)
                row.seen.append(digest_after(row.seen[-1], token))
                if position >= self.dead_ends.get(admission.params.grammar, position + 1):
                    failed[len(slots)] = "the grammar is at a dead end"
                slots.append(slot)
                tokens.append(token)
                chosen.append(-token / 10.0)
        return StepResult(
            plan.step,
            np.array(slots, np.int32),
            np.array(tokens, np.int32),
            self._values(np.array(chosen, np.float32)),
            tuple(pieces),
            failed=failed,
        )

    def _read_and_write(self, row: Row, count: int) -> None:
        size = self.info.block_size
        places = [(block, offset) for block in row.blocks for offset in range(size)]
        stop = row.computed + count
        self.cache.update(zip(places[row.computed : stop], row.seen[row.computed : stop], strict=True))
        for position, place in enumerate(places[:stop]):
            assert self.cache.get(place) == row.seen[position], f"wrong content at position {position}"
        row.computed = stop

    def _score(self, slot: int, row: Row, start: int, count: int) -> list[PromptLogProbs]:
        """Of the tokens that the computed positions predict, in pieces of at most three."""
        first, stop = start + 1, min(start + count + 1, row.admission.prompt_length)
        pieces = []
        for begin in range(first, stop, 3):
            targets = range(begin, min(begin + 3, stop))
            chosen = np.array([score_of(row.seen[position]) for position in targets], np.float32)
            tokens = np.array([row.tokens[position] for position in targets], np.int32)
            pieces.append(PromptLogProbs(slot, begin, tokens, self._values(chosen)))
        return pieces

    @staticmethod
    def _values(chosen) -> TokenLogProbs:
        rows = len(chosen)
        top_ids = np.tile(np.arange(TOP, dtype=np.int32), (rows, 1))
        top = np.tile(-np.arange(TOP, dtype=np.float32), (rows, 1))
        return TokenLogProbs(chosen, np.ones(rows, np.int32), top_ids, top)
