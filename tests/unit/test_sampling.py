"""The reference sampler and its random numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.backends.base import SlotSampling
from noria.backends.reference.sampling import ReferenceSampler
from noria.errors import BackendError
from noria.params import SamplingParams
from noria.sampling import distribution, most_likely, philox4x32, uniform

VOCAB = 50


def sampling(prompt=(1, 2), output=(), choice=0, stop_ids=(), **params) -> SlotSampling:
    params.setdefault("seed", 7)
    ids = np.array([*prompt, *output], np.int32)
    return SlotSampling(SamplingParams(**params), choice, tuple(stop_ids), ids, len(prompt))


def sampler(*requests: SlotSampling) -> ReferenceSampler:
    made = ReferenceSampler(8, VOCAB)
    for slot, request in enumerate(requests):
        made.admit(slot, request)
    return made


def one(request: SlotSampling, logits: np.ndarray, position: int = 0) -> int:
    tokens, _ = sampler(request).sample(logits[None].astype(np.float32), np.array([0]), np.array([position]))
    return int(tokens[0])


def spread(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers published with the generator (Random123, kat_vectors)
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words) -> None:
    assert tuple(philox4x32(counter, key).tolist()) == words


def test_uniform_depends_on_every_part_of_its_key() -> None:
    numbers = [float(uniform(*key)) for key in ((1, 0, 0), (2, 0, 0), (1 + 2**32, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert len(set(numbers)) == 5
    assert uniform(2**64 - 1, 3, np.arange(1000)).shape == (1000,)
    many = uniform(5, 0, np.arange(20000))
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01


def test_greedy_takes_the_lowest_of_equal_largest() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[9, 4]] = 2
    assert one(sampling(temperature=0), logits) == 4


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125] + [1e-9] * (VOCAB - 4))).astype(np.float32)
    made = sampler(sampling())
    tokens = [int(made.sample(logits[None].copy(), np.array([0]), np.array([p]))[0][0]) for p in range(4000)]
    shares = np.bincount(tokens, minlength=VOCAB)[:4] / 4000
    assert np.abs(shares - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


def test_a_draw_is_the_first_token_whose_running_sum_exceeds_u() -> None:
    logits = spread()
    p = np.exp(logits.astype(np.float64) - logits.max())
    for position in range(50):
        u = float(uniform(7, 2, position))
        expected = int(np.flatnonzero(p.cumsum() > u * p.sum())[0])
        assert one(sampling(choice=2), logits, position) == expected


def test_neighbours_do_not_change_a_draw() -> None:
    requests = [sampling(seed=s, temperature=0.5 + s / 4) for s in range(4)]
    logits = np.stack([spread(s) for s in range(4)])
    together, _ = sampler(*requests).sample(logits.copy(), np.arange(4), np.array([3, 5, 7, 9]))
    for slot in range(4):
        assert one(requests[slot], logits[slot], (3, 5, 7, 9)[slot]) == together[slot]


def test_filters_keep_ties_at_their_threshold() -> None:
    scores = np.array([3.0, 2.0, 2.0, 1.0, 0.0])
    assert (distribution(scores, SamplingParams(top_k=2)) > 0).tolist() == [True, True, True, False, False]
    p = np.exp(scores) / np.exp(scores).sum()
    top_p = float(p[0] + p[1] / 2)
    assert (distribution(scores, SamplingParams(top_p=top_p)) > 0).tolist() == [True, True, True, False, False]
    assert (distribution(scores, SamplingParams(top_p=float(p[0]) * 0.9)) > 0).tolist() == [True] + [False] * 4
    min_p = float(p[1] / p[0])
    kept = distribution(scores, SamplingParams(min_p=min_p * 0.999999)) > 0
    assert kept.tolist() == [True, True, True, False, False]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([1e-300, 0.1, 1.0, 5.0, 100.0]),
    top_k=st.integers(-1, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_any_filters_leave_the_most_likely_token(seed, temperature, top_k, top_p, min_p) -> None:
    scores = spread(seed).astype(np.float64)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = distribution(scores, params)
    assert np.isfinite(kept).all()
    assert kept[scores.argmax()] == kept.max() > 0
    if top_k > 0:
        assert np.count_nonzero(kept) <= top_k
    assert kept[scores < scores[kept > 0].min()].sum() == 0
    assert kept[scores.argmax()] > 0


def test_penalties_count_prompt_and_output() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[1, 2, 3]] = [3.0, 2.9, 2.0]
    assert one(sampling(prompt=[1], temperature=0), logits) == 1
    assert one(sampling(prompt=[1], temperature=0, repetition_penalty=1.2), logits) == 2
    assert one(sampling(prompt=[1], temperature=0, presence_penalty=2.0), logits) == 1  # output only
    assert one(sampling(prompt=[0], output=[1], temperature=0, presence_penalty=0.5), logits) == 2
    assert one(sampling(prompt=[0], output=[1, 1, 2], temperature=0, frequency_penalty=0.6), logits) == 2
    negative = -logits - 1
    assert one(sampling(prompt=[0], temperature=0, repetition_penalty=2.0), negative) == 4  # 0 fell from -1 to -2


def test_drawn_tokens_join_the_penalty_state() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[1, 2]] = [3.0, 2.5]
    made = sampler(sampling(prompt=[0], temperature=0, frequency_penalty=1.0))
    drawn = [int(made.sample(logits[None].copy(), np.array([0]), np.array([p]))[0][0]) for p in range(4)]
    assert drawn == [1, 2, 1, 2]
    made.admit(0, sampling(prompt=[0], output=drawn, temperature=0, frequency_penalty=1.0))  # resumed
    assert made.sample(logits[None].copy(), np.array([0]), np.array([4]))[0][0] == 1


def test_bias_and_min_tokens() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[5] = 4
    assert one(sampling(temperature=0, logit_bias={9: 5.0}), logits) == 9
    request = sampling(temperature=0, stop_ids=[5], min_tokens=2)
    assert [one(request, logits, position) for position in range(4)] == [0, 0, 5, 5]


def test_log_probs_are_of_the_raw_distribution() -> None:
    logits = np.stack([spread(1), spread(2)])
    made = sampler(sampling(temperature=0, logprobs=3, logit_bias={4: 100.0}), sampling(temperature=0))
    tokens, values = made.sample(logits.copy(), np.arange(2), np.zeros(2, np.int32))
    assert values is not None
    expected = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert tokens[0] == 4
    assert values.chosen[0] == pytest.approx(expected[4], abs=1e-6)
    assert values.ranks[0] == 1 + (logits[0] > logits[0, 4]).sum()
    assert values.top_ids[0].tolist() == np.argsort(-logits[0])[:3].tolist()
    assert values.top[0] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-6)
    assert values.top_ids[1].tolist() == [-1, -1, -1]
    assert sampler(sampling(temperature=0)).sample(logits[:1].copy(), np.array([0]), np.array([0]))[1] is None


def test_score_agrees_with_sample() -> None:
    logits = np.stack([spread(s) for s in range(5)])
    scored = ReferenceSampler(1, VOCAB).score(logits, np.arange(5, dtype=np.int32), 2)
    assert scored.top_ids.shape == (5, 2)
    assert (scored.top[:, 0] >= scored.chosen).all()
    assert np.exp(scored.chosen).max() < 1


def test_slots_are_checked() -> None:
    made = ReferenceSampler(1, VOCAB)
    with pytest.raises(BackendError, match="not admitted"):
        made.sample(np.zeros((1, VOCAB), np.float32), np.array([0]), np.array([0]))
    with pytest.raises(BackendError, match="seed"):
        made.admit(0, SlotSampling(SamplingParams(), 0, (), np.array([1], np.int32), 1))
    made.admit(0, sampling())
    made.release(0)
    with pytest.raises(BackendError, match="not admitted"):
        made.sample(np.zeros((1, VOCAB), np.float32), np.array([0]), np.array([0]))


def test_most_likely_puts_equal_ones_in_order_of_id() -> None:
    scores = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0])
    assert [most_likely(scores, k).tolist() for k in (0, 1, 3, 9)] == [[], [1], [1, 3, 2], [1, 3, 2, 4, 5, 0]]
