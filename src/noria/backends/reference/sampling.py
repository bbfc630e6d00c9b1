"""From logits to tokens: the reference sampler, one row at a time. The contract is `noria.backends.base.Sampler`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noria.backends.base import SlotSampling, TokenMasks
from noria.backends.reference.philox import uniform
from noria.errors import BackendError
from noria.params import SamplingParams
from noria.plan import Float32, Int32, TokenLogProbs

Float64 = NDArray[np.float64]
Allowed = NDArray[np.bool_]  # [vocab]


@dataclass(slots=True)
class SlotState:
    """What a slot remembers. `in_prompt`: bool [vocab]; `output_counts`: int32 [vocab], times in the output so far."""

    sampling: SlotSampling
    in_prompt: NDArray[np.bool_]
    output_counts: Int32


class ReferenceSampler:
    """`Sampler` in NumPy."""

    def __init__(self, slots: int, vocab: int) -> None:
        self.vocab = vocab
        self._states: list[SlotState | None] = [None] * slots

    def admit(self, slot: int, sampling: SlotSampling) -> None:
        """Sets the slot's parameters and rebuilds its penalty state from prompt and output so far."""
        if sampling.params.seed is None:
            raise BackendError("a request reached the sampler without a seed")
        prompt = sampling.token_ids[: sampling.prompt_length]
        output = sampling.token_ids[sampling.prompt_length :]
        in_prompt = np.zeros(self.vocab, np.bool_)
        in_prompt[prompt] = True
        self._states[slot] = SlotState(sampling, in_prompt, np.bincount(output, minlength=self.vocab).astype(np.int32))

    def release(self, slot: int) -> None:
        """Forgets the slot."""
        self._states[slot] = None

    def sample(
        self, logits: Float32, slots: Int32, output_positions: Int32, masks: TokenMasks | None = None
    ) -> tuple[Int32, TokenLogProbs | None]:
        """One token per row of logits [rows, vocab]. Log-probabilities, if any row asked: rows that did not ask hold
        rank 0 and log-probability 0."""
        allowed = allowed_tokens(masks, self.vocab)
        tokens = np.empty(len(slots), np.int32)
        wanted = np.full(len(slots), -1, np.int32)  # alternatives that each row asked for; -1: no log-probabilities
        for row, (slot, position) in enumerate(zip(slots.tolist(), output_positions.tolist(), strict=True)):
            state = self._state(slot)
            tokens[row] = draw(logits[row], state, position, allowed.get(row))
            state.output_counts[tokens[row]] += 1
            asked = state.sampling.params.logprobs
            wanted[row] = -1 if asked is None else asked
        if not len(wanted) or wanted.max() < 0:
            return tokens, None
        return tokens, log_probs(logits, tokens, wanted)

    def score(self, logits: Float32, targets: Int32, k: int) -> TokenLogProbs:
        """Log-probabilities of given targets [rows] and of the k most likely tokens."""
        return log_probs(logits, targets, np.full(len(targets), k, np.int32))

    def _state(self, slot: int) -> SlotState:
        state = self._states[slot]
        if state is None:
            raise BackendError(f"slot {slot} was not admitted to the sampler")
        return state


def allowed_tokens(masks: TokenMasks | None, vocab: int) -> dict[int, Allowed]:
    """Row → which tokens it may yield, of the rows that have a mask."""
    if masks is None:
        return {}
    bits = np.unpackbits(masks.bits.astype("<u4").view(np.uint8), axis=1, count=vocab, bitorder="little")
    return dict(zip(masks.rows.tolist(), bits.astype(np.bool_), strict=True))


def draw(logits: Float32, state: SlotState, output_position: int, allowed: Allowed | None = None) -> int:
    """The next token of one row [vocab] under the slot's parameters, among those allowed."""
    params = state.sampling.params
    scores = adjust(logits, state, output_position, allowed)
    if params.greedy:
        return int(scores.argmax())
    probabilities = distribution(scores, params)
    assert params.seed is not None
    u = float(uniform(params.seed, state.sampling.choice, output_position))
    sums = probabilities.cumsum()
    kept = np.flatnonzero(probabilities)
    # The first token, in ascending id, at which the running sum exceeds u * total.
    index = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return min(index, int(kept[-1]))


def adjust(logits: Float32, state: SlotState, output_position: int, allowed: Allowed | None = None) -> Float64:
    """Logits after mask, bias, penalties and the ban on end tokens; float64 [vocab]."""
    params = state.sampling.params
    scores = logits.astype(np.float64)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    seen = state.in_prompt | (state.output_counts > 0)
    if params.repetition_penalty != 1.0:
        penalised = np.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        scores = np.where(seen, penalised, scores)
    scores -= params.frequency_penalty * state.output_counts
    scores -= params.presence_penalty * (state.output_counts > 0)
    if output_position < params.min_tokens:
        ends = np.zeros(len(scores), np.bool_)
        ends[list(state.sampling.stop_ids)] = True
        if allowed is None or (allowed & ~ends).any():
            scores[ends] = -np.inf
    return scores


def distribution(scores: Float64, params: SamplingParams) -> Float64:
    """Probabilities [vocab] after temperature, top-k, top-p and min-p, in that order; what is dropped has 0.

    They are not normalised again after top-p and min-p: the draw does not need it. Ties at a threshold are kept.
    """
    scores = (scores - scores.max()) / params.temperature  # at most 0: no temperature can make it overflow
    if 0 < params.top_k < len(scores):
        scores = np.where(scores >= np.partition(scores, -params.top_k)[-params.top_k], scores, -np.inf)
    weights = np.exp(scores)
    probabilities = weights / weights.sum()
    keep = np.ones(len(probabilities), np.bool_)
    if params.top_p < 1.0:
        descending = np.sort(probabilities)[::-1]
        # The smallest set of most likely tokens whose mass reaches top_p.
        last = min(int(np.searchsorted(descending.cumsum(), params.top_p)), len(descending) - 1)
        keep &= probabilities >= descending[last]
    if params.min_p > 0.0:
        keep &= probabilities >= params.min_p * probabilities.max()
    return np.where(keep, probabilities, 0.0)


def log_probs(logits: Float32, chosen: Int32, wanted: Int32) -> TokenLogProbs:
    """Log-softmax of raw logits [rows, vocab] at the chosen tokens [rows] and the most likely ones.

    Args:
        wanted: [rows] how many alternatives; -1: not even the chosen one.

    Returns:
        `top` of width max(wanted), most likely first, equal ones by ascending id; ids -1 and log-probability 0 beyond
        what a row wants. A rank is one more than the number of tokens that are strictly more likely.
    """
    rows, k = len(chosen), max(int(wanted.max(initial=0)), 0)
    out = TokenLogProbs(
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.full((rows, k), -1, np.int32),
        np.zeros((rows, k), np.float32),
    )
    for row in np.flatnonzero(wanted >= 0):
        scores = logits[row].astype(np.float64)
        largest = scores.max()
        scores -= largest + np.log(np.exp(scores - largest).sum())
        out.chosen[row] = scores[chosen[row]]
        out.ranks[row] = 1 + np.count_nonzero(scores > scores[chosen[row]])
        top = most_likely(scores, int(wanted[row]))
        out.top_ids[row, : len(top)] = top
        out.top[row, : len(top)] = scores[top]
    return out


def most_likely(scores: Float64, k: int) -> NDArray[np.int64]:
    """Ids of the k largest scores [vocab], largest first, equal ones by ascending id."""
    k = min(k, len(scores))
    if k == 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(scores >= np.partition(scores, -k)[-k])  # more than k if some are equal
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k]
