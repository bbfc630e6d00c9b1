"""Policies: the order of requests, the waiting queue, and when admission is open."""

from __future__ import annotations

from array import array

from noria.config import SchedulerOptions
from noria.engine.policy import EVERYONE, Continuous, Kinds, Static, Turn, fcfs, make_admission, priority
from noria.engine.queue import WaitingQueue
from noria.engine.request import Request, State
from noria.params import SamplingParams


def request(order, arrival=0.0, importance=0):
    return Request(
        id=order,
        params=SamplingParams(),
        stop_ids=(),
        choice=0,
        group=0,
        priority=importance,
        salt="",
        arrival=arrival,
        tokens=array("i", [1]),
        prompt_length=1,
        limit=2,
        order=order,
        submitted=arrival,
        stops=frozenset(),
        wants_prompt_logprobs=False,
    )


def drain(queue):
    order = []
    while (first := queue.first()) is not None:
        queue.pop()
        first.state = State.RUNNING
        order.append(first.id)
    return order


def finish(queue, one):
    one.state = State.FINISHED
    queue.remove(one)


def test_first_come_first_served_goes_by_arrival_then_submission():
    requests = [request(1, 5.0), request(2, 3.0), request(3, 3.0)]
    assert [one.id for one in sorted(requests, key=fcfs)] == [2, 3, 1]


def test_priority_goes_before_arrival():
    requests = [request(1, 1.0, 2), request(2, 9.0, 0), request(3, 2.0, 2)]
    assert [one.id for one in sorted(requests, key=priority)] == [2, 1, 3]


def test_the_queue_yields_in_order_without_the_removed():
    queue = WaitingQueue(fcfs)
    requests = [request(number, float(-number)) for number in range(10)]
    for one in requests:
        queue.push(one)
    finish(queue, requests[9])
    finish(queue, requests[4])
    assert len(queue) == 8
    assert drain(queue) == [8, 7, 6, 5, 3, 2, 1, 0]
    assert len(queue) == 0


def test_removed_requests_do_not_pile_up_behind_a_stuck_first():
    queue = WaitingQueue(fcfs)
    queue.push(request(0, -1.0))
    for number in range(1, 5000):
        one = request(number)
        queue.push(one)
        finish(queue, one)
    assert len(queue._line) < 200
    assert drain(queue) == [0]


def test_parked_requests_come_back_in_order_when_enough_is_computed():
    queue = WaitingQueue(fcfs)
    requests = [request(number) for number in range(4)]
    for one in requests:
        queue.push(one)
    for tokens in (64, 32, 64):
        queue.park(99, tokens)
    assert (queue.parked, len(queue)) == (3, 4)
    assert queue.first() is requests[3]
    queue.wake(99, 40)
    assert queue.first() is requests[1]
    queue.wake(99, None)
    assert queue.parked == 0
    assert drain(queue) == [0, 1, 2, 3]


def test_a_parked_request_can_be_removed():
    queue = WaitingQueue(fcfs)
    one, other = request(1), request(2)
    for each in (one, other):
        queue.push(each)
        queue.park(7, 16)
    finish(queue, one)
    queue.wake(7, 16)
    assert drain(queue) == [2]
    assert not queue._parked


def test_continuous_admission_is_always_open():
    assert isinstance(make_admission(SchedulerOptions(), 4), Continuous)
    assert Continuous().quota(3, 5, 0.0, 100.0) == 5
    assert Continuous().delay(0, 5, 0.0, 100.0) == 0.0


def test_an_idle_engine_gathers_until_its_first_has_waited_or_there_are_enough():
    admission = make_admission(SchedulerOptions(build_interval=0.5), 4)
    assert (admission.quota(0, 3, 10.0, 10.2), admission.delay(0, 3, 10.0, 10.25)) == (0, 0.25)
    assert (admission.quota(0, 3, 10.0, 10.5), admission.delay(0, 3, 10.0, 10.5)) == (3, 0.0)
    assert (admission.quota(0, 4, 10.0, 10.2), admission.delay(0, 4, 10.0, 10.2)) == (4, 0.0)
    assert (admission.quota(1, 1, 10.0, 10.2), admission.delay(1, 1, 10.0, 10.2)) == (1, 0.0)


def taken(kinds, turn, possible):
    """The kind of step that comes about if only these can."""
    return next((one.kind for one in kinds.turns(turn) if one.kind in possible), None)


def test_kinds_take_turns_while_there_are_both():
    kinds = Kinds(fusion=False)
    both = [taken(kinds, EVERYONE, ("decode", "prefill")) for _ in range(4)]
    assert both == ["decode", "prefill", "decode", "prefill"]
    assert [taken(kinds, EVERYONE, ("prefill",)) for _ in range(3)] == ["prefill"] * 3
    assert taken(kinds, EVERYONE, ("decode", "prefill")) == "decode"
    assert [taken(kinds, EVERYONE, ("decode",)) for _ in range(3)] == ["decode"] * 3
    assert taken(kinds, EVERYONE, ("decode", "prefill")) == "prefill"
    assert taken(kinds, EVERYONE, ()) is None


def test_with_fusion_a_step_is_for_all_kinds():
    assert list(Kinds(fusion=True).turns(EVERYONE)) == [EVERYONE]
    some = Turn(bound=3.0)
    assert list(Kinds(fusion=True).turns(some)) == [some, EVERYONE]  # whose turn it is may not be able to use it
    turns = list(Kinds(fusion=False).turns(some))
    assert [(turn.kind, turn.all, turn.several > 0) for turn in turns[:2]] == [
        ("decode", False, False),  # admits nobody
        ("prefill", False, True),
    ]
    assert {(turn.kind, turn.all) for turn in turns[2:]} == {("decode", True), ("prefill", True)}


def test_a_static_batch_waits_until_it_is_full_or_the_timeout():
    static = Static(4, 2.0)
    assert static.quota(0, 3, 10.0, 11.0) == 0
    assert static.delay(0, 3, 10.0, 11.0) == 1.0
    assert static.quota(0, 4, 10.0, 11.0) == 4
    assert Static(4, 2.0).quota(0, 3, 10.0, 12.0) == 3


def test_a_static_batch_runs_until_its_last_request_has_ended():
    static = Static(2, 0.0)
    assert static.quota(0, 5, 0.0, 1.0) == 2
    static.admitted()
    static.admitted()
    assert static.quota(2, 3, 0.0, 1.0) == 0
    assert static.quota(1, 3, 0.0, 1.0) == 0
    static.preempted()
    assert static.quota(1, 4, 0.0, 1.0) == 1
    static.blocked()
    assert static.quota(1, 4, 0.0, 1.0) == 0
    assert static.quota(0, 4, 0.0, 1.0) == 2
