"""OpenAI's protocol as structs: what a body may hold. What replies are made of is in `replies`.

Decoding checks types and ranges; both, and what is said of a field, stand at the field (`fields.about`). What Noria
ignores or refuses by name is in `others`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, field

from noria.errors import InvalidRequestError
from noria.frontend.inputs import MAX_OWN_TEMPLATE
from noria.params import (
    MAX_ALLOWED,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Alternatives,
    Bias,
    Choices,
    Length,
    MinP,
    Penalty,
    Repetition,
    Temperature,
    TopK,
    TopP,
)
from noria.server.fields import about
from noria.server.structured import MAX_BAD_WORD, MAX_BAD_WORDS, ResponseFormat, StructuredOutputs
from noria.server.tools.request import MAX_TOOL_BYTES, MAX_TOOLS, Tool

MAX_SALT = 256  # characters of `cache_salt`
_KEEP = "keeps the last so many tokens of the prompt; −1: what the context holds beside `max_tokens` (16 if not given)"
_BIAS = "token id (as a string) → addend to its logit"

Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Kept = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_SEEDS = "an integer in [−2⁶³, 2⁶⁴ − 1]"
_MODELS = "the model's"
_A_SCHEMA = "a JSON schema, or its text"


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: Annotated[bool | None, about("a chunk with the usage, before the end", default="false")] = None
    continuous_usage_stats: Annotated[bool | None, about("the usage so far, in every chunk", default="false")] = None
    include_obfuscation: Annotated[bool | None, about("ignored: nothing is added to chunks")] = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: Annotated[str | None, about("another name is a 404", default="the served one")] = None
    temperature: Annotated[Temperature | None, about("0 is greedy", default=f"{_MODELS}, else 1")] = None
    top_p: Annotated[TopP | None, about("nucleus", default=f"{_MODELS}, else 1")] = None
    top_k: Annotated[TopK | None, about("0 and −1 keep all", default=f"{_MODELS}, else all")] = None
    min_p: Annotated[MinP | None, about("share of the best token's probability", default=f"{_MODELS}, else 0")] = None
    seed: Annotated[
        int | None,
        about(
            "the same seed gives the same answer, whoever else is served",
            range=_SEEDS,
            default="drawn",
        ),
    ] = None
    n: Annotated[Choices | None, about("choices of each prompt; they share its blocks", default="1")] = None
    stop: Annotated[
        Stop | None,
        about(
            "cut from the answer; found across tokens, too",
            range=f"a string, or up to {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH:,} characters",
            default="none",
        ),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None,
        about("end the answer, beside the model's own end tokens", default="none"),
    ] = None
    max_tokens: Annotated[
        Length | None,
        about(
            "length of the answer at most; with the prompt, no more than the context. 0 needs log-probabilities of"
            " the prompt",
            default="16; on chat the rest of the context",
        ),
    ] = None
    min_tokens: Annotated[
        Length | None, about("end tokens and stop strings do not count before; at most `max_tokens`", default="0")
    ] = None
    ignore_eos: Annotated[bool | None, about("the model's end tokens do not end the answer", default="false")] = None
    repetition_penalty: Annotated[Repetition | None, about("over prompt and answer", default=f"{_MODELS}, else 1")] = (
        None
    )
    frequency_penalty: Annotated[
        Penalty | None, about("over the answer, for each time a token occurred", default="0")
    ] = None
    presence_penalty: Annotated[Penalty | None, about("over the answer, for tokens that occurred", default="0")] = None
    logit_bias: Annotated[
        Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None, about(_BIAS, default="none")
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None,
        about("no other token is possible, not even the model's end tokens", default="all"),
    ] = None
    bad_words: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD)]], Meta(max_length=MAX_BAD_WORDS)]
        | None,
        about("texts that the answer never has, however they are cut into tokens", default="none"),
    ] = None
    skip_special_tokens: Annotated[bool | None, about("leaves control tokens out of the text", default="true")] = None
    include_stop_str_in_output: Annotated[
        bool | None, about("the stop string that ended the answer stays in it", default="false")
    ] = None
    truncate_prompt_tokens: Annotated[
        Kept | None, about(_KEEP, range="−1, or an integer from 1 to what the context holds", default="all")
    ] = None
    cache_salt: Annotated[
        Salt | None,
        about("prefix blocks are shared only between requests of one salt (and one API key)", default="none"),
    ] = None
    return_token_ids: Annotated[bool | None, about("adds `token_ids` and `prompt_token_ids`", default="false")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, about("log-probabilities name tokens `token_id:5`, not by their text", default="false")
    ] = None
    prompt_logprobs: Annotated[
        Alternatives | None,
        about(
            "adds `prompt_logprobs`: for each token of the prompt (`null` for the first) its log-probability and rank,"
            " and those of so many alternatives, by token id; not in a stream",
            default="none",
        ),
    ] = None
    request_id: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$(?!\n)")] | None,
        about("ends the `id` of the reply", range="1 to 128 letters, digits and `_.:-`", default="drawn"),
    ] = None
    priority: Annotated[
        Priority | None, about("smaller runs first, with `--scheduling-policy priority`", default="0")
    ] = None
    stream: Annotated[bool | None, about("server-sent events", default="false")] = None
    stream_options: Annotated[
        StreamOptions | None, about("what a stream tells beside the answer; only with `stream`", default="none")
    ] = None
    response_format: Annotated[
        ResponseFormat | None, about("what the answer must look like", default='`{"type": "text"}`')
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, about("the same, by vLLM's names; one of them", default="none")
    ] = None
    guided_json: Annotated[Raw, about("vLLM's older name for `json`", range=_A_SCHEMA)] = field(default_factory=Raw)
    guided_regex: Annotated[str | None, about("vLLM's older name for `regex`")] = None
    guided_choice: Annotated[list[str] | None, about("vLLM's older name for `choice`")] = None
    guided_grammar: Annotated[str | None, about("vLLM's older name for `grammar`")] = None
    guided_whitespace_pattern: Annotated[str | None, about("vLLM's older name for `whitespace_pattern`")] = None
    grammar: Annotated[str | None, about("llama.cpp's name for a grammar")] = None
    json_schema: Annotated[Raw, about("llama.cpp's name for a schema", range=_A_SCHEMA)] = field(default_factory=Raw)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream says what was used so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Refuses what contradicts itself."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs: not in a stream; leave stream out", "prompt_logprobs")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidRequestError(f"seed must be {_SEEDS}, got {self.seed}", "seed")
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1 for what the context holds, got 0"
            raise InvalidRequestError(message, "truncate_prompt_tokens")


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        about(
            "what is continued; one list holds one kind. Control tokens in a text are plain text",
            range="a string, token ids, or a list of either",
        ),
    ]
    logprobs: Annotated[
        Alternatives | None, about("alternatives beside each token, in the integer style", default="none")
    ] = None
    echo: Annotated[
        bool | None, about("the answer begins with the prompt; with `logprobs`, the prompt's too", default="false")
    ] = None
    best_of: Annotated[Choices | None, about("as `n`; nothing else is possible", default="as `n`")] = None
    add_special_tokens: Annotated[bool, about("whether a text prompt begins with the model's BOS")] = True


ROLES = ("system", "developer", "user", "assistant", "tool")


class Message(msgspec.Struct, kw_only=True):
    """`messages[]`: one message. `content` is text, or parts of which text is the only kind that is served."""

    role: Annotated[
        str,
        about("whose it is", range="system, developer (the same), user, assistant or tool"),
        Meta(extra_json_schema={"enum": list(ROLES)}),
    ]
    content: Annotated[
        str | list[dict[str, Any]] | None,
        about(
            "text, or parts with text; the assistant's may be null",
            range="a string, or a list of parts (`text`, `input_text`, `output_text`, `refusal`)",
        ),
    ] = None
    name: Annotated[str | None, about("of the speaker, for templates that show it")] = None
    tool_calls: Annotated[
        list[dict[str, Any]] | None, about("what the assistant called: arguments are JSON in a string, or an object")
    ] = None
    tool_call_id: Annotated[str | None, about("the call that a tool's message answers")] = None
    reasoning_content: Annotated[str | None, about("what the assistant thought, for the template")] = None
    reasoning: Annotated[str | None, about("the same by another name")] = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[
        list[Message],
        about("the conversation. Control tokens in it are plain text", range="a list of at least one message"),
        Meta(min_length=1),
    ]
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        about("as `max_tokens`; goes before it", default="`max_tokens`"),
    ] = None
    logprobs: Annotated[bool | None, about("log-probability of each token", default="false")] = None
    top_logprobs: Annotated[Alternatives | None, about("alternatives beside them; needs `logprobs`", default="0")] = (
        None
    )
    add_generation_prompt: Annotated[
        bool | None,
        about(
            "whether the template opens the assistant's turn", default="true, or false where the last message goes on"
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        about(
            "a template instead of the model's; only with `--trust-request-chat-template`",
            range=f"a string of at most {MAX_OWN_TEMPLATE} characters",
            default="the model's",
        ),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("variables for the template", default="none")] = None
    documents: Annotated[
        list[dict[str, Any]] | None, about("as `chat_template_kwargs.documents`, for templates that know it")
    ] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
        about("as `chat_template_kwargs.reasoning_effort`, for templates that know it", default="the template's"),
    ] = None
    continue_final_message: Annotated[
        bool | None, about("the last message, the assistant's, goes on where it ends", default="false")
    ] = None
    tools: Annotated[
        list[Tool] | None,
        about(
            "functions that the model may call",
            range=f"a list of up to {MAX_TOOLS} functions, {MAX_TOOL_BYTES >> 10} KiB together",
            default="none",
        ),
    ] = None
    tool_choice: Annotated[
        Any,
        about(
            "whether it may or must call one; an object names the one that it must, or some that are allowed",
            range='`"auto"`, `"none"`, `"required"` or an object',
            default='`"auto"`',
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, about("whether there may be several calls in an answer", default="true")
    ] = None
    include_reasoning: Annotated[
        bool | None, about("whether the reply has what the model thinks before it answers", default="true")
    ] = None

    @property
    def variables(self) -> dict[str, Any]:
        """What the template is given beside the messages."""
        named = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        given = {name: value for name, value in named.items() if value is not None}
        return given | (self.chat_template_kwargs or {})

    def check(self) -> None:
        """The same for chat."""
        super().check()
        _check_end(self)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages."""

    model: Annotated[str | None, about("another name is a 404", default="the served one")] = None
    prompt: Annotated[str | None, about("a text; either this or `messages`")] = None
    messages: Annotated[list[Message] | None, about("a conversation, rendered by the chat template")] = None
    add_special_tokens: Annotated[bool, about("whether a text prompt begins with the model's BOS")] = True
    add_generation_prompt: Annotated[
        bool | None,
        about("whether the template opens the assistant's turn", default="as on chat"),
    ] = None
    continue_final_message: Annotated[
        bool | None, about("the last message, the assistant's, goes on where it ends", default="false")
    ] = None
    chat_template: Annotated[
        str | None,
        about(
            "a template instead of the model's; only with `--trust-request-chat-template`",
            range=f"a string of at most {MAX_OWN_TEMPLATE} characters",
            default="the model's",
        ),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("variables for the template")] = None
    tools: Annotated[list[Tool] | None, about("functions that the model is shown, beside messages")] = None
    return_token_strs: Annotated[bool | None, about("adds `token_strs`, the text of each token")] = None

    def check(self) -> None:
        """Refuses what contradicts itself."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        _check_end(self)


def _check_end(request: ChatRequest | TokenizeRequest) -> None:
    """Of a conversation: either its last message goes on, or another begins."""
    name = "continue_final_message"
    if not request.continue_final_message:
        return
    if request.add_generation_prompt is True:
        raise InvalidRequestError(
            f"{name} needs add_generation_prompt: false: either it goes on, or another begins", name
        )
    if not request.messages or request.messages[-1].role != "assistant":
        raise InvalidRequestError(f"{name}: the last message must be the assistant's", name)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: Annotated[str | None, about("another name is a 404", default="the served one")] = None
    tokens: Annotated[list[int], about("token ids")]
    skip_special_tokens: Annotated[bool, about("leaves control tokens out of the text")] = False
