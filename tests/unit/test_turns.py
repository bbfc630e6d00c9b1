"""Work for callers, one after the other."""

from __future__ import annotations

import asyncio
import threading

import pytest

from noria.errors import RateLimitError
from noria.server.turns import Turns


def test_a_caller_has_few_places_and_takes_none_of_others() -> None:
    turns = Turns(most=2)
    with turns.place("one"), turns.place("one"):
        with pytest.raises(RateLimitError) as raised, turns.place("one"):
            pass
        assert raised.value.retry_after == 1.0
        with turns.place("two"):
            pass
    with turns.place("one"), turns.place("one"):
        pass


def test_a_place_is_given_back_whatever_happens() -> None:
    turns = Turns(most=1)
    for _ in range(3):
        with pytest.raises(KeyError), turns.place("one"):
            raise KeyError


def test_work_is_done_in_a_thread_one_after_the_other() -> None:
    turns, under_way, most, threads = Turns(), 0, 0, set[int]()
    lock = threading.Lock()

    def make() -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        threads.add(threading.get_ident())
        threading.Event().wait(0.002)
        with lock:
            under_way -= 1
        return 7

    async def all_of_it() -> list[int]:
        return await asyncio.gather(*(turns.work(make) for _ in range(8)))

    assert asyncio.run(all_of_it()) == [7] * 8
    assert most == 1
    assert threading.get_ident() not in threads
