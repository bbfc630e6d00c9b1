"""What a hostile client does to a server, one coroutine for each kind. Each returns a word for how it ended.

The numbers that it tries are made from the structs of the protocol, so that a new field is attacked from the day that
it exists.
"""

from __future__ import annotations

import asyncio
import json
import random
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from hostile_bodies import CHAT, COMPLETIONS, MB, forms, huge, large
from hostile_wire import Reply, Wire, head, post

from noria import params as limits
from noria.server import protocol

STRUCTS = {
    COMPLETIONS: protocol.CompletionRequest,
    CHAT: protocol.ChatRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
}
LIMITS = sorted(value for name, value in vars(limits).items() if name.startswith("MAX_") and isinstance(value, int))
# As they stand in JSON: not all of them are numbers that Python's encoder would write.
EDGES = (
    *(
        "0",
        "1",
        "-1",
        "2",
        "-2",
        "0.5",
        "1.5",
        "-0.0",
        "1e-320",
        "1e308",
        "-1e308",
        "1e999",
        "NaN",
        "Infinity",
        "-Infinity",
    ),
    *(str(sign * (1 << bits) + more) for bits in (31, 32, 53, 63, 64, 128) for sign in (1, -1) for more in (-1, 0, 1)),
    *(str(value + more) for value in LIMITS for more in (0, 1)),
    "1" + "0" * 400,
)
WRONG = (
    "true",
    "null",
    '""',
    '"x"',
    "[]",
    "{}",
    "[[]]",
    '[null, "a", 1]',
    '{"a": {"b": []}}',
    '"\\ud800"',
    '"\\u0000"',
)


