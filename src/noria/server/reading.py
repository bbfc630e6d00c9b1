"""What a decoded request says → what the floors below take: sampling parameters, prompts, messages.

Refuses, by name, what types and ranges cannot tell. Knows nothing of tokenisers or engines.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from noria.errors import InvalidRequestError
from noria.params import SamplingParams
from noria.server.protocol import ROLES, GenerationRequest, Message
from noria.server.tools.request import check_calls

MANY_MESSAGES = 1000  # of which it takes milliseconds to read them


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
    values["allowed_token_ids"] = tuple(request.allowed_token_ids or ())
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
    if len(set(map(type, prompt))) > 1:
        raise InvalidRequestError("prompt: one list must not mix text, token ids and lists of them", "prompt")
    if isinstance(prompt[0], int):
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)


async def read_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """`plain_messages`, in a thread if there are many, so that others need not wait for it."""
    if len(messages) <= MANY_MESSAGES:
        return plain_messages(messages)
    return await asyncio.to_thread(plain_messages, messages)


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: parts joined to text, absent fields left out."""
    if not messages:
        raise InvalidRequestError("messages: at least one is needed", "messages")
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            where = f"messages[{index}].role"
            raise InvalidRequestError(
                f"{where}: must be system, developer, user, assistant or tool, got {message.role[:100]!r}", where
            )
        entry: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            # The assistant's may have been nothing but reasoning, calls or a refusal.
            "content": _text(message.content, f"messages[{index}].content", message.role == "assistant"),
        }
        for name, value in (
            ("name", message.name),
            ("tool_call_id", message.tool_call_id),
            ("reasoning_content", message.reasoning_content or message.reasoning),
        ):
            if value is not None:
                entry[name] = value
        if message.tool_calls:
            entry["tool_calls"] = check_calls(message.tool_calls, f"messages[{index}].tool_calls")
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
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise InvalidRequestError(f"{where}[{index}]: this model reads text only, not {str(kind)[:100]!r}", where)
        name = "refusal" if "refusal" in part and kind == "refusal" else "text"
        text = part.get(name)
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{index}].{name}: expected a string", where)
        texts.append(text)
    return "\n".join(texts)
