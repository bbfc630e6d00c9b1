"""The native sampler against the reference sampler, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from noria.backends.base import SlotSampling, TokenMasks
from noria.backends.reference.philox import uniform
from noria.backends.reference.sampling import (
    ReferenceSampler,
    SlotState,
    adjust,
    allowed_tokens,
    distribution,
    log_probs,
)
from noria.params import SamplingParams
from noria.plan import TokenLogProbs

native: Any = pytest.importorskip("noria._native")

NONE = np.empty(0, np.int32)
# Logits of magnitude 20 are off by 2^-24 relative in float32, so probabilities by about 2e-6.
SLACK = 1e-5


@dataclass
class Native:
    """The binding behind the `Sampler` protocol."""

    slots: int
    vocab: int
    threads: int = 1

    def __post_init__(self) -> None:
        self.sampler = native.Sampler(self.slots, self.vocab)
        self.pool = native.Pool(self.threads)

    def admit(self, slot: int, sampling: SlotSampling) -> None:
        p = sampling.params
        self.sampler.admit(
            slot,
            p.seed,
            sampling.choice,
            p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
            p.repetition_penalty,
            p.frequency_penalty,
            p.presence_penalty,
            p.min_tokens,
            -1 if p.logprobs is None else p.logprobs,
            np.array(list(p.logit_bias), np.int32),
            np.array(list(p.logit_bias.values()), np.float32),
            np.array(sampling.stop_ids, np.int32),
            sampling.token_ids,
            sampling.prompt_length,
        )

    def sample(
        self, logits: np.ndarray, slots: Any, positions: Any, masks: TokenMasks | None = None
    ) -> tuple[np.ndarray, TokenLogProbs | None]:
        masks = masks or TokenMasks(NONE, np.empty((0, -(-self.vocab // 32)), np.uint32))
        tokens, columns = self.sampler.sample(
            self.pool,
            logits.copy(),
            np.array(slots, np.int32),
            np.array(positions, np.int32),
            masks.rows,
            masks.bits,
        )
        return tokens, None if columns is None else TokenLogProbs(*columns)


def row(seed: int, vocab: int, spread: float = 3.0) -> np.ndarray:
    """Logits somewhat like a model's: a broad hill and a few that stand out."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal(vocab) * spread
    logits[random.integers(0, vocab, 5)] += 4 * spread
    return logits.astype(np.float32)


def slot(
    choice: int = 0, tokens: Any = (), prompt: int = 0, stop_ids: tuple[int, ...] = (), **params: Any
) -> SlotSampling:
    params.setdefault("seed", 17)
    return SlotSampling(SamplingParams(**params), choice, stop_ids, np.array(tokens, np.int32), prompt)


def masks_of(allowed: dict[int, Any], vocab: int) -> TokenMasks:
    """Row → ids of the tokens that it may yield."""
    flags = np.zeros((len(allowed), -(-vocab // 32) * 32), np.uint8)
    for flag, ids in zip(flags, allowed.values(), strict=True):
        flag[list(ids)] = 1
    bits = np.packbits(flags, axis=1, bitorder="little").view("<u4")
    return TokenMasks(np.array(list(allowed), np.int32), bits.astype(np.uint32))


def check_draw(
    token: int, logits: np.ndarray, state: SlotState, position: int, allowed: np.ndarray | None = None
) -> bool:
    """Whether the drawn token is the reference's; where u falls within SLACK of an edge, its neighbour will do."""
    params = state.sampling.params
    scores = adjust(logits, state, position, allowed)
    if params.greedy:
        assert scores[token] >= scores.max() - 1e-5
        return token == int(scores.argmax())
    sums = distribution(scores, params).cumsum()
    target = float(uniform(params.seed or 0, state.sampling.choice, position)) * sums[-1]
    before = sums[token - 1] if token else 0.0
    assert before - SLACK * sums[-1] <= target <= sums[token] + SLACK * sums[-1]
    return bool(before <= target < sums[token])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 1000},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.1, "temperature": 3.0},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 0.0},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": {3: 100.0, 5: -100.0}},
    {"logit_bias": {0: 8.0, 99: 9.0}, "top_p": 0.95, "frequency_penalty": 2.0, "min_tokens": 4},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_as_the_reference(isa: str, params: dict[str, Any]) -> None:
    vocab, same, count = 5003, 0, 0
    ours, reference = Native(1, vocab), ReferenceSampler(1, vocab)
    known = np.random.default_rng(5).integers(0, vocab, 60)
    sampling = slot(choice=2, tokens=known, prompt=40, stop_ids=(7, 11), **params)
    ours.admit(0, sampling)
    reference.admit(0, sampling)
    state = reference._states[0]
    assert state is not None
    for position in range(12):
        logits = row(position, vocab, 1.0 + position % 3)
        token = int(ours.sample(logits[None], [0], [position])[0][0])
        same += check_draw(token, logits, state, position)
        count += 1
        state.output_counts[token] += 1  # both go on with the same history
    assert same >= count - 1


