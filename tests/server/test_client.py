"""The client of an engine, against a transport whose messages the test writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import EOS, ByteTokenizer, ReciterCore, logprobs_of

from noria.errors import EngineError, OverloadedError, QueueFullError, UnavailableError
from noria.frontend.client import EngineClient
from noria.frontend.detokenizer import Pieces
from noria.frontend.door import Door
from noria.frontend.stream import RequestStream
from noria.messages import Abort, Control, EngineInfo, EngineStats, Finished, LogProbs, Outlook, StepOutputs, Submit
from noria.params import SamplingParams


class Scripted:
    """A transport that keeps what is sent and yields what the test says."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.news: asyncio.Queue[StepOutputs | Exception] = asyncio.Queue()

    async def start(self) -> EngineInfo:
        return ReciterCore().info

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> StepOutputs:
        message = await self.news.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def close(self) -> None:
        pass

    def dump(self) -> None:
        self.sent.append("dump")

    def end(self) -> None:
        self.news.put_nowait(EngineError("the engine process died (killed by SIGKILL)"))

    @property
    def submitted(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    @property
    def aborted(self) -> list[int]:
        return [one for message in self.sent if isinstance(message, Abort) for one in message.request_ids]

    async def say(
        self,
        tokens: dict[int, Sequence[int]],
        *finished: Finished,
        logprobs: dict[int, LogProbs] | None = None,
        prompt_logprobs: dict[int, LogProbs] | None = None,
    ) -> None:
        """A step's outputs; returns when the client has taken them."""
        self.news.put_nowait(
            StepOutputs(
                step=1,
                request_ids=np.asarray(list(tokens), "<i8").tobytes(),
                counts=np.asarray([len(own) for own in tokens.values()], "<i4").tobytes(),
                tokens=np.asarray([token for own in tokens.values() for token in own], "<i4").tobytes(),
                finished=finished,
                logprobs=logprobs or {},
                prompt_logprobs=prompt_logprobs or {},
            )
        )
        for _ in range(5):
            await asyncio.sleep(0)


def run(test: Callable[[EngineClient, Scripted], Awaitable[None]], limit: int = 100) -> None:
    async def main() -> None:
        transport = Scripted()
        client = EngineClient(transport, Pieces(ByteTokenizer()), (EOS,), limit)
        await client.start()
        await test(client, transport)
        await client.close()
        assert client.unfinished == 0
        assert not client.requests

    asyncio.run(asyncio.wait_for(main(), 10))


def begin(client: EngineClient, **params: Any) -> tuple[RequestStream, int]:
    stream = client.submit([[1, 2, 3]], [SamplingParams(max_tokens=50, **params)])
    return stream, max(client.requests)


def test_tokens_behind_a_stop_string_in_one_step_are_dropped() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        stream, request = begin(client, stop=("cd",), logprobs=0)
        tokens = list(b"abcdef")
        await transport.say({request: tokens}, logprobs={request: logprobs_of(tokens, 0)})
        (answer,) = await stream.result()
        assert (answer.text, answer.token_ids) == ("ab", list(b"abcd"))
        assert answer.logprobs is not None
        assert answer.logprobs.tokens == list(b"abcd")
        assert answer.finish is not None
        assert (answer.finish.reason, answer.finish.stop_reason) == ("stop", "cd")
        assert transport.aborted == [request]
        await transport.say({request: [65]})  # already under way: ignored

    run(test)


def test_what_was_received_is_kept_with_the_prompt() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        stream, request = begin(client, stop=("never",))
        await transport.say({request: list(b"wat")})
        await transport.say({request: list(b"er n")})
        live = client.requests[request]
        assert bytes(live.received) == b"water n"
        assert np.frombuffer(live.submit.prompt_ids, "<i4").tolist() == [1, 2, 3]
        assert live.submit.params.seed is not None
        news = await anext(stream.__aiter__())
        assert [increment.text for increment in news] == ["water "]  # the n is withheld
        stream.close()
        assert transport.aborted == [request]

    run(test)


def test_a_slow_reader_gets_merged_increments() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        stream, request = begin(client, logprobs=1)
        for token in b"abc":
            await transport.say({request: [token]}, logprobs={request: logprobs_of([token], 1)})
        await transport.say({request: [EOS]}, Finished(request, "stop", EOS, cached_tokens=2))
        read = [increment async for news in stream for increment in news]
        assert len(read) == 1
        assert (read[0].text, read[0].token_ids) == ("abc", [*b"abc", EOS])
        assert read[0].logprobs is not None
        assert read[0].logprobs.top_ids == [[97], [98], [99]]
        assert read[0].finish is not None
        assert stream.cached_tokens == 2

    run(test)


def test_prompt_logprobs_of_several_steps_come_whole() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        stream, request = begin(client, prompt_logprobs=1)
        await transport.say({}, prompt_logprobs={request: logprobs_of([2], 1)})
        await transport.say({request: [97]}, prompt_logprobs={request: logprobs_of([3], 1)})
        (first,) = await anext(stream.__aiter__())
        assert first.prompt_logprobs is not None
        assert first.prompt_logprobs.tokens == [2, 3]
        await transport.say({request: [98]}, Finished(request, "length"))
        assert (await stream.result())[0].prompt_logprobs is None

    run(test)


def test_what_breaks_one_request_hurts_no_other() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        broken, first = begin(client)
        fine, second = begin(client)
        request: Any = client.requests[first]
        request.detokenizer = None
        await transport.say({first: [97], second: [98]})
        await transport.say({second: [99]}, Finished(second, "length"))
        (answer,) = await broken.result()
        assert answer.finish is not None
        assert answer.finish.reason == "error"
        assert transport.aborted == [first]
        assert (await fine.result())[0].text == "bc"

    run(test)


def test_the_bound_holds_and_seats_return() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        seats = client.reserve(3)
        with pytest.raises(QueueFullError) as raised:
            client.reserve(2)
        assert raised.value.retry_after
        stream = client.submit([[1], [2]], [SamplingParams(max_tokens=5)] * 2, seats=seats)
        assert client.unfinished == 3
        seats.release()
        assert client.unfinished == 2
        first, second = sorted(client.requests)
        await transport.say({first: [97]}, Finished(first, "length"))
        assert client.unfinished == 1
        client.reserve(3).release()
        stream.close()
        assert client.unfinished == 0
        assert transport.aborted == [second]

    run(test, limit=4)


def test_a_dead_engine_ends_every_request_once() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        streamed, first = begin(client)
        whole, _ = begin(client)
        await transport.say({first: [97]})
        transport.news.put_nowait(EngineError("the engine process died (killed by SIGKILL)"))
        iterator = streamed.__aiter__()
        assert (await anext(iterator))[0].text == "a"
        with pytest.raises(UnavailableError, match="SIGKILL"):
            await anext(iterator)
        with pytest.raises(UnavailableError):
            await whole.result()
        with pytest.raises(UnavailableError):
            client.reserve(1)
        assert client.unfinished == 0
        assert client.error is not None
        assert (await client.refresh_stats()).running == 0

    run(test)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.frontend.supervisor.PAUSES", (0.0,))


def run_replaceable(test: Callable[[EngineClient, list[Scripted]], Awaitable[None]]) -> None:
    """With a client that makes another transport when one dies; `engines` has them all."""

    async def main() -> None:
        engines = [Scripted()]

        def another() -> Scripted:
            engines.append(Scripted())
            return engines[-1]

        client = EngineClient(engines[0], Pieces(ByteTokenizer()), (EOS,), make_transport=another)
        await client.start()
        await test(client, engines)
        await client.close()
        assert client.unfinished == 0

    asyncio.run(asyncio.wait_for(main(), 10))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_stream_goes_on_over_the_death_of_its_engine(no_pauses: None) -> None:
    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        stream, request = begin(client, stop=("never",))
        await engines[0].say({request: list(b"water n")})
        engines[0].end()
        await until(lambda: len(engines) == 2 and len(engines[1].submitted) == 1)
        (again,) = engines[1].submitted
        assert np.frombuffer(again.received_ids, "<i4").tolist() == list(b"water n")
        assert (again.request_id, again.params) == (request, engines[0].submitted[0].params)
        await engines[1].say({request: list(b"ow")}, Finished(request, "length"))
        (answer,) = await stream.result()
        assert answer.text == "water now"
        assert answer.finish is not None
        assert answer.finish.reason == "length"
        assert client.metrics.restarts == 1
        assert "noria_engine_restarts_total" in client.metrics.render().decode()

    run_replaceable(test)


def test_a_request_that_an_engine_died_of_is_not_shed_by_the_next(no_pauses: None) -> None:
    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        stream = client.submit([[1, 2, 3]], [SamplingParams(max_tokens=50)], sheddable=True)
        assert engines[0].submitted[0].sheddable
        engines[0].end()
        await until(lambda: len(engines) == 2 and len(engines[1].submitted) == 1)
        assert not engines[1].submitted[0].sheddable
        stream.close()

    run_replaceable(test)


def test_what_a_dead_engine_said_of_its_queue_refuses_nobody(no_pauses: None) -> None:
    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        client.door.heard(Outlook(99.0, 1.0, 1.0), time.monotonic())
        with pytest.raises(OverloadedError):
            client.door.check(time.monotonic())
        engines[0].end()
        await until(lambda: len(engines) == 2 and client.ready)
        client.door.check(time.monotonic())

    run_replaceable(test)


def test_requests_wait_for_an_engine_that_starts(no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        go = asyncio.Event()

        async def start(self: Scripted) -> EngineInfo:
            await go.wait()
            return ReciterCore().info

        monkeypatch.setattr(Scripted, "start", start)
        assert client.ready
        engines[0].end()
        await until(lambda: len(engines) == 2)
        assert not client.ready
        assert client.error is None
        _, request = begin(client)
        left, _ = begin(client)
        left.close()
        assert engines[1].submitted == []
        go.set()
        await until(lambda: client.ready)
        assert [message.request_id for message in engines[1].submitted] == [request]

    run_replaceable(test)


def test_an_engine_that_cannot_be_started_again_ends_all(no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        async def start(self: Scripted) -> EngineInfo:
            raise EngineError("no memory")

        monkeypatch.setattr(Scripted, "start", start)
        stream, _ = begin(client)
        engines[0].end()
        with pytest.raises(UnavailableError, match=r"SIGKILL.*no memory"):
            await stream.result()
        assert client.error is not None
        assert not client.ready

    run_replaceable(test)


def test_a_request_that_kills_engines_ends_in_error_and_the_others_go_on(no_pauses: None) -> None:
    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        good, first = begin(client)
        bad, second = begin(client)
        await engines[0].say({first: [97]})
        for count in (2, 3, 4):
            engines[-1].end()
            await until(lambda count=count: len(engines) == count and bool(engines[-1].submitted))
        (answer,) = await bad.result()
        assert answer.finish is not None
        assert answer.finish.reason == "error"
        assert "more than once" in (answer.finish.message or "")
        assert [message.request_id for message in engines[3].submitted] == [first]
        assert [message.request_id for message in engines[1].submitted] == [second]
        await engines[3].say({first: [98]}, Finished(first, "length"))
        assert (await good.result())[0].text == "ab"

    run_replaceable(test)


def test_an_engine_without_progress_is_killed(no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.frontend.supervisor.FIRST_STALL_SECONDS", 0.05)
    monkeypatch.setattr("noria.frontend.supervisor.DUMP_SECONDS", 0.0)
    monkeypatch.setattr("noria.frontend.client.WATCH_SECONDS", 0.01)

    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        await asyncio.sleep(0.1)
        assert client.ready  # nothing to do is no stall
        stream, request = begin(client)
        await until(lambda: "dump" in engines[0].sent)
        monkeypatch.setattr("noria.frontend.supervisor.FIRST_STALL_SECONDS", 300.0)
        await until(lambda: len(engines) == 2 and len(engines[1].submitted) == 1)
        await engines[1].say({request: [97]}, Finished(request, "length"))
        assert (await stream.result())[0].text == "a"

    run_replaceable(test)


def test_an_engine_that_steps_without_a_token_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.frontend.supervisor.FIRST_STALL_SECONDS", 0.5)
    monkeypatch.setattr("noria.frontend.supervisor.STALL_SECONDS", 0.5)
    monkeypatch.setattr("noria.frontend.client.WATCH_SECONDS", 0.01)

    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        begin(client)
        for step in range(1, 70):
            asked = sum(isinstance(message, Control) for message in engines[0].sent)
            await until(lambda asked=asked: sum(isinstance(one, Control) for one in engines[0].sent) > asked)
            engines[0].news.put_nowait(StepOutputs(step=step, stats=EngineStats(running=1, steps_total=step)))
        assert len(engines) == 1

    run_replaceable(test)


def test_engines_that_die_one_after_the_other_are_given_up(no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.frontend.supervisor.MOST_BARREN_ENGINES", 3)

    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        streams = [begin(client)[0] for _ in range(5)]
        for count in (1, 2, 3, 4):
            await until(lambda count=count: len(engines) == count and bool(engines[-1].submitted))
            engines[-1].end()
        for stream in streams:
            with pytest.raises(UnavailableError, match="one after the other"):
                await stream.result()
        assert client.error is not None

    run_replaceable(test)


def test_counts_of_dead_engines_stay(no_pauses: None) -> None:
    async def test(client: EngineClient, engines: list[Scripted]) -> None:
        for engine, steps in ((0, 5), (1, 3)):
            stats = EngineStats(steps_total=steps, running=7, held_blocks=9)
            engines[engine].news.put_nowait(StepOutputs(step=steps, stats=stats))
            await until(lambda steps=steps: client.metrics.stats.steps_total == steps)
            engines[engine].end()
            await until(lambda: client.metrics.stats.running == client.metrics.stats.held_blocks == 0)
            await until(lambda engine=engine: len(engines) == engine + 2 and client.ready)
        assert client.metrics.total("steps_total") == 8

    run_replaceable(test)


def test_stop_ids_follow_ignore_eos() -> None:
    async def test(client: EngineClient, transport: Scripted) -> None:
        begin(client, stop_token_ids=(7,))
        begin(client, stop_token_ids=(7,), ignore_eos=True)
        sent = [message for message in transport.sent if isinstance(message, Submit)]
        assert [submit.stop_ids for submit in sent] == [(EOS, 7), (7,)]

    run(test)


def test_an_outlook_grows_brighter_as_time_passes() -> None:
    door = Door()
    door.check(0.0)
    door.heard(Outlook(3.0, 1.0, 0.9), 10.0)
    with pytest.raises(OverloadedError, match=r"in about 2.5 s, the objective is 1.0 s; try again in 2 s") as raised:
        door.check(10.5)
    assert raised.value.retry_after == pytest.approx(1.5)
    with pytest.raises(OverloadedError):
        door.check(12.05)
    door.check(12.2)