@dataclass(slots=True)
class Scene:
    """The server under attack, and chance. `tokens`: of its context."""

    port: int
    random: random.Random
    tokens: int
    vocabulary: int = 40_000
    made: dict[str, bytes] = field(default_factory=dict)  # bodies that are costly to make

    def wire(self, receive_buffer: int | None = None) -> Wire:
        """A new connection."""
        return Wire(self.port, receive_buffer)

    def ids(self, count: int) -> list[int]:
        """A prompt that nobody had before."""
        return [self.random.randrange(100, self.vocabulary) for _ in range(count)]

    def body(self, **more: Any) -> dict[str, Any]:
        """A completion of some length."""
        return {"prompt": self.ids(20), "max_tokens": self.random.choice((1, 8, 60)), "ignore_eos": True, **more}

    def kept(self, name: str, make: Callable[[], bytes]) -> bytes:
        """What `make` made at the first time."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]


Attack = Callable[[Scene], Awaitable[str]]
ATTACKS: list[tuple[Attack, float]] = []  # with how often, relative to the others


def attack(often: float = 1.0) -> Callable[[Attack], Attack]:
    """Registers a kind."""

    def register(kind: Attack) -> Attack:
        ATTACKS.append((kind, often))
        return kind

    return register


async def ask(scene: Scene, data: bytes) -> str:
    """Sends and tells the status of the answer. A server that refuses may do so before it has read everything."""
    async with scene.wire() as wire:
        sending = asyncio.ensure_future(wire.send(data))
        try:
            reply = await wire.reply()
        except (asyncio.IncompleteReadError, ConnectionError):
            return "closed"
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return judged(reply)


def judged(reply: Reply) -> str:
    """The status of an answer; what is wrong with it where it should be a clear refusal and is not."""
    if reply.status >= 400 and reply.headers.get("content-type", "").startswith("application/json"):
        error = json.loads(reply.body).get("error") or {}
        if not error.get("message") and reply.status != 503:
            return f"{reply.status} without a message"
    if reply.status in (429, 503) and "retry-after" not in reply.headers:
        return f"{reply.status} without Retry-After"
    return str(reply.status)


# ------------------------------------------------------------------------------------------------------ gone


@attack()
async def leaves_in_headers(scene: Scene) -> str:
    async with scene.wire() as wire:
        data = post(COMPLETIONS, scene.body())
        await wire.send(data[: scene.random.randrange(1, data.index(b"\r\n\r\n"))])
        await asyncio.sleep(scene.random.random())
    return "left"


@attack()
async def leaves_in_body(scene: Scene) -> str:
    async with scene.wire() as wire:
        data = post(COMPLETIONS, scene.body(user="x" * scene.random.choice((10, 1000, MB))))
        await wire.send(data[: scene.random.randrange(data.index(b"\r\n\r\n") + 4, len(data))])
        await asyncio.sleep(scene.random.random())
    return "left"


@attack(2)
async def leaves_while_queued(scene: Scene) -> str:
    async with scene.wire() as wire:
        body = scene.body(stream=scene.random.random() < 0.5, n=scene.random.choice((1, 4)))
        await wire.send(post(COMPLETIONS, body))
        await asyncio.sleep(scene.random.random() * 0.02)
    return "left"


@attack(2)
async def leaves_in_prefill(scene: Scene) -> str:
    async with scene.wire() as wire:
        count = scene.random.randrange(scene.tokens // 4, scene.tokens - 100)
        await wire.send(post(COMPLETIONS, scene.body(prompt=scene.ids(count), stream=scene.random.random() < 0.5)))
        await asyncio.sleep(scene.random.random())
    return "left"


@attack(2)
async def leaves_in_decode(scene: Scene) -> str:
    async with scene.wire() as wire:
        body = scene.body(max_tokens=500, stream=True, n=scene.random.choice((1, 1, 3)))
        await wire.send(post(COMPLETIONS, body))
        status, _ = await wire.head()
        for _ in range(scene.random.randrange(1, 20) if status == 200 else 0):
            await wire.reader.readuntil(b"\n\n")
    return "left" if status == 200 else str(status)


@attack(2)
async def leaves_whole_answer(scene: Scene) -> str:
    async with scene.wire() as wire:
        await wire.send(post(COMPLETIONS, scene.body(max_tokens=500)))
        await asyncio.sleep(scene.random.random() * 3)
    return "left"


@attack()
async def leaves_several_on_one_connection(scene: Scene) -> str:
    async with scene.wire() as wire:
        data = (
            post(COMPLETIONS, scene.body(max_tokens=500)) + post(COMPLETIONS, scene.body()) + head("GET", "/health", {})
        )
        await wire.send(data)
        await asyncio.sleep(scene.random.random())
    return "left"


# ------------------------------------------------------------------------------------------------------ malformed


def _odd_bodies(scene: Scene) -> list[bytes]:
    deep = scene.random.choice((100, 10_000, 100_000))
    return [
        *(b"", b"{", b"null", b"[]", b'"x"', b"1", b"\x00" * 100, b"\xff\xfe{}", b'\xef\xbb\xbf{"prompt": "x"}'),
        *(b'{"prompt": NaN}', b'{"prompt": "\xc3\x28"}', b'{"prompt": "\\ud800"}', b'{"prompt": "x"} {}'),
        *(b'{"prompt": "x", "prompt": 1}', b'{"prompt": "x", "max_tokens": 1,}', b"{'prompt': 'x'}"),
        b'{"prompt": ' + b"[" * deep + b"]" * deep + b"}",
        b'{"chat_template_kwargs": ' + b'{"a":' * deep + b"1" + b"}" * deep + b', "messages": []}',
        b'{"messages": [{"role": "user", "content": ' + b"[" * deep + b"]" * deep + b"}]}",
        json.dumps({"prompt": "x", **{f"field {i}": i for i in range(10_000)}}).encode(),
        json.dumps({"prompt": "x", "f" * MB: 1}).encode(),
    ]


@attack(2)
async def malformed_json(scene: Scene) -> str:
    return await ask(scene, post(scene.random.choice([*STRUCTS]), scene.random.choice(_odd_bodies(scene))))


def _needed(path: str) -> str:
    return {
        COMPLETIONS: '"prompt": "Once", "max_tokens": 3',
        CHAT: '"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3',
        "/tokenize": '"prompt": "Once"',
        "/detokenize": '"tokens": [100]',
    }[path]


@attack(2)
async def wrong_types(scene: Scene) -> str:
    path = scene.random.choice([*STRUCTS])
    name = scene.random.choice(msgspec.structs.fields(STRUCTS[path])).encode_name
    body = f'{{{_needed(path)}, "{name}": {scene.random.choice(WRONG)}}}'
    return await ask(scene, post(path, body.encode()))


def _written(kind: Any, edge: str) -> str | None:
    """JSON for a field of a type, with a number in it; None: it holds none."""
    if typing.get_origin(kind) is Annotated:
        return _written(typing.get_args(kind)[0], edge)
    if kind in (int, float):
        return edge
    inner = [made for part in typing.get_args(kind) if (made := _written(part, edge)) is not None]
    if not inner:
        return None
    if typing.get_origin(kind) is dict:
        return f'{{"260": {inner[-1]}}}'
    return f"[{inner[0]}]" if typing.get_origin(kind) is list else inner[0]


def numbers(struct: type[msgspec.Struct], edge: str) -> list[tuple[str, str]]:
    """Fields that hold a number, or many, with JSON that has this one in it."""
    named = ((known.encode_name, _written(known.type, edge)) for known in msgspec.structs.fields(struct))
    return [(name, made) for name, made in named if made is not None]


@attack(8)
async def numbers_at_their_edges(scene: Scene) -> str:
    path = scene.random.choice([*STRUCTS])
    found = numbers(STRUCTS[path], scene.random.choice(EDGES))
    if not found:
        return "left"  # /tokenize has none
    name, value = scene.random.choice(found)
    extra = ', "stream": true' if path in (COMPLETIONS, CHAT) and scene.random.random() < 0.3 else ""
    if name == "top_logprobs":
        extra += ', "logprobs": true'
    data = post(path, f'{{{_needed(path)}, "{name}": {value}{extra}}}'.encode())
    return await ask(scene, data)


# ------------------------------------------------------------------------------------------------------ framing


@attack()
async def wrong_length(scene: Scene) -> str:
    body = json.dumps(scene.body()).encode()
    length = scene.random.choice((0, len(body) - 5, len(body) + 5, -1, 10**18, 10**30, "x", "5, 6", ""))
    async with scene.wire() as wire:
        await wire.send(head("POST", COMPLETIONS, {"Content-Length": length}) + body)
        try:
            return judged(await asyncio.wait_for(wire.reply(), 2))
        except asyncio.TimeoutError:
            return "left"  # the server waits for what was announced, and may
        except (asyncio.IncompleteReadError, ConnectionError):
            return "closed"


@attack()
async def odd_chunks(scene: Scene) -> str:
    start = head("POST", COMPLETIONS, {"Transfer-Encoding": "chunked"})
    both = head("POST", COMPLETIONS, {"Transfer-Encoding": "chunked", "Content-Length": 5})
    data = scene.random.choice(
        (
            start + b"zz\r\n",
            start + b"-1\r\n",
            start + b"f" * 30 + b"\r\n",
            start + b"5\r\nabcdefgh\r\n0\r\n\r\n",
            both + b"0\r\n\r\n",
        )
    )
    return await ask(scene, data + b"0\r\n\r\n")


@attack()
async def chunks_without_end(scene: Scene) -> str:
    async with scene.wire() as wire:
        await wire.send(head("POST", COMPLETIONS, {"Transfer-Encoding": "chunked"}))
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(scene.random.choice((5, 50, 400))):
                await wire.send(piece)
                await asyncio.sleep(scene.random.choice((0, 0, 0.05)))
            return judged(await asyncio.wait_for(wire.reply(), 1))
        except asyncio.TimeoutError:
            return "left"
        except (asyncio.IncompleteReadError, ConnectionError):
            return "closed"


@attack()
async def not_http(scene: Scene) -> str:
    data = scene.random.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /health\r\n\r\n",
            b"\r\n" * 100 + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /\x00 HTTP/1.1\r\n\r\n",
            b"GET /%zz%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
            b"EHLO x\r\n",
            bytes(scene.random.randrange(256) for _ in range(1000)),
        )
    )
    async with scene.wire() as wire:
        await wire.send(data)
        try:
            return judged(await asyncio.wait_for(wire.reply(), 2))
        except asyncio.TimeoutError:
            return "left"
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, IndexError):
            return "closed"


@attack()
async def unknown_paths(scene: Scene) -> str:
    path = scene.random.choice(("/", "/v2", "/v1/models/" + "x" * 5000, "/../../etc/passwd", COMPLETIONS, "/health"))
    method = scene.random.choice(("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PATCH", "FOO"))
    if method in ("HEAD", "CONNECT"):
        return await _status_only(scene, head(method, path, {}))
    return await ask(scene, head(method, path, {}))


async def _status_only(scene: Scene, data: bytes) -> str:
    async with scene.wire() as wire:
        await wire.send(data)
        try:
            return str((await wire.head())[0])
        except (asyncio.IncompleteReadError, ConnectionError):
            return "closed"


# ------------------------------------------------------------------------------------------------------ huge


@attack(2)
async def huge_bodies(scene: Scene) -> str:
    bodies = huge()
    (path, name), make = scene.random.choice([*bodies.items()])
    return await ask(scene, post(path, scene.kept(f"{path} {name}", make)))


@attack(2)
async def huge_headers(scene: Scene) -> str:
    size = scene.random.choice((100_000, MB, 10 * MB))
    kinds: list[Callable[[], tuple[str, dict[str, object]]]] = [
        lambda: ("/health", {"X-Long": "a" * size}),
        lambda: ("/health", {f"X-{i}": "a" for i in range(size // 100)}),
        lambda: ("/health", {"Cookie": "a=b; " * (size // 5)}),
        lambda: ("/health?" + "a=b&" * (size // 4), {}),
        lambda: ("/" + "a/" * (size // 2), {}),
    ]
    path, headers = scene.random.choice(kinds)()
    return await ask(scene, head("GET", path, headers))


# ------------------------------------------------------------------------------------------------------ slow


@attack(2)
async def reads_slowly(scene: Scene) -> str:
    """A long answer, a byte a second, into a small buffer; or nothing of it at all."""
    body = scene.body(max_tokens=200, stream=scene.random.random() < 0.7, n=scene.random.choice((1, 4)), logprobs=20)
    patience = scene.random.choice((5, 20, 60))
    async with scene.wire(receive_buffer=2048) as wire:
        await wire.send(post(COMPLETIONS, body))
        try:
            for _ in range(patience):
                if scene.random.random() < 0.9:
                    await asyncio.wait_for(wire.reader.read(1), 30)
                await asyncio.sleep(1)
        except (asyncio.TimeoutError, ConnectionError):
            return "closed"
    return "left"


@attack()
async def writes_slowly(scene: Scene) -> str:
    """A head or a body, a byte a second."""
    data = post(COMPLETIONS, scene.body())
    start = scene.random.choice((5, data.index(b"\r\n\r\n") + 10))
    async with scene.wire() as wire:
        try:
            await wire.send(data[:start])
            for byte in data[start : start + scene.random.choice((5, 20, 40))]:
                await asyncio.sleep(1)
                await wire.send(bytes((byte,)))
        except ConnectionError:
            return "closed"
    return "left"


@attack()
async def keeps_connections(scene: Scene) -> str:
    """Many small requests over one connection, some at once, then silence."""
    async with scene.wire() as wire:
        for _ in range(scene.random.randrange(1, 30)):
            batch = scene.random.choice((1, 1, 10))
            await wire.send(head("GET", scene.random.choice(("/health", "/v1/models", "/version")), {}) * batch)
            for _ in range(batch):
                if (reply := await wire.reply()).status != 200:
                    return judged(reply)
        await asyncio.sleep(scene.random.random() * 5)
    return "200"


# ------------------------------------------------------------------------------------------------------ large


@attack(2)
async def costly_forms(scene: Scene) -> str:
    return await ask(scene, post(COMPLETIONS, {"prompt": "x", "max_tokens": 5, **scene.random.choice(forms())}))


@attack(3)
async def large_requests(scene: Scene) -> str:
    body = {**scene.random.choice(large(scene.random, scene.ids, scene.tokens)), "stream": scene.random.random() < 0.3}
    return await ask(scene, post(COMPLETIONS, body))