@pytest.mark.parametrize("vocab", [31, 33, 320, 5003])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_masked_rows_draw_as_the_reference(isa: str, params: dict[str, Any], vocab: int) -> None:
    """Whole words of a mask allowed and forbidden, single tokens, words of both; rows without a mask beside them."""
    rng = np.random.default_rng(vocab)
    sets = [[vocab - 1], rng.choice(vocab, vocab // 7), range(vocab // 3), range(vocab), [7, 11], [3, 7, 11]]
    rows = [1, 2, 4, 5, 6, 7]
    allowed = dict(zip(rows, sets, strict=True))
    ours, reference = Native(8, vocab, 2), ReferenceSampler(8, vocab)
    params = {**params, "logit_bias": {k: v for k, v in params.get("logit_bias", {}).items() if k < vocab}}
    sampling = slot(tokens=rng.integers(0, vocab, 60), prompt=40, stop_ids=(7, 11, 7), logprobs=2, **params)
    for index in range(8):
        ours.admit(index, sampling)
        reference.admit(index, sampling)
    logits = np.stack([row(index, vocab) for index in range(8)])
    masks = masks_of(allowed, vocab)
    tokens, got = ours.sample(logits, range(8), range(8), masks)
    want = log_probs(logits, tokens, np.full(8, 2, np.int32))
    same = 0
    flags = allowed_tokens(masks, vocab)
    for index, token in enumerate(tokens.tolist()):
        state = reference._states[index]
        assert state is not None
        assert token in allowed.get(index, range(vocab))
        same += check_draw(token, logits[index], state, index, flags.get(index))
    assert same >= 7
    assert got is not None  # of what the model says, whatever is allowed
    assert np.allclose(got.chosen, want.chosen, rtol=0, atol=1e-5)
    assert np.array_equal(got.ranks, want.ranks)
    assert np.array_equal(got.top_ids, want.top_ids)


def test_end_tokens_come_before_min_tokens_where_a_mask_leaves_nothing_else(isa: str) -> None:
    logits = np.zeros((2, 40), np.float32)
    logits[:, 4] = 30
    for sampler in (Native(2, 40), ReferenceSampler(2, 40)):
        for index in range(2):
            sampler.admit(index, slot(min_tokens=5, stop_ids=(4, 39), temperature=0.0))
        masks = masks_of({0: [4, 39], 1: [4, 20]}, 40)
        tokens = sampler.sample(logits, np.arange(2, dtype=np.int32), np.zeros(2, np.int32), masks)[0]
        assert tokens.tolist() == [4, 20]


@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 256, 257, 49_152])
def test_any_vocabulary(isa: str, vocab: int) -> None:
    settings = [slot(**p) for p in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1})]
    ours, reference = Native(len(settings), vocab), ReferenceSampler(len(settings), vocab)
    for index, sampling in enumerate(settings):
        ours.admit(index, sampling)
        reference.admit(index, sampling)
    logits = np.stack([row(index, vocab) for index in range(len(settings))])
    tokens, none = ours.sample(logits, range(len(settings)), range(len(settings)))
    assert none is None
    for index, token in enumerate(tokens.tolist()):
        state = reference._states[index]
        assert state is not None
        check_draw(token, logits[index], state, index)


