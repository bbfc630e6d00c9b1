"""How one request is sampled: the frozen, validated form behind every API.

Owns the limits of each parameter. Knows nothing of HTTP, tokenisers or kernels.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.inspect import FloatType, IntType, NoneType, StructType, UnionType, type_info

from noria.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED = 1024  # token ids
MAX_N = 128
MAX_SEED = 2**64 - 1
MAX_GRAMMAR = 512 * 1024  # characters
MIN_REPETITION_PENALTY = 0.001  # kernels divide by it in float32, where smaller doubles can be 0

# Numbers with their ranges: the API's structs, its errors and its documents use the same ones.
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Repetition = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
Length = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. Construction validates; an instance is always valid.

    Attributes:
        temperature: 0 is greedy; in [0, 100].
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens below this share of the most likely one's probability, in [0, 1].
        seed: 0 … 2**64 - 1; None lets the server draw one.
        n: number of choices. Fanned out before the engine, where n is always 1.
        max_tokens: most tokens to generate; None: whatever the context leaves. 0 only with `prompt_logprobs`.
        min_tokens: end tokens and stop strings are impossible before that many tokens.
        stop: strings that end the output and are cut from it; one string may be given as it is.
        stop_token_ids: tokens that end the output, beside the model's own end tokens.
        ignore_eos: the model's end tokens do not end the output.
        repetition_penalty: in [0.001, 100]; divides positive and multiplies negative logits of tokens seen in prompt or
            output.
        frequency_penalty, presence_penalty: in [-2, 2]; over output tokens.
        logit_bias: token id → addend in [-100, 100].
        allowed_token_ids: if any, no other token is possible, not even an end token. Not beside a grammar.
        logprobs: None, or how many of the most likely alternatives to report beside the chosen token (0 … 20).
        prompt_logprobs: the same for each prompt token.
        skip_special_tokens: leave control tokens out of the text.
        include_stop_str_in_output: the stop string that ended the output stays in it.
        grammar: what the output must match, in llguidance's serialised form (`frontend.grammar` makes and checks it).
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: int | None = None
    n: Choices = 1
    max_tokens: Length | None = None
    min_tokens: Length = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: Repetition = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[int, Bias] = {}
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    grammar: str | None = None

    def __post_init__(self) -> None:
        # The one place that may write to it: one string, or a list, is taken for what it means.
        given: Any = self.stop
        msgspec.structs.force_setattr(self, "stop", (given,) if isinstance(given, str) else tuple(given))
        for name in ("stop_token_ids", "allowed_token_ids"):
            msgspec.structs.force_setattr(self, name, tuple(getattr(self, name)))
        for one in _ranges():
            one.check(getattr(self, one.name))
        if self.seed is not None and (isinstance(self.seed, bool) or not 0 <= self.seed <= MAX_SEED):
            raise InvalidRequestError(f"seed must be an integer in [0, {MAX_SEED}], got {self.seed!r}", "seed")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError("max_tokens must be at least 1 (0 needs echo and logprobs)", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.grammar is not None and not 0 < len(self.grammar) <= MAX_GRAMMAR:
            message = f"the grammar has {len(self.grammar)} characters; 1 to {MAX_GRAMMAR} are possible"
            raise InvalidRequestError(message, "grammar")
        self._check_stop()
        self._check_bias()
        self._check_allowed()

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", "stop")
        kinds: set[type] = set(map(type, self.stop))
        if kinds - {str}:
            raise InvalidRequestError("stop: must be a string or a list of strings", "stop")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop: an empty string would stop everything; leave it out", "stop")
        if any(len(text) > MAX_STOP_LENGTH for text in self.stop):
            raise InvalidRequestError(f"stop: a string is longer than {MAX_STOP_LENGTH} characters", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"logit_bias: at most {MAX_LOGIT_BIAS} entries", "logit_bias")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(f"logit_bias: {bias} for token {token} is outside -100…100", "logit_bias")

    def _check_allowed(self) -> None:
        if len(self.allowed_token_ids) > MAX_ALLOWED:
            raise InvalidRequestError(f"allowed_token_ids: at most {MAX_ALLOWED} ids", "allowed_token_ids")
        if self.allowed_token_ids and self.grammar is not None:
            raise InvalidRequestError(
                "allowed_token_ids: not beside something that the answer must look like", "allowed_token_ids"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


class _Range(NamedTuple):
    """Of a number in SamplingParams; `above`: `low` itself is outside."""

    name: str
    integer: bool
    optional: bool
    low: float
    high: float
    above: bool

    def check(self, value: Any) -> None:
        """Raises InvalidRequestError for what is not such a number."""
        if value is None and self.optional:
            return
        kinds = int if self.integer else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high
        if not good or (self.above and value == self.low):
            low, high = (int(self.low), int(self.high)) if self.integer else (f"{self.low:g}", f"{self.high:g}")
            kind, opening = "an integer" if self.integer else "a number", "(" if self.above else "["
            shown = "one far outside" if isinstance(value, int) and abs(value) >= 2**128 else f"{value!r}"[:40]
            raise InvalidRequestError(f"{self.name} must be {kind} in {opening}{low}, {high}], got {shown}", self.name)


@functools.cache
def _ranges() -> tuple[_Range, ...]:
    """The ranges that the types of SamplingParams' fields state."""
    info = type_info(SamplingParams)
    assert isinstance(info, StructType)
    found = []
    for field in info.fields:
        members = field.type.types if isinstance(field.type, UnionType) else (field.type,)
        optional = any(isinstance(member, NoneType) for member in members)
        for kind in members:
            low = kind.ge if isinstance(kind, (IntType, FloatType)) and kind.gt is None else getattr(kind, "gt", None)
            if isinstance(kind, (IntType, FloatType)) and low is not None and kind.le is not None:
                integer = isinstance(kind, IntType)
                found.append(_Range(field.name, integer, optional, low, kind.le, kind.gt is not None))
    return tuple(found)
