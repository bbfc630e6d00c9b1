"""A server's life: bind, start the engine, load what the API needs meanwhile, serve, drain, stop.

The engine is spawned before this process imports and loads its own things, so that both start at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from noria.config import EngineOptions, ServerOptions
from noria.frontend.transport import EngineTransport
from noria.messages import EngineInfo
from noria.observe.logging import get_logger, logging_environment
from noria.observe.memory import bound_memory, give_memory_back
from noria.server.listen import BACKLOG, certificate, url_of

if TYPE_CHECKING:
    from noria.files.generation import GenerationDefaults
    from noria.files.resolve import ModelFiles
    from noria.frontend.template import ChatTemplate
    from noria.frontend.tokenizer import Tokenizer
    from noria.server.state import ServerState

log = get_logger(__name__)
_LARGE = 256 << 10  # bytes of memory that go back to the system as soon as they are free
_KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, so that they close first
_THREADS = 2  # for what would hold up the event loop; they share its lock, so more would not be faster
_FILES = 65536
_TIDY_TICKS = 20  # tenths of a second between two looks at whether memory can be given back


def launch(
    files: ModelFiles, model: str, engine: EngineOptions, server: ServerOptions, listener: socket.socket
) -> None:
    """Serves until stopped.

    Raises:
        ConfigError, EngineError: the engine cannot start.
        KeyboardInterrupt: a signal came before it was ready.
    """
    signal.signal(signal.SIGTERM, _interrupt)  # until uvicorn takes the signals over, both end the start alike
    transport = _engine_transport(engine, server)
    try:
        transport.spawn()
        _raise_file_limit()
        bound_memory(_LARGE)
        import uvloop

        uvloop.run(_run(transport, files, model, engine, server, listener))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        transport.kill()


def _engine_transport(engine: EngineOptions, server: ServerOptions) -> EngineTransport:
    return EngineTransport(engine, environment=logging_environment(server.log_level, server.log_format))


def _like(engine: EngineOptions, info: EngineInfo) -> EngineOptions:
    """Options for another engine with the limits of the one before: requests were accepted by those."""
    model = msgspec.structs.replace(engine.model, max_model_len=info.max_model_len)
    cache = msgspec.structs.replace(engine.cache, num_blocks=info.num_blocks, block_size=info.block_size)
    return msgspec.structs.replace(engine, model=model, cache=cache)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


async def _run(
    transport: EngineTransport,
    files: ModelFiles,
    model: str,
    engine: EngineOptions,
    server: ServerOptions,
    listener: socket.socket,
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, "noria-aside"))
    loaded = loop.run_in_executor(None, _load, files, engine, server)
    try:
        state = await _assemble(transport, await loaded, files, model, engine, server)
    except BaseException:
        await transport.close()
        raise
    try:
        _announce(state, files, listener)
        await _serve(state, listener)
    finally:
        state.grammars.close()
        await state.client.close()
        state.inputs.close()


def _load(
    files: ModelFiles, engine: EngineOptions, server: ServerOptions
) -> tuple[Tokenizer, ChatTemplate | None, GenerationDefaults]:
    """What the API process needs of a model, loaded while the engine loads the rest."""
    import noria.server.app  # (imported here so that it does not wait for the engine)
    import noria.server.connection  # noqa: F401
    from noria.files.generation import load_generation_defaults
    from noria.files.gguf import close_shared
    from noria.frontend.template import load_template
    from noria.frontend.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(files)
    loaded = tokenizer, load_template(files, tokenizer, server.chat_template), load_generation_defaults(files)
    close_shared()
    return loaded


async def _assemble(
    transport: EngineTransport,
    loaded: tuple[Tokenizer, ChatTemplate | None, GenerationDefaults],
    files: ModelFiles,
    model: str,
    engine: EngineOptions,
    server: ServerOptions,
) -> ServerState:
    from noria.frontend.client import EngineClient
    from noria.frontend.detokenizer import Pieces
    from noria.frontend.grammars import Compiler, Grammars
    from noria.frontend.inputs import InputProcessor
    from noria.observe.metrics import make_metrics
    from noria.server.reading import Defaults
    from noria.server.state import ServerState
    from noria.server.tools.dialect import Dialect

    tokenizer, template, advised = loaded
    name = server.served_model_name or model
    dialect = Dialect.of(template, tokenizer, server.tool_call_parser, server.reasoning_parser)
    metrics, pieces = make_metrics(name, server.metrics), Pieces(tokenizer, dialect.style.control.values())
    limit = engine.scheduler.max_num_seqs + engine.scheduler.max_queued_requests

    def another() -> EngineTransport:
        return _engine_transport(_like(engine, client.info), server)

    ends = advised.end_token_ids or tokenizer.end_ids
    client = EngineClient(transport, pieces, ends, limit, metrics, another)
    info = await client.start()
    defaults = Defaults()
    if engine.model.generation_config:
        defaults = Defaults(
            temperature=advised.temperature,
            top_p=advised.top_p,
            top_k=advised.top_k,
            min_p=advised.min_p,
            repetition_penalty=advised.repetition_penalty,
        )

    def own_template(text: str) -> ChatTemplate:
        from noria.frontend.template import ChatTemplate

        return ChatTemplate({"default": text}, tokenizer)

    maker = own_template if server.trust_request_chat_template else None
    inputs = InputProcessor(tokenizer, template, info.max_model_len, info.vocab_size, make_template=maker)
    aliases = () if server.served_model_name else (files.name,)
    grammars = Grammars(Compiler(lambda: pieces.vocabulary(ends), server.grammar_timeout))
    state = ServerState(client, inputs, pieces, metrics, name, server, defaults, aliases, dialect, grammars=grammars)
    state.sheds = engine.pacer.admission == "slo"
    return state


async def _serve(state: ServerState, listener: socket.socket) -> None:
    import uvicorn

    from noria.server.app import create_app
    from noria.server.connection import Limits, limited

    class Server(uvicorn.Server):
        """Stops gracefully on a signal, and says so; does not raise the signal again afterwards."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {sign: signal.signal(sign, self.handle_exit) for sign in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for sign, handler in before.items():
                    signal.signal(sign, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if state.draining:
                self.should_exit = self.force_exit = True  # the second signal does not wait
                return
            state.draining = True
            state.deadline = time.monotonic() + state.options.drain_timeout
            _say_goodbye(state)

        async def on_tick(self, counter: int) -> bool:
            if counter % _TIDY_TICKS == 0 and state.client.unfinished == 0 and state.answered:
                state.answered = False
                give_memory_back()
            # The socket stays open while accepted requests are finished: others hear that the server stops.
            left = state.deadline - time.monotonic()
            if state.draining and (state.client.unfinished == 0 or left < 0):
                self.config.timeout_graceful_shutdown = math.ceil(max(0.0, left))  # clients may have to read yet
                self.should_exit = True
            return await super().on_tick(counter)

    options, secure = state.options, certificate(state.options)
    # Some descriptors are for the engine, for files, and for saying that there are too many.
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = options.max_connections if files == resource.RLIM_INFINITY else min(options.max_connections, files - 200)
    limits = Limits(most, options.max_header_bytes, options.client_timeout)
    config = uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=limited(limits),
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        ssl_context_factory=None if secure is None else lambda *_: secure,
    )
    if state.options.api_key_file is not None:
        _reload_on_signal(state)
    gc.collect()
    gc.freeze()  # what is loaded stays; the collector need not look at it again
    await Server(config).serve(sockets=[listener])