def test_random_numbers_are_philox(isa: str) -> None:
    """Flat logits: the token is floor(u * vocab). Random123 publishes the words for zeros."""
    vocab = 2**16
    ours = Native(2, vocab)
    ours.admit(0, slot(seed=0))
    assert ours.sample(np.zeros((1, vocab), np.float32), [0], [0])[0].tolist() == [0x6627E8D5 >> 16]
    ours.admit(1, slot(seed=2**64 - 1, choice=3))
    u = float(uniform(2**64 - 1, 3, 9))
    assert ours.sample(np.zeros((1, vocab), np.float32), [1], [9])[0].tolist() == [int(u * vocab)]


@pytest.mark.parametrize("top_p", [0.25, 0.2500001, 0.5, 0.75])
def test_ties_at_a_threshold_are_kept(isa: str, top_p: float) -> None:
    """Of eight equal tokens all stay, whatever the threshold; the draw is then uniform over them."""
    vocab = 1000
    logits = np.full((1, vocab), -50.0, np.float32)
    ids = np.arange(100, 900, 100)
    logits[0, ids] = 1.5
    ours = Native(2, vocab)
    ours.admit(0, slot(top_p=top_p))
    ours.admit(1, slot(top_k=2))
    for which in (0, 1):
        drawn = {int(ours.sample(logits, [which], [position])[0][0]) for position in range(200)}
        assert drawn == set(ids.tolist())


def test_frequencies_follow_the_distribution(isa: str) -> None:
    vocab, draws = 50, 4000
    logits = row(3, vocab, 1.0)
    ours = Native(1, vocab)
    ours.admit(0, slot(seed=99))
    tokens = ours.sample(np.tile(logits, (draws, 1)), [0] * draws, range(draws))[0]
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    counts = np.bincount(tokens, minlength=vocab)
    # Five standard deviations of a binomial count.
    assert (np.abs(counts - draws * probabilities) <= 5 * np.sqrt(draws * probabilities) + 1).all()


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_log_probabilities_match_the_reference(isa: str, k: int) -> None:
    vocab, rows = 3001, 6
    logits = np.stack([row(index, vocab) for index in range(rows)])
    logits[1, 100:200] = logits[1].max()  # ties: lowest ids first, one rank
    ours = Native(rows, vocab)
    for index in range(rows):
        # Raw log-probabilities: no parameter may show in them.
        ours.admit(
            index,
            slot(
                logprobs=k,
                temperature=0.5,
                top_k=3,
                repetition_penalty=2.0,
                logit_bias={4: 3.0},
                tokens=[8, 9],
                prompt=1,
            ),
        )
    tokens, got = ours.sample(logits, range(rows), range(rows))
    want = log_probs(logits, tokens, np.full(rows, k, np.int32))
    assert got is not None
    scored = TokenLogProbs(*ours.sampler.score(ours.pool, logits.copy(), tokens, k))
    for columns in (got, scored):
        assert np.array_equal(columns.ranks, want.ranks)
        assert np.array_equal(columns.top_ids, want.top_ids)
        assert np.abs(columns.chosen - want.chosen).max() <= 1e-5
        assert columns.top.shape == want.top.shape
        assert np.allclose(columns.top, want.top, rtol=0, atol=1e-5)


def test_rows_that_ask_differently(isa: str) -> None:
    vocab = 300
    logits = np.stack([row(index, vocab) for index in range(3)])
    ours = Native(3, vocab)
    for index, logprobs in enumerate((None, 2, 0)):
        ours.admit(index, slot(logprobs=logprobs))
    got = ours.sample(logits, range(3), range(3))[1]
    assert got is not None
    assert got.ranks[0] == 0
    assert got.chosen[0] == 0
    assert (got.top_ids[0] == -1).all()
    assert (got.top_ids[1] >= 0).all()
    assert (got.top_ids[2] == -1).all()
    assert got.ranks[2] > 0


