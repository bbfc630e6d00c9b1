"""What the API process and the engine process say to each other.

msgspec structs, encoded as msgpack arrays, never pickled. Columns are little-endian bytes (`int32`, `int64`, `float32`)
so that one message per step is a few buffers whatever the number of requests. Knows nothing of sockets or engines.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from noria.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Shed = Literal["door", "queue"]


@cache
def build_id() -> str:
    """Version, and a digest of the modules that define what is said: equal in processes that understand each other."""
    import noria
    from noria import config, params

    digest = hashlib.sha256()
    for path in (__file__, params.__file__, config.__file__):
        digest.update(Path(path).read_bytes())
    return f"{noria.__version__}+{digest.hexdigest()[:12]}"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a client. Both sides refuse a `build_id` that is not their own."""

    build_id: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit", kw_only=True):
    """One prompt to be continued once.

    Attributes:
        request_id: unique within the client's life.
        prompt_ids: int32 column.
        received_ids: int32 column; output tokens of an earlier life of this request. They are already valid output:
            penalties, lengths and random positions go on from them, and they are not reported again.
        params: `n` is 1 and `seed` and `max_tokens` are set (the API process drew or resolved them).
        stop_ids: tokens that end the output: the model's end tokens unless `ignore_eos`, and `stop_token_ids`.
        choice: index among the n choices of the user's request; part of the random key.
        group: equal for the choices of one user request, 0 for none; they share prompt blocks, the last one by copy.
        priority: smaller runs first under the priority policy.
        salt: prefix blocks are shared only between requests of one salt.
        arrival: seconds, `time.time()`.
        tenant: whom it is for: the name of an API key, or "". Those of one tenant share what the fair policy gives it.
        share: the tenant's weight under the fair policy, above 0.
        waited: seconds since the user's request came in, when this was sent.
        sheddable: it may be refused for an objective that it cannot meet, until it begins to run (`--admission slo`).
    """

    request_id: int
    prompt_ids: bytes
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    received_ids: bytes = b""
    choice: int = 0
    group: int = 0
    priority: int = 0
    salt: str = ""
    arrival: float = 0.0
    tenant: str = ""
    share: float = 1.0
    waited: float = 0.0
    sheddable: bool = False


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Forget these requests and free their blocks. Unknown ids are ignored; no output follows for them."""

    request_ids: tuple[int, ...]


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """`shutdown`: exit now. `reset_prefix_cache`: forget cached blocks. `stats`: answer with an empty StepOutputs that
    carries fresh statistics."""

    action: Literal["shutdown", "reset_prefix_cache", "stats"]


class Vocabulary(msgspec.Struct, frozen=True, array_like=True, tag="vocabulary", kw_only=True):
    """What the model's tokens stand for. An engine needs it for grammars, and is told once, when the first request with
    one comes; such requests wait for it.

    Attributes:
        tokens: the bytes of all tokens, one after the other.
        lengths: int32 column [tokens], bytes of each; 0 for ids that stand for nothing.
        end_ids: the model's end tokens: what may follow when a grammar is complete.
        special_ids: control tokens. No text of a grammar is ever matched by one.
    """

    tokens: bytes
    lengths: bytes
    end_ids: tuple[int, ...]
    special_ids: tuple[int, ...]


class Explain(msgspec.Struct, frozen=True, array_like=True, tag="explain"):
    """What became of a request? It is answered in a StepOutputs, by `Explained` with the same `ask`."""

    ask: int
    request_id: int


class AskPacer(msgspec.Struct, frozen=True, array_like=True, tag="pacer"):
    """What has the pacer decided? It is answered in a StepOutputs, by `PacerLog` with the same `ask`."""

    ask: int


ToEngine = Hello | Submit | Abort | Control | Vocabulary | Explain | AskPacer


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, tag="ready", kw_only=True):
    """First message of an engine: what it resolved for this machine and model."""

    build_id: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    backend: str
    isa: str
    threads: int
    weights: str  # schemes in use, for people: "int4 + bf16"
    cache_dtype: str
    weight_bytes: int
    cache_bytes: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """First and last message of an engine that cannot start. `field` as in ConfigError."""

    message: str
    field: str | None = None


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request was admitted for the first time. Reported once, no later than its first token."""

    request_id: int
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queued_seconds: float = 0.0  # since its arrival at the engine


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The one end of a request. `error`: it asks for what the engine cannot do, such as to follow its grammar any
    further; faults of its own end the engine. `stop_id`: the token that ended it (the last one in `tokens`).
    Times are seconds since arrival at the engine; `cached_tokens`: prompt tokens taken from the prefix cache.
    `shed`: it was refused, as it came or while it waited, because it would miss an objective; `message` says which,
    `retry_after` when to come again."""

    request_id: int
    reason: FinishReason
    stop_id: int | None = None
    message: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    queued_seconds: float = 0.0
    shed: Shed | None = None
    retry_after: float = 0.0


class Outlook(msgspec.Struct, frozen=True, array_like=True):
    """What a request would find that comes now. Seconds; 0: unknown, no objective, or not the same for all.

    Attributes:
        first_token: until that of the shortest prompt, at the percentile.
        objective: what that shall be at most. limit: beyond which nobody is taken now, which may be less.
    """

    first_token: float = 0.0
    objective: float = 0.0
    limit: float = 0.0


ARRIVALS_MEMORY = 3.0  # seconds after which an arrival weighs 1/e in a rate


class PacerStats(msgspec.Struct, frozen=True, array_like=True):
    """The pacer's last decision. Shares from 0 to 1; None: not known (yet).

    Attributes:
        batch, budget: sizes in force.
        device: achieved share of the device's measured limit. cpu, memory: of what the engine may use.
        arrival_rate: requests per second.
        step_seconds: predicted, of a step of these sizes. model_error: median relative error of such predictions.
        trusted: whether the learned predictor is. predictor: whose word counted (`most`: nobody's yet; `off`: there is
            no pacer).
        device_reached, memory_reached: whether the load is beyond that threshold.
        decisions: made so far.
    """

    batch: int = 0
    budget: int = 0
    device: float | None = None
    cpu: float = 0.0
    memory: float = 0.0
    arrival_rate: float = 0.0
    step_seconds: float | None = None
    model_error: float | None = None
    trusted: bool = False
    predictor: Literal["learned", "rules", "most", "off"] = "off"
    device_reached: bool = False
    memory_reached: bool = False
    decisions: int = 0


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """State after a step. Counters (`*_total`) only grow."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    held_blocks: int = 0
    total_blocks: int = 0
    steps_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits_total: int = 0  # of those, found
    step_seconds_total: float = 0.0
    plan_seconds_total: float = 0.0
    outlook: Outlook = Outlook()
    pacer: PacerStats = PacerStats()
    pacer_decisions_total: int = 0