def _reload_on_signal(state: ServerState) -> None:
    loop, reloads = asyncio.get_running_loop(), set[asyncio.Task[None]]()  # the loop itself holds tasks weakly

    def reload() -> None:
        reloads.add(task := loop.create_task(state.access.reload()))
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)


def _say_goodbye(state: ServerState) -> None:
    running = state.client.unfinished
    if running:
        log.info(
            "stopping: %s %.0f s to finish (a second Ctrl-C stops at once)",
            "1 running request has" if running == 1 else f"{running} running requests have",
            state.options.drain_timeout,
        )
    else:
        log.info("stopping")


def _announce(state: ServerState, files: ModelFiles, listener: socket.socket) -> None:
    """The start-up summary: what runs, how, where, and how long it took."""
    import psutil

    info = state.client.info
    seconds = time.time() - psutil.Process().create_time()
    url = url_of(listener, state.options.ssl_certfile is not None)
    if state.options.log_format == "json" or not sys.stdout.isatty():
        fields = {
            "model": state.name,
            "url": url,
            "weights": info.weights,
            "weight_bytes": info.weight_bytes,
            "cache": info.cache_dtype,
            "cache_bytes": info.cache_bytes,
            "cache_tokens": info.num_blocks * info.block_size,
            "max_model_len": info.max_model_len,
            "backend": f"{info.backend}/{info.isa}",
            "threads": info.threads,
            "seconds": seconds,
        }
        log.info("ready", extra={"fields": fields})
        return
    _print_summary(state, files, url, seconds)


def _print_summary(state: ServerState, files: ModelFiles, url: str, seconds: float) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    import noria

    info = state.client.info
    tokens = info.num_blocks * info.block_size
    rows = (
        ("model", f"{escape(state.name)}  [dim]{escape(files.path.name)}[/dim]"),
        ("weights", f"{info.weights}, {info.weight_bytes / 1e6:,.0f} MB"),
        ("cache", f"{info.cache_dtype}, {tokens:,} tokens in {info.cache_bytes / 1e6:,.0f} MB"),
        ("context", f"{info.max_model_len:,} tokens, up to {info.max_num_seqs} requests at once"),
        ("machine", f"{info.backend} {info.isa}, {info.threads} threads"),
        ("ready", f"[bold]{url}[/bold] after {seconds:.1f} s"),
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", justify="right")
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    console = Console(highlight=False)
    console.print(f"\n  [bold blue]noria[/bold blue] {noria.__version__}\n")
    console.print(grid)
    console.print("\n  [dim]Ctrl-C stops; running requests finish first.[/dim]\n")


def _raise_file_limit() -> None:
    """Each caller needs a file descriptor; the usual limit of 1,024 would be the server's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
