"""A whole server without a model: a byte-level tokeniser, an engine core that recites, and what connects them.

The core answers every prompt with TEXT, one byte a step and choice, starting at the choice's index; a prompt that
contains "brief" gets an end token after five bytes, one that contains "poison" makes the core report an error. One that
may be shed is, as it comes if it contains "hurry", at its third step if it contains "patient". What a core's `scripts`
say of a prompt goes before TEXT.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import uvicorn

from noria.config import ServerOptions
from noria.errors import TemplateError
from noria.frontend.client import EngineClient
from noria.frontend.detokenizer import Pieces
from noria.frontend.inputs import InputProcessor
from noria.frontend.template import ChatTemplate
from noria.frontend.transport import InProcessTransport
from noria.messages import (
    Abort,
    AskPacer,
    Control,
    EngineInfo,
    EngineStats,
    Explain,
    Explained,
    Finished,
    LogProbs,
    Outlook,
    PacerLog,
    Shed,
    Started,
    StepOutputs,
    Submit,
    build_id,
)
from noria.observe.metrics import make_metrics
from noria.server.app import create_app
from noria.server.connection import Connection
from noria.server.reading import Defaults
from noria.server.state import ServerState
from noria.server.tools.dialect import Dialect

TEXT = "Water turns the wheel – größer 🌊! "
BOS, EOS, VOCAB = 256, 257, 260
MAX_LEN = 200
LATE = "the first token would come in about 2.5 s, the objective is 1.0 s; try again in 2 s"


class ByteTokenizer:
    """Tokens are bytes; 256 begins, 257 ends, 258 is another control token, 259 is in the model's head only."""

    vocab_size = 259
    bos_id = BOS
    end_ids = (EOS,)
    special_ids = frozenset((BOS, EOS, 258))
    names: Mapping[str, str] = {"bos_token": "<bos>", "eos_token": "<eos>"}

    def encode(self, text: str, add_bos: bool) -> list[int]:
        return ([BOS] if add_bos else []) + list(text.encode())

    def encode_rendered(self, text: str) -> list[int]:
        return [BOS, *text.encode()]

    def protect(self, text: str) -> str:
        return text

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id, b"<pad>")

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        kept = [token for token in ids if not (skip_special and token in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


class LineTemplate:
    """`role: content` lines; messages from the tool role, and any that say "unspeakable", are refused."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = {},
        continue_final: bool = False,
    ) -> str:
        if any(message["role"] == "tool" for message in messages):
            raise TemplateError("this template knows no tools", "messages")
        if any("unspeakable" in message["content"] for message in messages):
            raise TemplateError("this template will not say that", "messages")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        lines += [f"{key}={value}\n" for key, value in variables.items()]
        if continue_final:
            return "".join(lines).removesuffix("\n")
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


def logprobs_of(tokens: Sequence[int], k: int) -> LogProbs:
    """-1/4 for the token, -1 -2 … for the alternatives: the token itself and those after it."""
    count = len(tokens)
    ids = [[(token + offset) % 256 for offset in range(k)] for token in tokens]
    top = [[-0.25 - offset for offset in range(k)] for _ in tokens]
    return LogProbs(
        k,
        np.asarray(tokens, "<i4").tobytes(),
        np.full(count, -0.25, "<f4").tobytes(),
        np.ones(count, "<i4").tobytes(),
        np.asarray(ids, "<i4").tobytes(),
        np.asarray(top, "<f4").tobytes(),
    )


@dataclass
class Row:
    submit: Submit
    script: list[int]
    made: int = 0
    waited: int = 0


@dataclass
class ReciterCore:
    """A fake of the engine's core. `pause`: seconds per step; `seats`: most running rows. `scripts`: what is answered,
    up to an end token, to prompts that contain a text."""

    pause: float = 0.0
    seats: int = 64
    rows: dict[int, Row] = field(default_factory=dict)
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    steps: int = 0
    broken: bool = False
    stats_wanted: bool = False
    answers: list[Explained | PacerLog] = field(default_factory=list)
    idle_seconds: float = 0.0
    scripts: dict[str, str] = field(default_factory=dict)
    context: int = MAX_LEN
    outlook: Outlook = field(default_factory=Outlook)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            build_id=build_id(),
            max_model_len=self.context,
            vocab_size=VOCAB,
            num_blocks=100,
            block_size=16,
            max_num_seqs=self.seats,
            max_num_batched_tokens=512,
            backend="fake",
            isa="none",
            threads=1,
            weights="none",
            cache_dtype="f32",
            weight_bytes=0,
            cache_bytes=0,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.rows) or self.broken or self.stats_wanted or bool(self.answers)

    @property
    def stats(self) -> EngineStats:
        running = min(len(self.rows), self.seats)
        return EngineStats(
            running=running,
            waiting=len(self.rows) - running,
            held_blocks=running,
            free_blocks=100 - running,
            total_blocks=100,
            steps_total=self.steps,
            prefix_queries_total=10,
            prefix_hits_total=4,
            outlook=self.outlook,
        )

    def handle(self, message: Submit | Abort | Control | Explain | AskPacer) -> None:
        if isinstance(message, Submit):
            self.submitted.append(message)
            text = TEXT.encode()
            script = [text[(message.choice + at) % len(text)] for at in range(message.params.max_tokens or 0)]
            prompt = bytes(token for token in np.frombuffer(message.prompt_ids, "<i4").tolist() if token < 256)
            if b"brief" in prompt and EOS in message.stop_ids:
                script = [*script[:5], EOS]
            for key, said in self.scripts.items():
                if key.encode() in prompt:
                    script = [*said.encode(), EOS][: message.params.max_tokens]
            self.rows[message.request_id] = Row(message, script)
        elif isinstance(message, Abort):
            self.aborted += message.request_ids
            for request_id in message.request_ids:
                self.rows.pop(request_id, None)
        elif isinstance(message, Explain):
            self.answers.append(Explained(ask=message.ask, now=time.monotonic(), known=False))
        elif isinstance(message, AskPacer):
            self.answers.append(PacerLog(message.ask, time.monotonic(), None))
        else:
            self.stats_wanted = True

    def _sheds(self, row: Row, prompt: list[int]) -> Shed | Literal[""] | None:
        """Where a request is shed; "": it waits yet; None: never."""
        said = bytes(token for token in prompt if token < 256)
        if b"hurry" in said:
            return "door"
        if b"patient" not in said:
            return None
        row.waited += 1
        return "queue" if row.waited == 3 else ""

    def step(self) -> StepOutputs | None:
        if self.broken:
            raise RuntimeError("the wheel broke")
        self.stats_wanted = False
        answers, self.answers = tuple(self.answers), []
        if self.pause and self.rows:
            time.sleep(self.pause)
        self.steps += 1
        ids: list[int] = []
        tokens: list[int] = []
        finished: list[Finished] = []
        started: list[Started] = []
        logprobs: dict[int, LogProbs] = {}
        prompt_logprobs: dict[int, LogProbs] = {}
        for request_id, row in list(self.rows.items())[: self.seats]:
            params = row.submit.params
            prompt = np.frombuffer(row.submit.prompt_ids, "<i4").tolist()
            if b"poison" in bytes(token for token in prompt if token < 256):
                finished.append(Finished(request_id, "error", None, "poisoned"))
                continue
            if row.submit.sheddable and row.made == 0 and (where := self._sheds(row, prompt)) is not None:
                if where:
                    finished.append(Finished(request_id, "error", None, LATE, shed=where, retry_after=1.5))
                continue
            if row.made == 0:
                started.append(Started(request_id, 3, 0.001))
                if params.prompt_logprobs is not None:
                    prompt_logprobs[request_id] = logprobs_of(prompt[1:], params.prompt_logprobs)
            if row.script:
                token = row.script[row.made]
                row.made += 1
                ids.append(request_id)
                tokens.append(token)
                if params.logprobs is not None:
                    logprobs[request_id] = logprobs_of([token], params.logprobs)
                if token in row.submit.stop_ids and row.made > params.min_tokens:
                    finished.append(Finished(request_id, "stop", token, cached_tokens=3))
                    continue
            if row.made == len(row.script):
                finished.append(Finished(request_id, "length", cached_tokens=3))
        for end in finished:
            del self.rows[end.request_id]
        return StepOutputs(
            step=self.steps,
            request_ids=np.asarray(ids, "<i8").tobytes(),
            counts=np.ones(len(ids), "<i4").tobytes(),
            tokens=np.asarray(tokens, "<i4").tobytes(),
            finished=tuple(finished),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            started=tuple(started),
            answers=answers,
            stats=self.stats,
        )


def recited(count: int, choice: int = 0) -> str:
    """What a choice of `count` tokens says."""
    text = TEXT.encode()
    return bytes(text[(choice + at) % len(text)] for at in range(count)).decode("utf-8", "replace")


def make_state(
    core: ReciterCore,
    options: ServerOptions | None = None,
    max_unfinished: int = 1000,
    defaults: Defaults | None = None,
    dialect: Dialect | None = None,
    sheds: bool = False,
) -> ServerState:
    tokenizer = ByteTokenizer()
    options = options or ServerOptions()
    pieces, metrics = Pieces(tokenizer), make_metrics("wheel", options.metrics)
    client = EngineClient(InProcessTransport(lambda: core), pieces, (EOS,), max_unfinished, metrics)
    own = (lambda text: ChatTemplate({"default": text}, tokenizer)) if options.trust_request_chat_template else None
    inputs = InputProcessor(tokenizer, LineTemplate(), core.context, VOCAB, make_template=own)
    return ServerState(
        client,
        inputs,
        pieces,
        metrics,
        "wheel",
        options,
        defaults or Defaults(),
        ("wheel-alias",),
        dialect or Dialect(),
        sheds=sheds,
    )


@dataclass
class Running:
    url: str
    core: ReciterCore
    state: ServerState
    loop: asyncio.AbstractEventLoop


@contextmanager
def serving(core: ReciterCore | None = None, **how: Any) -> Iterator[Running]:
    """A real server on a free port, in a thread."""
    core = core or ReciterCore()
    state = make_state(core, **how)
    app = create_app(state)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none", http=Connection))
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await state.client.start()
        await server.serve()
        await state.client.close()
        state.inputs.close()
        state.grammars.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", core, state, loops[0])
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        assert not thread.is_alive()


def wait_until(condition: Any, seconds: float = 5.0) -> None:
    """Fails if `condition()` does not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
