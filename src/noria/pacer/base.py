"""What the parts of the pacer say to each other: plain data, no clock, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(slots=True, frozen=True)
class StepShape:
    """What a step computes, as far as its duration depends on it.

    Attributes:
        decode_rows: rows of one token. decode_context: cache positions that they attend to, all together.
        prefill_rows: rows of several tokens. prefill_tokens: theirs, all together.
        prefill_context: cache positions that these tokens attend to, summed over tokens.
    """

    decode_rows: int = 0
    decode_context: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return self.decode_rows + self.prefill_tokens


@dataclass(slots=True, frozen=True)
class Sizes:
    """What the scheduler is bound by: most running requests, and most tokens of a step."""

    batch: int
    budget: int


@dataclass(slots=True, frozen=True)
class Load:
    """What is known of the load at one moment: the features of predictors. Times in seconds, shares from 0 to 1.

    Attributes:
        at: on the engine's clock. time_of_day: seconds since local midnight.
        running, waiting: requests. running_context: mean tokens of a running request so far.
        oldest_wait: of the request that has waited longest; 0 if none waits.
        waiting_prompt: mean tokens that a waiting request has yet to compute before its first token.
        mean_prompt, mean_output: tokens of requests, weighted to those of late (of output: of those that have ended,
            or a guess from those that run).
        arrival_rate: requests per second, weighted to those of late.
        device: achieved share of the device's measured limit; None: not known (yet).
        cpu: share of the processors that this process may use. memory: share of the memory that it may use.
        cache: share of the KV cache's blocks that requests hold.
        device_trend, memory_trend, waiting_trend, arrival_trend: change per second over a window, by least squares.
    """

    at: float = 0.0
    time_of_day: float = 0.0
    running: int = 0
    waiting: int = 0
    running_context: float = 0.0
    oldest_wait: float = 0.0
    waiting_prompt: float = 0.0
    mean_prompt: float = 0.0
    mean_output: float = 0.0
    arrival_rate: float = 0.0
    device: float | None = None
    cpu: float = 0.0
    memory: float = 0.0
    cache: float = 0.0
    device_trend: float = 0.0
    memory_trend: float = 0.0
    waiting_trend: float = 0.0
    arrival_trend: float = 0.0


@dataclass(slots=True, frozen=True)
class Objectives:
    """Seconds that `percentile` percent of the requests shall keep within; None: no objective."""

    ttft: float | None = None
    tpot: float | None = None
    percentile: float = 90.0


@dataclass(slots=True, frozen=True)
class Prediction:
    """The best sizes, by one predictor.

    Attributes:
        step_seconds: what a step of these sizes is expected to take; None: not known.
        reason: why these, in a few words for people.
    """

    sizes: Sizes
    reason: str
    step_seconds: float | None = None


class Predictor(Protocol):
    """Names the best sizes: a function of features, and of a model that it may have learned."""

    @property
    def trusted(self) -> bool:
        """Whether what it says can be relied on yet."""
        ...

    def predict(self, load: Load, now: Sizes, most: Sizes, least: int) -> Prediction:
        """The best sizes.

        Args:
            load: features. now: sizes in force.
            most: most of either that may be set. least: smallest batch that may be set.
        """
        ...


class Learner(Predictor, Protocol):
    """A predictor that learns from the steps that run."""

    @property
    def error(self) -> float | None:
        """Median of |predicted - measured| / measured over steps of late, before each was learned from; None: too few
        have run."""
        ...

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step has taken so long, from the turn's beginning until its results were there."""
        ...


Who = Literal["learned", "rules", "most"]
Threshold = Literal["device", "memory"]


@dataclass(slots=True, frozen=True)
class Decision:
    """What the pacer decided at one moment, and why. Plain data: msgspec encodes it as it is.

    Attributes:
        number: of the decision, since the engine's start. at: on the engine's clock. time: seconds, `time.time()`.
        load: features. predictor: whose word counted; most: the most that may be set, as nobody is trusted yet.
        prediction: its word. error: of the learned predictor (`Learner.error`). trusted: whether that one is.
        before, after: sizes in force until then, and from then on.
        reached: thresholds that the load is beyond, so that the batch does not grow.
        reason: why the sizes are what they are, in a few words for people.
    """

    number: int
    at: float
    time: float
    load: Load
    predictor: Who
    prediction: Prediction
    error: float | None
    trusted: bool
    before: Sizes
    after: Sizes
    reached: tuple[Threshold, ...]
    reason: str