class LogProbs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive tokens of one request, in the order of its tokens.

    Attributes:
        tokens: int32 column [t]. chosen: float32 column [t]. ranks: int32 column [t], 1 is the most likely.
        top_ids: int32 column [t, k], top: float32 column [t, k], both most likely first.
    """

    k: int
    tokens: bytes
    chosen: bytes
    ranks: bytes
    top_ids: bytes
    top: bytes


class Phase(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a request's time in an engine, seconds on the engine's clock.

    Attributes:
        cause: "running", or what it waited for (`engine.history.Cause`, in lower case).
        steps: that ran it; of a wait, how often a step was planned without it. first_step: number of the first.
        tokens: that it computed.
        batch, budget: sizes in force at its end; running, waiting: requests, then.
    """

    start: float
    end: float
    cause: str
    steps: int = 0
    first_step: int = 0
    tokens: int = 0
    batch: int = 0
    budget: int = 0
    running: int = 0
    waiting: int = 0


class Explained(msgspec.Struct, frozen=True, array_like=True, tag="explained", kw_only=True):
    """What became of a request in this engine. Seconds are on the engine's clock.

    Attributes:
        ask: as in `Explain`. now: when this was said. known: False: this engine knows nothing of it.
        received: output tokens that it had from another engine. ahead: requests that waited when it came.
        phases: one after the other, without a gap, from `submitted` to `ended`, or to now.
        numbers: int64 column [steps]; starts, ends: float64 columns [steps]; own, rows, tokens: int32 columns [steps],
            tokens that the request computed in each step, and rows and tokens of the step. inf: not known yet.
        left_out: earlier steps that ran it.
        own_seconds: of the seconds of all its steps, its share by tokens.
        seconds: that this answer took.
    """

    ask: int
    now: float
    known: bool = True
    submitted: float = 0.0
    ended: float | None = None
    reason: FinishReason | None = None
    prompt_tokens: int = 0
    received: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    ahead: int = 0
    phases: tuple[Phase, ...] = ()
    numbers: bytes = b""
    starts: bytes = b""
    ends: bytes = b""
    own: bytes = b""
    rows: bytes = b""
    tokens: bytes = b""
    left_out: int = 0
    own_seconds: float = 0.0
    seconds: float = 0.0


class PacerLog(msgspec.Struct, frozen=True, array_like=True, tag="pacer_log"):
    """What the pacer decided, its last decisions first to last.

    Attributes:
        now: on the engine's clock.
        decisions: `pacer.base.Decision`s as msgpack; None: there is no pacer.
        seconds: that this answer took.
    """

    ask: int
    now: float
    decisions: bytes | None
    seconds: float = 0.0


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs", kw_only=True):
    """All that one step has for one client.

    Attributes:
        request_ids: int64 column [r]; counts: int32 column [r], tokens of each; tokens: int32 column [sum of counts].
        logprobs: request id → log-probabilities of its tokens in this message, for those who asked.
        prompt_logprobs: request id → log-probabilities of prompt tokens 1 … computed in this step.
        started: requests whose first admission this is (one that a stop string ends has no `Finished`).
        answers: to questions.
    """

    step: int
    request_ids: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    finished: tuple[Finished, ...] = ()
    logprobs: dict[int, LogProbs] = {}
    prompt_logprobs: dict[int, LogProbs] = {}
    stats: EngineStats = EngineStats()
    started: tuple[Started, ...] = ()
    answers: tuple[Explained | PacerLog, ...] = ()


FromEngine = EngineInfo | Refused | StepOutputs
