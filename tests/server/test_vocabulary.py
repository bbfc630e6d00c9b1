"""What tokens stand for reaches every engine that has a grammar to follow, also one that takes over in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from fakes import EOS, VOCAB, ByteTokenizer

from helpers.tiny_models import write_checkpoint
from noria.config import CacheOptions, DeviceOptions, EngineOptions, ModelOptions
from noria.files.resolve import resolve
from noria.frontend.client import EngineClient
from noria.frontend.detokenizer import Pieces
from noria.frontend.stream import Increment, RequestStream
from noria.frontend.tokenizer import load_tokenizer
from noria.frontend.transport import EngineTransport
from noria.frontend.vocabulary import VocabularyTeller
from noria.messages import Submit, Vocabulary
from noria.params import SamplingParams

GRAMMAR = llguidance.LLMatcher.grammar_from_regex("[a-z ]{150,160}")


def submit(request_id: int, grammar: str | None) -> Submit:
    return Submit(request_id=request_id, prompt_ids=b"", params=SamplingParams(grammar=grammar))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen in time")


def test_each_engine_is_told_once_and_only_if_it_needs_it() -> None:
    async def main() -> None:
        sent: list[Any] = []
        teller = VocabularyTeller(Pieces(ByteTokenizer()), (EOS,), sent.append)
        teller.send(submit(1, None))
        teller.send(submit(2, GRAMMAR))
        teller.send(submit(3, GRAMMAR))
        assert [one.request_id for one in sent] == [1, 2, 3]  # nobody waits here
        await until(lambda: len(sent) == 4)
        told = sent.pop()
        assert isinstance(told, Vocabulary)
        lengths = np.frombuffer(told.lengths, "<i4")
        assert len(lengths) == VOCAB - 1
        assert told.tokens.startswith(bytes(range(256)) + b"<bos><eos>")
        assert lengths.sum() == len(told.tokens)
        assert told.end_ids == (EOS,)
        assert told.special_ids == (256, 257, 258)
        teller.forget()
        teller.send(submit(4, None))
        teller.send(submit(5, GRAMMAR))
        teller.send(submit(6, GRAMMAR))
        assert sent[3:] == [submit(4, None), told, submit(5, GRAMMAR), submit(6, GRAMMAR)]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_engine_that_is_gone_when_it_is_ready_is_followed_by_one_that_is_told() -> None:
    async def main() -> None:
        sent: list[Any] = []
        teller = VocabularyTeller(Pieces(ByteTokenizer()), (EOS,), sent.append)
        teller.send(submit(1, GRAMMAR))
        teller.forget()
        teller.send(submit(1, GRAMMAR))
        await until(lambda: len(sent) == 3)
        await asyncio.sleep(0.05)
        assert [type(one) for one in sent] == [Submit, Submit, Vocabulary]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_requests_do_not_wait_forever_for_a_vocabulary_that_cannot_be_made() -> None:
    class Broken(Pieces):
        def vocabulary(self, end_ids: Sequence[int]) -> Vocabulary:
            raise ValueError("no such token")

    async def main() -> None:
        sent: list[Any] = []
        teller = VocabularyTeller(Broken(ByteTokenizer()), (EOS,), sent.append)
        teller.send(submit(1, GRAMMAR))
        await until(lambda: len(sent) == 2)
        assert sent[1].end_ids == ()  # of which the engine says that it does not go with grammars
        teller.forget()
        teller.send(submit(1, GRAMMAR))
        await until(lambda: len(sent) == 4)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_grammars_are_followed_over_the_death_of_an_engine(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    tokenizer = load_tokenizer(resolve(str(tmp_path)))
    options = EngineOptions(
        model=ModelOptions(model=str(tmp_path)), cache=CacheOptions(num_blocks=64), device=DeviceOptions(threads=1)
    )
    engines: list[EngineTransport] = []

    def engine() -> EngineTransport:
        engines.append(EngineTransport(options))
        return engines[-1]

    greedy = SamplingParams(temperature=0.0, max_tokens=200, seed=7, grammar=GRAMMAR)
    sampled = SamplingParams(temperature=1.0, frequency_penalty=0.8, max_tokens=200, seed=7, grammar=GRAMMAR)

    async def answer(stream: RequestStream, kill: bool) -> Increment:
        whole = Increment(0)
        async for increments in stream:
            for increment in increments:
                whole.merge(increment)
            if kill and len(whole.token_ids) >= 3:
                engines[-1].end()
                kill = False
        return whole

    async def main() -> None:
        client = EngineClient(engine(), Pieces(tokenizer), tokenizer.end_ids, make_transport=engine)
        await client.start()
        try:
            submitted = [client.submit([[5, 6, 7]], [params]) for params in (greedy, sampled)]
            expected = [await answer(stream, False) for stream in submitted]
            submitted = [client.submit([[5, 6, 7]], [params]) for params in (greedy, sampled)]
            found = await asyncio.gather(answer(submitted[0], False), answer(submitted[1], True))
            await until(lambda: len(engines) == 2)
            for one, other in zip(found, expected, strict=True):
                assert one.token_ids == other.token_ids
                assert one.text == other.text
                assert one.finish == other.finish
                assert 150 <= len(one.text) <= 160
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 60))
