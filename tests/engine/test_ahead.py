"""What is ahead of a request, by policy: sums that are kept, against a look at all that wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.engine_driver import submit
from noria.engine.ahead import FairAhead, make_ahead
from noria.engine.request import Request, make_request

TENANTS = ("one", "two", "three")


def request(number: int, priority: int = 0, tenant: str = "", share: float = 1.0) -> Request:
    made = submit(number, [1, 2, 3], priority=priority, tenant=tenant, share=share)
    return make_request(made, number, 0.0, 64, 64)


requests = st.lists(
    st.tuples(st.integers(-3, 3), st.sampled_from(TENANTS), st.integers(1, 1000), st.booleans()), max_size=40
)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@given(those=requests, priority=st.integers(-3, 3), tenant=st.sampled_from(TENANTS))
def test_sums_are_those_of_the_waiting(
    policy: str, those: list[tuple[int, str, int, bool]], priority: int, tenant: str
) -> None:
    ahead, waiting = make_ahead(policy), []
    for number, (own, whose, tokens, leaves) in enumerate(those):
        one = request(number, own, whose)
        ahead.add(one, float(tokens))
        if leaves:
            ahead.discard(one)
        else:
            waiting.append((own, whose, tokens))
    assert ahead.all[:2] == (len(waiting), sum(tokens for *_, tokens in waiting))
    before = ahead.before(request(1000, priority, tenant))
    if policy == "fcfs":
        assert before == ahead.all
    elif policy == "priority":
        first = [tokens for own, _, tokens in waiting if own <= priority]
        assert before[:2] == (len(first), sum(first))
    else:
        own = [tokens for _, whose, tokens in waiting if whose == tenant]
        tenants = len({whose for _, whose, _ in waiting})
        assert before.requests == min(len(waiting), len(own) * tenants)
        assert before.tokens == pytest.approx(min(ahead.all.tokens, sum(own) * tenants))


def test_a_larger_share_lets_fewer_pass():
    ahead = FairAhead()
    for number in range(90):
        tenant, share = ("big", 2.0) if number < 30 else ("small", 1.0)
        ahead.add(request(number, tenant=tenant, share=share), 100.0)
    assert ahead.before(request(100, tenant="big", share=2.0)) == (45, 4500.0, True)
    assert ahead.before(request(100, tenant="small")) == (90, 9000.0, True)
    assert ahead.before(request(100, tenant="new")) == (0, 0.0, True)


def test_many_priorities_are_not_all_looked_at():
    ahead = make_ahead("priority")
    for number in range(1000):
        ahead.add(request(number, number), 1.0)
    assert ahead.before(request(2000, 2000)).requests == 64


def test_only_the_first_cannot_be_passed():
    ahead = make_ahead("priority")
    ahead.add(request(1, 3), 1.0)
    assert ahead.before(request(2, 3)).firm
    assert not ahead.before(request(2, 4)).firm
