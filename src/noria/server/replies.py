"""What the replies of OpenAI's protocol are made of, whole and in chunks."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, those that the prefix cache had."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Of the answers' tokens, those of reasoning, its marks included."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request; a prompt counts once whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of models that reason


class CompletionLogprobs(msgspec.Struct):
    """The integer style. `text_offset`: characters of the text before each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """Of a token at a place of the prompt. `rank`: 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


# Of each token of a prompt, by token id: of the token itself and of the most likely ones. The first token has none.
PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A completion, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """An alternative at a token's place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat answer."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """A function and its arguments, as the model wrote them: JSON, unless it slipped or was cut off."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call that the model makes."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """The answer. `content`: null if there is nothing but reasoning and calls. Reasoning has the two names that clients
    read."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of a chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A chat answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """The name comes first, then the arguments piece by piece."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What a chunk adds to the call of this index."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to a message. The last one is empty."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A choice in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---------------------------------------------------------------------------------------------------- small endpoints


class Model(msgspec.Struct, kw_only=True):
    """The served model. `created`: when the server started; `max_model_len`: tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "noria"
    max_model_len: int


class Models(msgspec.Struct, kw_only=True):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, kw_only=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct):
    """`POST /detokenize`."""

    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """`GET /tokenizer_info`: texts of control tokens; null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    model_max_length: int


class Condition(msgspec.Struct):
    """`GET /health` and `GET /ready`. `message`: what is wrong."""

    status: Literal["ok", "ready", "unavailable"]
    message: str | UnsetType = UNSET


class Version(msgspec.Struct):
    """`GET /version`."""

    version: str
