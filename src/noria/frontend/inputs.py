"""What a user sent → token ids that the engine can take.

Owns rendering and encoding, off the event loop unless a text is short, and the checks of length and vocabulary. Knows
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Protocol

import msgspec

from noria.errors import InvalidRequestError, TokenizerError
from noria.params import MAX_STOP_STRINGS, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # of the completions API, as OpenAI's
_TRIED_CHARACTERS = 16  # per token of context: several times what text has
_LONGEST = 1 << 20  # characters that are encoded at once, for whatever purpose, even if no context holds them
# Characters that are encoded on the event loop: that takes less than half a millisecond, and to hand them to another
# thread and back would take as long again.
_SHORT = 2048
MAX_OWN_TEMPLATE = 64 << 10  # characters of a template that a request brings
_KEPT_TEMPLATES = 16  # of those, compiled


class TokenizerLike(Protocol):
    """What is needed of a tokeniser."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def names(self) -> Mapping[str, str]: ...

    def encode(self, text: str, add_bos: bool) -> list[int]: ...

    def encode_rendered(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class TemplateLike(Protocol):
    """What is needed of a chat template."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = {},
        continue_final: bool = False,
    ) -> str: ...


class InputProcessor:
    """Prompts to token ids.

    Args:
        tokenizer: the model's.
        template: its chat template, if it has one.
        max_model_len: most tokens of prompt and output together.
        vocab_size: of the model: ids at or above it are refused.
        threads: of the pool in which templates are rendered and text is encoded.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        template: TemplateLike | None,
        max_model_len: int,
        vocab_size: int,
        threads: int = 2,
        make_template: Callable[[str], TemplateLike] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        # Of templates that requests bring. None: they may not.
        self._make_template = None if make_template is None else lru_cache(_KEPT_TEMPLATES)(make_template)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="noria-encode")
        # Texts that no request could hold, which `/tokenize` counts all the same: one at a time, in nobody's way.
        self._long = ThreadPoolExecutor(1, thread_name_prefix="noria-count")

    def close(self, wait: bool = False) -> None:
        """Stops the threads; `wait`: returns when they have ended."""
        self._pool.shutdown(wait=wait, cancel_futures=True)
        self._long.shutdown(wait=wait, cancel_futures=True)

    async def prompt(
        self, prompt: str | Sequence[int], add_bos: bool = True, field: str = "prompt", alone: bool = False
    ) -> list[int]:
        """Token ids of a completion's prompt: text, or ids, which are checked. `alone`: it is not one of many."""
        if isinstance(prompt, str):
            encode = partial(self.tokenizer.encode, add_bos=add_bos)
            if alone and len(prompt) <= _SHORT:
                ids = self._bounded(encode, prompt, field)
            else:
                ids = await asyncio.get_running_loop().run_in_executor(self._pool, self._bounded, encode, prompt, field)
        else:
            if len(prompt) > self.max_model_len:  # first of all: there may be any number of them
                self.check_room(len(prompt), None, field)
            ids = list(prompt)
            self.check_ids(ids, field)
        if not ids:
            raise InvalidRequestError("the prompt is empty: there is nothing to continue", field)
        return ids

    def _bounded(self, encode: Callable[[str], list[int]], text: str, field: str) -> list[int]:
        """Encodes text. The beginning of a very long one is tried first: if that does not fit, the rest need not be
        encoded, and others need not wait for it."""
        beginning = self._beginning
        if len(text) > beginning and (count := len(encode(text[:beginning]))) > self.max_model_len:
            raise InvalidRequestError(
                f"the context is limited to {self.max_model_len} tokens; the first {beginning} of the prompt's"
                f" {len(text)} characters have {count} already. Shorten the prompt",
                field,
            )
        self._check_length(text, field)
        return encode(text)

    def _check_length(self, text: str, field: str) -> None:
        """Refuses text of which the encoding would take seconds, and hundreds of megabytes."""
        if len(text) > self._longest:
            raise InvalidRequestError(
                f"{field}: {len(text)} characters; at most {self._longest} are encoded at once. Send it in parts", field
            )

    @property
    def _beginning(self) -> int:
        """Characters of a text that are encoded without knowing that it can fit."""
        return self.max_model_len * _TRIED_CHARACTERS

    @property
    def _longest(self) -> int:
        """Characters of a text that are encoded at all."""
        return max(_LONGEST, self._beginning)

    async def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text, which may be none, and may be more than the context holds."""
        self._check_length(text, "prompt")
        pool = self._long if len(text) > self._beginning else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, self.tokenizer.encode, text, add_bos)

    async def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of token ids, which may be more than the context holds."""
        pool = self._long if len(ids) > self.max_model_len else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, self.tokenizer.decode, ids, skip_special)

    async def prompts(
        self, prompts: Sequence[str | Sequence[int]], add_bos: bool, max_tokens: int | None, keep: int | None = None
    ) -> list[list[int]]:
        """Token ids of several prompts, of each the last `keep`. One after the other: many in one request do not keep
        other requests waiting, and the first that cannot fit ends the work."""
        encoded = []
        for prompt in prompts:
            if keep is not None and isinstance(prompt, str):
                prompt = await self.encode(prompt, add_bos)
            if keep is not None:
                prompt = prompt[-keep:]
            ids = await self.prompt(prompt, add_bos, alone=len(prompts) == 1)
            self.check_room(len(ids), max_tokens, "prompt")
            encoded.append(ids)
        return encoded

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        keep: int | None = None,
        own: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's template; of many, the last `keep`.

        `continue_final`: the last message goes on. `own`: a template instead of the model's. Raises TemplateError in
        the template's words.
        """
        template = self.template
        if own is not None and self._make_template is None:
            raise InvalidRequestError(
                "chat_template: templates are the model's, or those of --chat-template; a server that was started with"
                " --trust-request-chat-template takes those of requests",
                "chat_template",
            )
        if template is None and own is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template",
                "messages",
            )

        def work() -> list[int]:
            used = template if own is None else self._own_template(own)
            assert used is not None
            text = used.render(messages, tools, add_generation_prompt, variables or {}, continue_final)
            if keep is not None:
                self._check_length(text, "messages")
                return self.tokenizer.encode_rendered(text)[-keep:]
            return self._bounded(self.tokenizer.encode_rendered, text, "messages")

        # With `keep`, text that the context could not hold is encoded as well.
        pool = self._pool if keep is None else self._long
        ids = await asyncio.get_running_loop().run_in_executor(pool, work)
        if not ids:
            raise InvalidRequestError("the chat template made an empty prompt of these messages", "messages")
        return ids

    def _own_template(self, text: str) -> TemplateLike:
        assert self._make_template is not None
        if len(text) > MAX_OWN_TEMPLATE:
            raise InvalidRequestError(f"chat_template: longer than {MAX_OWN_TEMPLATE} characters", "chat_template")
        try:
            return self._make_template(text)
        except TokenizerError as error:
            raise InvalidRequestError(str(error), "chat_template") from None

    def chat_params(self, params: SamplingParams) -> SamplingParams:
        """Adds the stop strings of the template's format: some formats have no token that ends an answer."""
        stop: tuple[str, ...] = getattr(self.template, "stop", ())
        more = tuple(text for text in stop if text not in params.stop)[: MAX_STOP_STRINGS - len(params.stop)]
        return msgspec.structs.replace(params, stop=(*params.stop, *more)) if more else params

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Refuses ids outside the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            bad = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InvalidRequestError(
                f"{field}: token id {bad} is not in the vocabulary (0 … {self.vocab_size - 1})", field
            )

    def check_room(self, prompt_tokens: int, wanted: int | None, field: str) -> None:
        """Refuses a prompt and an answer (`wanted` tokens; None: at least one) that the context cannot hold."""
        room = self.max_model_len - prompt_tokens
        if room < (0 if wanted == 0 else 1) or (wanted is not None and wanted > room):
            asked = f"{wanted} more were asked for" if wanted is not None else "that leaves no room for an answer"
            raise InvalidRequestError(
                f"the context is limited to {self.max_model_len} tokens; the prompt has {prompt_tokens}"
                f" and {asked}. Shorten the prompt or ask for fewer tokens (max_tokens)",
                field if room < 1 else "max_tokens",
            )

    def kept(self, wanted: int | None, max_tokens: int | None) -> int | None:
        """How many of a prompt's tokens remain where `truncate_prompt_tokens` is `wanted`; None: all. Raises
        InvalidRequestError: more than the context holds."""
        if wanted is None:
            return None
        if wanted > self.max_model_len:
            allowed = f"in [1, {self.max_model_len}], or -1 for what the context holds"
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be {allowed}, got {wanted}", "truncate_prompt_tokens"
            )
        room = self.max_model_len - (DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens)
        return max(1, room) if wanted == -1 else wanted

    def resolve(
        self, params: SamplingParams, prompt_tokens: int, field: str = "prompt", default: int | None = None
    ) -> SamplingParams:
        """Sets `max_tokens` (to `default`, or to what the context leaves) and refuses what cannot fit.

        Token ids in `logit_bias`, `stop_token_ids` and `allowed_token_ids` are checked too.
        """
        self.check_ids(list(params.logit_bias), "logit_bias")
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids(params.allowed_token_ids, "allowed_token_ids")
        wanted = params.max_tokens
        self.check_room(prompt_tokens, wanted, field)
        room = self.max_model_len - prompt_tokens
        if wanted is None:
            wanted = room if default is None else min(default, room)
            if params.min_tokens > wanted:
                raise InvalidRequestError(
                    f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({wanted})", "min_tokens"
                )
        return msgspec.structs.replace(params, max_tokens=wanted)
