"""Questions to the engine: answered, unanswered, given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from noria.frontend.questions import Questions
from noria.messages import AskPacer, Control, Explain, Explained, PacerLog


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_answer_finds_its_question() -> None:
    async def main() -> None:
        sent: list[Any] = []
        questions = Questions(sent.append)
        first = asyncio.ensure_future(questions.explain(5))
        second = asyncio.ensure_future(questions.pacer())
        await settle()
        assert sent == [Explain(1, 5)]  # one at a time
        questions.answered((Explained(ask=99, now=0.0), Explained(ask=1, now=2.0)))
        assert (await first) == Explained(ask=1, now=2.0)
        await settle()
        assert sent[1:] == [AskPacer(2)]
        questions.answered((PacerLog(2, 3.0, None),))
        assert (await second) == PacerLog(2, 3.0, None)

    asyncio.run(main())


def test_an_engine_that_took_long_is_left_alone_for_a_while() -> None:
    async def main() -> list[float]:
        sent: list[Any] = []
        rests: list[float] = []

        async def rest(seconds: float) -> None:
            rests.append(seconds)

        questions = Questions(sent.append, rest, lambda: 7.0)
        for number, seconds in enumerate((0.0, 0.02, 5.0, 0.0), 1):
            asked = asyncio.ensure_future(questions.explain(5))
            await settle()
            assert len(sent) == number
            questions.answered((Explained(ask=number, now=0.0, seconds=seconds),))
            assert await asked is not None
        return rests

    assert asyncio.run(main()) == pytest.approx([0.18, 0.9])  # five seconds may be a clock that jumped


def test_an_engine_that_does_not_answer() -> None:
    async def main() -> None:
        questions = Questions(lambda message: None)
        assert await questions.explain(5, timeout=0.01) is None
        asked = asyncio.ensure_future(questions.explain(6))
        await settle()
        questions.give_up()  # it is dead
        assert await asked is None
        questions.answered((Explained(ask=2, now=0.0),))  # too late

    asyncio.run(main())


def test_fresh_statistics() -> None:
    async def main() -> None:
        sent: list[Any] = []
        questions = Questions(sent.append)
        waiting = [asyncio.ensure_future(questions.fresh_stats(5.0)) for _ in range(3)]
        await settle()
        assert sent == [Control("stats")]  # once for all
        questions.told_stats()
        await asyncio.gather(*waiting)
        await questions.fresh_stats(0.01)
        assert len(sent) == 2

    asyncio.run(main())
