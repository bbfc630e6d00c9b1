"""One request inside the engine, from its submission to its end.

Owns its tokens and the numbers that the scheduler's one rule needs. Decides nothing.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noria.cache.hashing import HashChain
from noria.cache.manager import BlockTable
from noria.messages import Submit
from noria.params import SamplingParams
from noria.plan import Int32, PromptLogProbs


class State(enum.IntEnum):
    """`waiting` also after preemption. A finished request has a reason and owns no blocks."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress.

    Attributes:
        stop_ids: tokens that end the output, all within the vocabulary.
        tokens: int32; prompt, then output so far (whose results have come back).
        limit: most tokens of prompt and output together.
        order: number of its submission to this engine.
        submitted: seconds on the engine's clock.
        tenant, share: whom it is for, and that one's share of the engine under the fair policy.
        confirmed: tokens whose keys and values are valid by the results that have come back.
        idle_from: after a preemption, the last step that may still yield a token for it.
        wants_prompt_logprobs: until they have been reported.
        grammar: what keeps its compiled grammar at hand.
        waited: seconds before it was submitted.
        sheddable: it may be refused, until it has run.
        expected: seconds to its first token, and for each further one, as was thought when it came; None: nothing was.
        first: when its whole prompt had been computed for the first time, if anybody wants to know.
        to_compute: tokens that it would have to compute before its first one, as was thought then.
    """

    id: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int
    group: int
    priority: int
    salt: str
    arrival: float
    tokens: array[int]
    prompt_length: int
    limit: int
    order: int
    submitted: float
    stops: frozenset[int]
    wants_prompt_logprobs: bool
    tenant: str = ""
    share: float = 1.0
    chain: HashChain | None = None
    state: State = State.WAITING
    slot: int = -1
    table: BlockTable | None = None
    confirmed: int = 0
    idle_from: int = -1
    preemptions: int = 0
    cached_tokens: int = 0
    admitted: float | None = None
    scores: list[PromptLogProbs] = field(default_factory=list)
    grammar: Any = None
    waited: float = 0.0
    sheddable: bool = False
    expected: tuple[float, float] | None = None
    first: float | None = None
    to_compute: float = 0.0

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def goal(self) -> int:
        """Most tokens that are ever computed: the last one sampled needs no keys and values."""
        return max(self.limit - 1, self.prompt_length)

    @property
    def samples(self) -> bool:
        """Whether any token is wanted at all: `max_tokens` 0 only scores the prompt."""
        return self.limit > self.prompt_length

    def token_ids(self) -> Int32:
        """A copy of all known tokens, int32 [known]."""
        return np.array(self.tokens, np.int32)

    def same_prompt(self, other: Request) -> bool:
        length = self.prompt_length
        return (
            length == other.prompt_length
            and self.salt == other.salt
            and memoryview(self.tokens)[:length] == memoryview(other.tokens)[:length]
        )


class RefusedRequest(Exception):
    """A request that cannot run here. `str` is for the user."""


def make_request(submit: Submit, order: int, now: float, vocab_size: int, max_model_len: int) -> Request:
    """Checks a submission against the model's limits and makes a request of it.

    Raises:
        RefusedRequest: the prompt is empty, has tokens outside the vocabulary, or leaves no room for a token.
    """
    prompt = np.frombuffer(submit.prompt_ids, "<i4")
    received = np.frombuffer(submit.received_ids, "<i4")
    if prompt.size == 0:
        raise RefusedRequest("the prompt is empty")
    for ids in (prompt, received):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise RefusedRequest(f"a token id is outside the vocabulary of {vocab_size}")
    params = submit.params
    wanted = max_model_len if params.max_tokens is None else params.max_tokens
    if prompt.size + min(wanted, 1) > max_model_len:
        raise RefusedRequest(
            f"the prompt has {prompt.size} tokens, which leaves no room in a context of {max_model_len} tokens"
        )
    if any(not 0 <= token < vocab_size for token in params.logit_bias):
        raise RefusedRequest(f"logit_bias: a token id is outside the vocabulary of {vocab_size}")
    if any(not 0 <= token < vocab_size for token in params.allowed_token_ids):
        raise RefusedRequest(f"allowed_token_ids: a token id is outside the vocabulary of {vocab_size}")
    # A stop id outside the vocabulary can never be sampled: dropping it changes nothing.
    stops = tuple(token for token in submit.stop_ids if 0 <= token < vocab_size)
    return Request(
        id=submit.request_id,
        params=params,
        stop_ids=stops,
        choice=submit.choice,
        group=submit.group,
        priority=submit.priority,
        salt=submit.salt,
        arrival=submit.arrival,
        tokens=array("i", prompt.astype(np.int32).tobytes() + received.astype(np.int32).tobytes()),
        prompt_length=int(prompt.size),
        limit=min(int(prompt.size) + wanted, max_model_len),
        order=order,
        submitted=now,
        stops=frozenset(stops),
        # They are reported together with the first token, so a resumed request has them already.
        wants_prompt_logprobs=params.prompt_logprobs is not None and received.size == 0,
        tenant=submit.tenant,
        share=submit.share,
        waited=submit.waited,
        sheddable=submit.sheddable and received.size == 0,
    )
