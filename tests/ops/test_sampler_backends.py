"""The native sampler against the reference, on every ISA level.

Tokens must be equal, except where the random number falls so close to a boundary of the running sum (1e-5 of the
total) that float32 arithmetic may decide either way. Log-probabilities within 1e-4.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noria.backends.base import Backend, Sampler, SlotSampling
from noria.backends.reference.philox import uniform
from noria.backends.reference.sampling import ReferenceSampler, adjust, distribution
from noria.params import SamplingParams

VOCABS = (17, 64, 1000, 4099)
bounded = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 50, 100000]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    min_tokens=st.sampled_from([0, 3]),
    max_tokens=st.just(100),
    logit_bias=st.dictionaries(st.integers(0, 16), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=4),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
)


def slot_sampling(made: SamplingParams, vocab: int, rng: np.random.Generator) -> SlotSampling:
    prompt, output = (rng.integers(0, vocab, size).astype(np.int32) for size in rng.integers(1, 40, 2))
    stop_ids = tuple(int(token) for token in rng.integers(0, vocab, 2))
    return SlotSampling(made, int(rng.integers(0, 4)), stop_ids, np.concatenate([prompt, output]), len(prompt))


def near_a_boundary(logits: np.ndarray, reference: ReferenceSampler, slot: int, position: int, token: int) -> bool:
    """Whether the random number lies within 1e-5 of an edge of the token's share, or the token of a threshold."""
    state = reference._state(slot)
    scores = adjust(logits, state, position)
    made = state.sampling.params
    if made.greedy:
        return bool(scores.max() - scores[token] < 1e-5)
    probabilities = distribution(scores, made)
    sums = probabilities.cumsum() / probabilities.sum()
    u = float(uniform(made.seed, state.sampling.choice, position))
    before = sums[token - 1] if token else 0.0
    return bool(before - 1e-5 <= u <= sums[token] + 1e-5)


@bounded
@given(made=st.lists(params, min_size=1, max_size=9), vocab=st.sampled_from(VOCABS), seed=st.integers(0, 1000))
def test_tokens_and_log_probs(cpu: Backend, made: list[SamplingParams], vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samplers: tuple[Sampler, ReferenceSampler] = (cpu.new_sampler(16, vocab), ReferenceSampler(16, vocab))
    slots = rng.permutation(16)[: len(made)].astype(np.int32)
    requests = [slot_sampling(p, vocab, rng) for p in made]
    for sampler in samplers:
        for slot, request in zip(slots.tolist(), requests, strict=True):
            sampler.admit(slot, request)
    logits = (rng.standard_normal((len(made), vocab)) * 3).astype(np.float32)
    positions = rng.integers(0, 6, len(made)).astype(np.int32)
    tokens, scored = samplers[0].sample(logits.copy(), slots, positions)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        assert near_a_boundary(logits[row], samplers[1], slot, position, int(tokens[row]))
    expected_tokens, expected = samplers[1].sample(logits, slots, positions)
    assert (scored is None) == (expected is None)
    if scored is None or expected is None or (tokens != expected_tokens).any():
        return
    asked = np.array([p.logprobs is not None for p in made])
    np.testing.assert_allclose(scored.chosen[asked], expected.chosen[asked], atol=1e-4)
    np.testing.assert_array_equal(scored.ranks[asked], expected.ranks[asked])
    np.testing.assert_array_equal(scored.top_ids, expected.top_ids)
    named = expected.top_ids >= 0
    np.testing.assert_allclose(scored.top[named], expected.top[named], atol=1e-4)


@bounded
@given(vocab=st.sampled_from(VOCABS), rows=st.integers(1, 12), k=st.integers(0, 20), seed=st.integers(0, 1000))
def test_score(cpu: Backend, reference: Backend, vocab: int, rows: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocab)) * 5).astype(np.float32)
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    got, expected = (b.new_sampler(1, vocab).score(logits.copy(), targets, k) for b in (cpu, reference))
    assert got.top_ids.shape == (rows, k)
    np.testing.assert_allclose(got.chosen, expected.chosen, atol=1e-4)
    np.testing.assert_array_equal(got.ranks, expected.ranks)
    named = expected.top_ids >= 0
    np.testing.assert_array_equal(got.top_ids, expected.top_ids)
    np.testing.assert_allclose(got.top[named], expected.top[named], atol=1e-4)


def test_drawn_tokens_count_as_seen(cpu: Backend) -> None:
    """Alternation under a frequency penalty, and the same after a resume that brings the tokens along."""
    logits = np.zeros((1, 40), np.float32)
    logits[0, [1, 2]] = [3.0, 2.5]
    made = SamplingParams(temperature=0, frequency_penalty=1.0, seed=1)
    sampler = cpu.new_sampler(2, 40)
    sampler.admit(1, SlotSampling(made, 0, (), np.array([0], np.int32), 1))
    slot = np.array([1], np.int32)
    drawn = [int(sampler.sample(logits.copy(), slot, np.array([p], np.int32))[0][0]) for p in range(4)]
    assert drawn == [1, 2, 1, 2]
    sampler.release(1)
    sampler.admit(1, SlotSampling(made, 0, (), np.array([0, 1, 2, 1, 2, 1], np.int32), 1))
    assert sampler.sample(logits.copy(), slot, np.array([5], np.int32))[0][0] == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_neighbours_and_threads_change_no_token(cpu: Backend, cpu_one_thread: Backend, temperature: float) -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((30, 1000)) * 2).astype(np.float32)
    slots, positions = np.arange(30, dtype=np.int32), rng.integers(0, 50, 30).astype(np.int32)
    made = SamplingParams(temperature=temperature, top_p=0.9, seed=11, logprobs=2)

    def run(backend: Backend, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        sampler = backend.new_sampler(30, 1000)
        for slot in range(30):
            sampler.admit(slot, SlotSampling(made, slot, (), np.array([1, 2], np.int32), 1))
        tokens, scored = sampler.sample(logits[rows].copy(), slots[rows], positions[rows])
        assert scored is not None
        return np.array(tokens), np.array(scored.chosen)

    together = run(cpu, slice(0, 30))
    for row in range(30):
        alone = run(cpu_one_thread, slice(row, row + 1))
        assert alone[0][0] == together[0][row]
        assert alone[1][0] == together[1][row]
