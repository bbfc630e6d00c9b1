"""Offline use: a model in this process, without a server.

    llm = noria.LLM("smollm2")
    for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
        print(answer.text)

The engine steps on a thread of its own; an event loop on another carries requests to it, through the same client that
the server uses. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from noria.config import EngineOptions, engine_options
from noria.engine.core import EngineCore
from noria.errors import ConfigError, EngineError, InvalidRequestError
from noria.files.generation import GenerationDefaults, load_generation_defaults
from noria.frontend.client import EngineClient
from noria.frontend.detokenizer import Pieces
from noria.frontend.inputs import DEFAULT_COMPLETION_TOKENS, InputProcessor
from noria.frontend.locate import find_model
from noria.frontend.stream import Increment, LogProbColumns, RequestStream
from noria.frontend.template import load_template
from noria.frontend.tokenizer import load_tokenizer
from noria.frontend.transport import InProcessTransport
from noria.messages import EngineInfo
from noria.params import SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_UNBOUNDED = 2**62  # whoever gives prompts here waits for them anyway


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice.

    Attributes:
        stop_reason: the stop string or token that ended it; None for the model's own end token.
        logprobs: of `token_ids`, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: LogProbColumns | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt: its `n` choices, and the first one's text at hand.

    Attributes:
        prompt: the text, if text was given.
        prompt_logprobs: of prompt tokens 1 …, if asked for.
        cached_tokens: prompt tokens that the prefix cache had.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: LogProbColumns | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text


class LLM:
    """A model in this process. Close it, or use it in `with`, to free its memory.

    Args:
        model: short name, repository id, directory or GGUF file.
        settings: any engine flag of `noria serve` by its name with underscores: `quantization="int8"`, `threads=2` …

    Raises:
        ConfigError: a setting that is unknown or cannot work.
        ModelError: a model that cannot be found or loaded.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        options = engine_options(model, **settings)
        if options.pacer.admission == "slo":
            raise ConfigError("nobody can come again later in this process: leave it out", "--admission")
        files = find_model(model)
        self.model = files.name
        self.tokenizer = load_tokenizer(files)
        advised = load_generation_defaults(files)
        self._defaults = advised if options.model.generation_config else GenerationDefaults()
        ends = advised.end_token_ids or self.tokenizer.end_ids
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="noria-llm", daemon=True)
        self._thread.start()
        self._inputs: InputProcessor | None = None
        self._client = EngineClient(_in_process(options), Pieces(self.tokenizer), ends, _UNBOUNDED)
        self._closer = weakref.finalize(self, _close, self._loop, self._thread, self._client)
        try:
            self.info: EngineInfo = self._wait(self._client.start())
        except BaseException:
            self.close()
            raise
        self._inputs = InputProcessor(
            self.tokenizer, load_template(files, self.tokenizer), self.info.max_model_len, self.info.vocab_size
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the engine and frees the model. May be called again."""
        self._closer()
        if self._inputs is not None:
            self._inputs.close(wait=True)

    @property
    def _open(self) -> InputProcessor:
        """What makes prompts of inputs, while this is open."""
        if self._inputs is None or not self._closer.alive:
            raise EngineError("this LLM was closed")
        return self._inputs

    @property
    def default_params(self) -> SamplingParams:
        """What `generate` and `chat` use when no parameters are given: the defaults that come with the model."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        advised = {name: getattr(self._defaults, name) for name in names}
        return SamplingParams(**{name: value for name, value in advised.items() if value is not None})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts, batched as a server would.

        Args:
            prompts: text or token ids, one or several.
            params: for all prompts, or one for each; None: the model's defaults and 16 tokens.
            progress: show a bar on standard error.

        Returns:
            Answers in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be; nothing was generated then.
        """
        several = _prompts(prompts)
        each = _params(params or self.default_params, len(several))
        default = DEFAULT_COMPLETION_TOKENS if params is None else None
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        return self._answer(texts, [self._open.prompt(prompt) for prompt in several], each, default, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers one or several conversations, rendered by the model's chat template.

        Args:
            messages: `[{"role": "user", "content": …}, …]`, or a list of such conversations.
            params: as for `generate`, but an answer may fill the context unless `max_tokens` says otherwise.
        """
        if not messages:
            raise InvalidRequestError("messages: at least one is needed", "messages")
        one = isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        each = [self._open.chat_params(one) for one in _params(params or self.default_params, len(conversations))]
        work = [self._open.chat(conversation) for conversation in conversations]
        return self._answer([None] * len(work), work, each, None, progress)

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Iterator[Increment]:
        """One answer as it grows. A list of messages is a conversation; text or token ids are a prompt.

        Leaving the iterator early aborts the request.
        """
        wanted = params or self.default_params
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            wanted = self._open.chat_params(wanted)
            encode = self._open.chat(cast(Sequence[Message], prompt))
        else:
            encode = self._open.prompt(cast(Prompt, prompt))
        news: queue.SimpleQueue[list[Increment] | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                ids = await encode
                with self._client.submit([ids], [self._open.resolve(wanted, len(ids))]) as stream:
                    async for increments in stream:
                        news.put(increments)
            finally:
                news.put(None)

        running = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (increments := news.get()) is not None:
                yield from increments
            running.result()
        finally:
            running.cancel()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._loop.call_soon_threadsafe(self._client.reset_prefix_cache)

    # ------------------------------------------------------------------------------------------------ inside

    def _answer(
        self,
        texts: Sequence[str | None],
        encoding: Sequence[Coroutine[Any, Any, list[int]]],
        params: Sequence[SamplingParams],
        default: int | None,
        progress: bool,
    ) -> list[RequestOutput]:
        with _progress(len(encoding)) if progress else nullcontext(lambda tokens: None) as advance:
            return self._wait(self._answer_all(texts, encoding, params, default, advance))

    async def _answer_all(
        self,
        texts: Sequence[str | None],
        encoding: Sequence[Coroutine[Any, Any, list[int]]],
        params: Sequence[SamplingParams],
        default: int | None,
        advance: Callable[[int], None],
    ) -> list[RequestOutput]:
        encoded = await asyncio.gather(*encoding)
        resolved = [
            self._open.resolve(one, len(ids), "prompt", default) for one, ids in zip(params, encoded, strict=True)
        ]
        streams = [self._client.submit([ids], [one]) for ids, one in zip(encoded, resolved, strict=True)]

        async def finish(text: str | None, ids: list[int], stream: RequestStream) -> RequestOutput:
            choices = await stream.result()
            advance(sum(len(choice.token_ids) for choice in choices))
            return _output(text, ids, choices, stream.cached_tokens)

        try:
            return await asyncio.gather(*map(finish, texts, encoded, streams))
        finally:
            for stream in streams:
                stream.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs on the loop's thread and waits; Ctrl-C aborts the work."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise


def _in_process(options: EngineOptions) -> InProcessTransport:
    from noria.executor.local import LocalExecutor
    from noria.pacer.start import make_pacer

    opened: list[EngineCore | LocalExecutor] = []  # in the order in which they are closed

    def make() -> EngineCore:
        executor = LocalExecutor(options)
        opened.append(executor)
        cache = msgspec.structs.replace(options.cache, block_size=executor.info.block_size)
        core = EngineCore(executor, cache, options.scheduler, pacer=make_pacer(options, executor.info))
        opened.insert(0, core)
        return core

    def close() -> None:
        for one in opened:
            one.close()

    return InProcessTransport(make, close)


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: EngineClient) -> None:
    try:
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        if not loop.is_running():
            loop.close()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


def _params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"params: {len(params)} for {count} prompts; give one, or one for each", "params")
    return list(params)


def _output(text: str | None, ids: list[int], choices: list[Increment], cached: int) -> RequestOutput:
    outputs = []
    for choice in choices:
        assert choice.finish is not None
        if choice.finish.reason == "error":
            message = choice.finish.message or "the engine could not continue a prompt"
            raise InvalidRequestError(message) if choice.finish.refused else EngineError(message)
        reason = choice.finish.reason
        stop = choice.finish.stop_reason
        outputs.append(CompletionOutput(choice.choice, choice.text, choice.token_ids, reason, stop, choice.logprobs))
    return RequestOutput(text, ids, outputs, choices[0].prompt_logprobs, cached)


def _progress(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A bar on standard error that is advanced by the tokens of a finished prompt."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )

    @contextmanager
    def show() -> Iterator[Callable[[int], None]]:
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task, done = bar.add_task("", total=total, speed=""), 0

            def advance(tokens: int) -> None:
                nonlocal done
                done += tokens
                elapsed = bar.tasks[0].elapsed or 1e-9
                bar.update(task, advance=1, speed=f"{done / elapsed:,.0f} tok/s")

            yield advance

    return show()
