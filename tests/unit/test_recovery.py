"""Which requests go to the next engine, and when."""

from __future__ import annotations

from itertools import count as count_from
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from noria.frontend.course import Passage
from noria.frontend.recovery import Recovery
from noria.frontend.stream import LiveRequest
from noria.messages import Abort, Submit
from noria.params import SamplingParams


class Engines:
    """Requests 1 … count, handed to one engine after the other; keeps what the one at hand was sent."""

    def __init__(self, count: int) -> None:
        self.live: dict[int, LiveRequest] = {}
        self.sent: list[Any] = []
        self.recovery = Recovery(self.live, self.sent.append, count_from(100).__next__)
        self.recovery.started()
        for one in range(1, count + 1):
            self.submit(one)

    def submit(self, one: int) -> None:
        prompt = np.asarray([5, one], "<i4").tobytes()
        submit = Submit(request_id=one, prompt_ids=prompt, params=SamplingParams(), group=one, arrival=float(one))
        stream: Any = SimpleNamespace(live={})
        detokenizer: Any = None
        self.live[one] = stream.live[one] = LiveRequest(submit, stream, 0, detokenizer, 2, 0.0, 0.0, Passage(0, 2, 0.0))
        self.recovery.submit(self.live[one])

    def of(self, group: int) -> LiveRequest:
        """A request by its first id."""
        return next(live for live in self.live.values() if live.submit.group == group)

    def gives(self, *groups: int) -> None:
        """A token to each."""
        for one in groups:
            assert self.of(one).in_engine
            self.of(one).received.append(100 + len(self.of(one).received))
        self.recovery.check()

    def leaves(self, group: int) -> None:
        """Its reader is gone."""
        del self.live[self.of(group).submit.request_id]
        self.recovery.check()

    def dies(self, most_running: int = 100) -> list[int]:
        """Returns the requests given up; they are forgotten."""
        lost = self.recovery.died(most_running)
        for live in lost:
            del self.live[live.submit.request_id]
        self.sent.clear()
        self.recovery.started()
        return [live.submit.group for live in lost]

    @property
    def submitted(self) -> list[int]:
        """First ids of what the engine at hand was given."""
        return [message.group for message in self.sent if isinstance(message, Submit)]


def test_what_had_tokens_goes_on_together_with_them() -> None:
    engines = Engines(2)
    engines.gives(1, 2)
    engines.gives(1)
    assert engines.dies() == []
    assert [np.frombuffer(message.received_ids, "<i4").tolist() for message in engines.sent] == [[100, 101], [100]]
    assert engines.submitted == [1, 2]


def test_suspects_are_tried_one_by_one_before_all_go_on() -> None:
    engines = Engines(4)
    engines.gives(1, 4)
    engines.dies()
    assert engines.submitted == [2]
    engines.submit(5)
    assert engines.submitted == [2]
    engines.gives(2)
    assert engines.sent[1:] == [Abort((2,)), engines.of(3).submit]
    engines.gives(3)
    assert engines.submitted == [2, 3, 1, 2, 4, 5]
    assert all(live.in_engine for live in engines.live.values())


def test_one_that_was_taken_back_has_another_id_so_that_late_outputs_of_it_are_lost() -> None:
    engines = Engines(3)
    engines.gives(3)
    engines.dies()
    engines.gives(1)
    assert 1 not in engines.live
    assert list(engines.of(1).stream.live) == [engines.of(1).submit.request_id] == [100]
    engines.leaves(2)
    assert engines.submitted == [1, 2, 1, 3]
    again = engines.sent[-2]
    assert (again.request_id, np.frombuffer(again.received_ids, "<i4").tolist()) == (100, [100])


def test_a_poisonous_request_ends_alone() -> None:
    engines = Engines(3)
    engines.gives(1, 3)
    lost: list[list[int]] = []
    for _ in range(3):  # the engine dies whenever it has request 2
        assert 2 in engines.submitted or not lost
        lost.append(engines.dies())
    assert lost == [[], [], [2]]
    assert engines.submitted == [1, 3]
    engines.gives(1, 3)


def test_one_that_is_alone_anyway_is_given_up_after_two_deaths() -> None:
    engines = Engines(1)
    assert engines.dies() == []
    assert engines.dies() == [1]


def test_a_token_clears_it() -> None:
    engines = Engines(1)
    for _ in range(5):
        assert engines.dies() == []
        engines.gives(1)


def test_those_that_waited_are_not_suspected() -> None:
    engines = Engines(6)
    engines.gives(6)
    engines.dies(most_running=3)
    assert engines.submitted == [1]
    engines.gives(1)
    engines.gives(2)
    assert engines.submitted == [1, 2, 1, 3, 4, 5, 6]


def test_those_that_seemed_to_wait_are_suspected_at_the_next_death() -> None:
    engines = Engines(3)
    engines.dies(most_running=1)
    engines.gives(1)
    assert engines.submitted == [1, 2, 3]
    engines.gives(1)
    assert engines.dies(most_running=1) == []  # of request 3, which ran before 2
    assert engines.submitted == [2]
    engines.gives(2)
    assert engines.submitted == [2, 3]
    assert engines.dies(most_running=1) == []
    assert engines.submitted == [3]
    assert engines.dies(most_running=1) == [3]
    assert engines.submitted == [1, 2]


def test_a_token_clears_one_that_waits_again() -> None:
    engines = Engines(3)
    engines.dies()
    assert engines.dies() == []  # of 1, or by chance
    assert engines.submitted == [2]
    engines.gives(2)
    engines.gives(3)
    engines.gives(1)
    engines.gives(1, 2, 3)
    assert engines.dies() == []
    assert engines.submitted == [1, 2, 3]
    assert engines.of(1).lonely_deaths == 0


def test_a_suspect_that_was_tried_in_vain_comes_last() -> None:
    engines = Engines(3)
    engines.dies()
    assert engines.submitted == [1]
    assert engines.dies() == []
    assert engines.submitted == [2]
    engines.gives(2)
    engines.gives(3)
    assert engines.submitted == [2, 3, 1]
    assert engines.dies() == [1]
    assert engines.submitted == [2, 3]


def test_a_suspect_whose_reader_leaves_holds_nobody_up() -> None:
    engines = Engines(3)
    engines.gives(3)
    engines.dies()
    assert engines.submitted == [1]
    engines.leaves(1)
    engines.leaves(2)
    assert engines.submitted == [1, 2, 3]


@pytest.mark.parametrize("received", [0, 3])
def test_prompt_logprobs_of_a_dead_engine_are_forgotten_before_the_first_token(received: int) -> None:
    engines = Engines(1)
    kept: Any = object()
    engines.live[1].received += range(received)
    engines.live[1].prompt_logprobs = kept
    engines.dies()
    assert (engines.live[1].prompt_logprobs is kept) == (received > 0)


def test_it_is_written_down_which_engines_had_a_request() -> None:
    engines = Engines(2)
    first, second = engines.of(1), engines.of(2)
    engines.recovery.died(8)
    engines.recovery.started()  # one suspect after the other
    assert [(stint.request_id, stint.died) for stint in first.passage.stints] == [(1, True), (1, False)]
    assert [(stint.request_id, stint.died) for stint in second.passage.stints] == [(2, True)]
    first.received.append(7)
    engines.recovery.check()  # it has a token, and makes room for the next suspect
    assert first.passage.stints[-1].left is not None
    assert not first.passage.stints[-1].died
    second.received.append(7)
    engines.recovery.check()
    assert [stint.request_id for stint in first.passage.stints] == [1, 1, 100]
    assert first.passage.stints[-1].left is None