def test_neighbours_and_threads_change_no_bit(isa: str) -> None:
    vocab = 4099
    rows = len(SETTINGS)
    logits = np.stack([row(index, vocab) for index in range(rows)])
    results = []
    for threads, order in ((1, range(rows)), (2, range(rows)), (5, range(rows - 1, -1, -1)), (1, None)):
        ours = Native(rows, vocab, threads)
        for index, params in enumerate(SETTINGS):
            ours.admit(index, slot(logprobs=3, tokens=range(50), prompt=30, stop_ids=(2,), **params))
        tokens, columns = np.empty(rows, np.int32), np.empty((rows, 4), np.float32)
        for part in [[i] for i in range(rows)] if order is None else [list(order)]:
            tokens[part], got = ours.sample(logits[part], part, part)
            assert got is not None
            columns[part, 0], columns[part, 1:] = got.chosen, got.top
        results.append((tokens, columns))
    for tokens, columns in results[1:]:
        assert np.array_equal(tokens, results[0][0])
        assert np.array_equal(columns, results[0][1])


def test_penalties_remember_what_was_drawn(isa: str) -> None:
    """Greedy with a large presence penalty walks down the ranking; so does a slot admitted with that history."""
    vocab = 40
    logits = np.linspace(1.0, 0.0, vocab, dtype=np.float32)[None]
    ours = Native(2, vocab)
    ours.admit(0, slot(temperature=0.0, presence_penalty=2.0, tokens=[0], prompt=1))
    drawn = [int(ours.sample(logits, [0], [position])[0][0]) for position in range(5)]
    assert drawn == [0, 1, 2, 3, 4]
    ours.admit(1, slot(temperature=0.0, presence_penalty=2.0, tokens=[0, *drawn], prompt=1))
    assert int(ours.sample(logits, [1], [5])[0][0]) == 5
    ours.admit(0, slot(temperature=0.0))
    assert int(ours.sample(logits, [0], [0])[0][0]) == 0


def test_end_tokens_wait_for_min_tokens(isa: str) -> None:
    logits = np.zeros((1, 10), np.float32)
    logits[0, 4] = 30
    ours = Native(1, 10)
    ours.admit(0, slot(min_tokens=2, stop_ids=(4,)))
    drawn = [int(ours.sample(logits, [0], [position])[0][0]) for position in range(4)]
    assert 4 not in drawn[:2]
    assert drawn[2:] == [4, 4]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_broken_logits_do_no_harm(isa: str, params: dict[str, Any]) -> None:
    vocab = 300
    ours = Native(1, vocab)
    ours.admit(0, slot(logprobs=2, **params))
    for fill in (np.nan, -np.inf):
        tokens, got = ours.sample(np.full((1, vocab), fill, np.float32), [0], [0])
        assert tokens.tolist() == [0]
        assert got is not None
    logits = np.full((1, vocab), np.nan, np.float32)
    logits[0, 77] = -3.0
    tokens, got = ours.sample(logits, [0], [0])
    assert tokens.tolist() == [77]
    assert got is not None
    assert got.chosen.tolist() == [0.0]
    assert got.top_ids[0, 0] == 77
    logits = row(0, vocab)[None]
    logits[0, 5], logits[0, 6] = np.nan, np.inf
    tokens, got = ours.sample(logits, [0], [0])
    assert tokens.tolist() == [6]
    assert got is not None
    assert got.ranks.tolist() == [1]


def test_bad_arguments_are_refused() -> None:
    ours = Native(2, 10)
    ours.admit(0, slot())
    with pytest.raises(ValueError, match="not admitted"):
        ours.sample(np.zeros((1, 10), np.float32), [1], [0])
    with pytest.raises(ValueError, match="outside the sampler"):
        ours.sample(np.zeros((1, 10), np.float32), [2], [0])
    with pytest.raises(ValueError, match="vocabulary"):
        ours.admit(0, slot(tokens=[10], prompt=1))
    with pytest.raises(ValueError, match="vocab"):
        ours.sample(np.zeros((1, 11), np.float32), [0], [0])
    for rows, words in (([0], 2), ([1], 1), ([-1], 1), ([0, 0], 1)):
        masks = TokenMasks(np.array(rows, np.int32), np.full((1, words), 7, np.uint32))
        with pytest.raises(ValueError, match="mask_"):
            ours.sample(np.zeros((1, 10), np.float32), [0], [0], masks)
    ours.sampler.release(0)
    with pytest.raises(ValueError, match="not admitted"):
        ours.sample(np.zeros((1, 10), np.float32), [0], [0])
