"""OpenAI's protocol as structs: what a body may hold. What replies are made of is in `replies`.

Decoding checks types. Ranges are checked by SamplingParams; what Noria cannot do is refused by name, and fields that
change nothing in an answer (`user`, `store`, …) are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from noria.errors import InvalidRequestError
from noria.params import SamplingParams
from noria.server.structured import ResponseFormat, StructuredOutputs

# Fields that would change the answer and are not there yet. Ignoring them would be a silent lie.
_NOT_YET = (
    "tools",
    "functions",
    "suffix",
    "audio",
    "prompt_embeds",
    "use_beam_search",
    "function_call",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
_NOT_YET_IN_CHAT = ("tool_choice", "modalities", "echo", "chat_template")
# Values of those that ask for what happens anyway.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),  # without functions, which are refused
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}


# Fields of OpenAI's that change nothing in an answer.
IGNORED = frozenset(
    (
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
        "guided_decoding_backend",  # vLLM's: there is one way
    )
)
MAX_SALT = 256  # characters of `cache_salt`


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.Raw(b"")  # vLLM's older names of the same
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None  # llama.cpp's names
    json_schema: msgspec.Raw = msgspec.Raw(b"")
    tools: Any = None
    functions: Any = None
    suffix: Any = None
    audio: Any = None
    prompt_embeds: Any = None
    use_beam_search: Any = None
    function_call: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    prompt_logprobs: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream says what was used so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Refuses what is not there yet and what contradicts itself."""
        self.refuse(_NOT_YET)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", "stream_options")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequestError("priority must fit in 32 bits", "priority")
        longest = self.truncate_prompt_tokens
        if longest is not None and longest != -1 and longest < 1:
            message = f"truncate_prompt_tokens must be at least 1, or -1 for what the context holds, got {longest}"
            raise InvalidRequestError(message, "truncate_prompt_tokens")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT:
            raise InvalidRequestError(f"cache_salt must have 1 to {MAX_SALT} characters", "cache_salt")

    def refuse(self, names: Sequence[str]) -> None:
        """Refuses these fields unless they ask for nothing, or for what happens anyway."""
        for name in names:
            value = getattr(self, name)
            nothing = value is None or value is False or value in ("", [], {})
            if not nothing and value not in _HARMLESS.get(name, ()):
                raise InvalidRequestError(f"{name}: not supported yet by this server; leave it out", name)


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation. `content` is text, or parts of which text is the only kind that is served."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None  # true unless the last message goes on
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Any = None
    continue_final_message: bool | None = None
    modalities: Any = None
    echo: Any = None
    chat_template: Any = None

    def check(self) -> None:
        """The same for chat."""
        super().check()
        self.refuse(_NOT_YET_IN_CHAT)
        if self.continue_final_message and self.add_generation_prompt is True:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt: false: either it goes on, or another begins",
                "continue_final_message",
            )
        if self.continue_final_message and (not self.messages or self.messages[-1].role != "assistant"):
            raise InvalidRequestError(
                "continue_final_message: the last message must be the assistant's", "continue_final_message"
            )


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


# ---------------------------------------------------------------------------------------------------- parameters


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of a model: used where a request says nothing. None: the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_params(
    request: GenerationRequest,
    defaults: Defaults,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The validated form of a request's parameters. Raises InvalidRequestError that names the field."""
    values: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        asked = getattr(request, name)
        values[name] = getattr(defaults, name) if asked is None else asked
    for name in (
        "seed",
        "n",
        "min_tokens",
        "ignore_eos",
        "frequency_penalty",
        "presence_penalty",
        "skip_special_tokens",
        "include_stop_str_in_output",
    ):
        values[name] = getattr(request, name)
    if values["seed"] is not None and -(2**63) <= values["seed"] < 0:
        values["seed"] %= 2**64  # the API's seeds are signed 64-bit numbers
    values["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    values["logit_bias"] = _bias(request.logit_bias or {})
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _bias(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise InvalidRequestError(f"logit_bias: keys are token ids, got {token[:20]!r}", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a completion: one text, one list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt: an empty list; give text or token ids", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    mixed = [item for item in prompt if not isinstance(item, int)]
    if len(mixed) != len(prompt) or len({type(item) for item in mixed}) > 1:
        raise InvalidRequestError("prompt: one list must not mix text, token ids and lists of them", "prompt")
    return list(mixed)


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: parts joined to text, absent fields left out."""
    if not messages:
        raise InvalidRequestError("messages: at least one is needed", "messages")
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.role not in ("system", "developer", "user", "assistant", "tool"):
            where = f"messages[{index}].role"
            raise InvalidRequestError(
                f"{where}: must be system, developer, user, assistant or tool, got {message.role!r}", where
            )
        entry: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text(message.content, f"messages[{index}].content", message.tool_calls is not None),
        }
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                entry[name] = value
        plain.append(entry)
    return plain


def _text(content: str | list[dict[str, Any]] | None, where: str, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if may_lack:
            return ""
        raise InvalidRequestError(f"{where} is required", where)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind not in ("text", "input_text", "refusal"):
            raise InvalidRequestError(f"{where}[{index}]: this model reads text only, not {kind!r}", where)
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{index}].text: expected a string", where)
        texts.append(text)
    return "\n".join(texts)
