"""Predictions of latency, and the gate that holds them against objectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import PacerOptions
from noria.pacer.base import Objectives, Sizes, StepShape
from noria.pacer.gate import Gate, Measured, Quantile
from noria.pacer.outlook import (
    LATEST,
    SOONEST,
    Scene,
    Speed,
    first_token_seconds,
    further_token_seconds,
    late_first_token,
    late_further_tokens,
    speed_of,
    wait_seconds,
)
from noria.pacer.start import make_gate

SIZES = Sizes(32, 512)
SPEED = Speed(0.004, 0.0005, 0.0002)
seconds = st.floats(0.0, 0.1, allow_nan=False)
speeds = st.builds(Speed, seconds, seconds, seconds)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    batch = draw(st.integers(1, 256))
    return Scene(
        running=draw(st.integers(0, batch)),
        ahead=draw(st.integers(0, 10_000)),
        tokens=draw(st.floats(0.0, 1e6)),
        batch=batch,
        budget=draw(st.integers(batch, 4096)),
        under_way=draw(st.integers(0, 2)),
        output=draw(st.none() | st.floats(1.0, 4000.0)),
        prompt=draw(st.floats(0.0, 4000.0)),
    )


@given(scenes(), speeds, st.integers(1, 4096), st.integers(1, 100), st.floats(0.0, 1e5), st.floats(0.5, 4.0))
def test_more_ahead_or_a_longer_prompt_never_comes_sooner(
    scene: Scene, speed: Speed, prompt: int, more: int, tokens: float, stretch: float
) -> None:
    now = first_token_seconds(scene, speed, prompt, stretch)
    slack = 1.0 - 1e-9  # of floats
    longer = replace(scene, ahead=scene.ahead + more, tokens=scene.tokens + tokens)
    assert first_token_seconds(longer, speed, prompt, stretch) >= now * slack
    assert further_token_seconds(longer, speed) >= further_token_seconds(scene, speed) * slack
    assert first_token_seconds(scene, speed, prompt + more, stretch) >= now * slack
    busier = replace(scene, running=min(scene.batch, scene.running + more))
    assert first_token_seconds(busier, speed, prompt, stretch) >= now * slack
    assert now == first_token_seconds(scene, speed, prompt, stretch)


def test_a_free_engine_computes_the_prompt_in_steps_of_the_budget() -> None:
    scene = Scene(0, 0, 0.0, 32, 512)
    assert first_token_seconds(scene, SPEED, 1.0) == pytest.approx(0.0045 + 0.0002)
    assert first_token_seconds(scene, SPEED, 1022.0) == pytest.approx(2 * 0.0045 + 1022 * 0.0002)
    assert further_token_seconds(scene, SPEED) == pytest.approx(0.0045)


def test_the_prompts_ahead_are_computed_first() -> None:
    scene = Scene(running=3, ahead=4, tokens=5040.0, batch=32, budget=512)
    assert wait_seconds(scene, SPEED) == pytest.approx(5040 * 0.0002 + 10 * SPEED.step(8))


def test_places_come_free_as_answers_end() -> None:
    scene = Scene(running=32, ahead=7, tokens=0.0, batch=32, budget=512, output=64.0)
    each = 0.004 + 32 * 0.0005
    assert wait_seconds(scene, SPEED) == pytest.approx(8 * 64 * each / 32)
    prompts = replace(scene, prompt=320.0)  # of those that come into their places
    assert wait_seconds(prompts, SPEED) == pytest.approx(8 * 64 * (each + 5 * 32 * SPEED.token) / 32)
    assert wait_seconds(replace(scene, output=None), SPEED) == 0.0  # in doubt, sooner


def test_a_model_is_taken_as_a_straight_line() -> None:
    def model(shape: StepShape) -> float:
        return 0.004 + 0.0005 * shape.decode_rows + 0.0002 * shape.prefill_tokens

    made = speed_of(model, SIZES, 100.0)
    assert made is not None
    assert (made.base, made.row, made.token) == pytest.approx((0.004, 0.0005, 0.0002))
    assert speed_of(lambda _: None, SIZES, 100.0) is None
    falling = speed_of(lambda shape: 1.0 / (1 + shape.tokens), SIZES, 0.0)
    assert falling is not None
    assert min(falling.base, falling.row, falling.token) >= 0.0


def test_step_times_are_measured() -> None:
    measured = Measured()
    assert measured.speed() is None
    for number in range(40):
        rows, tokens = number % 9 + 1, 100 * (number % 2)
        measured.learn(StepShape(rows, 0, 1 if tokens else 0, tokens), 0.004 + 0.0005 * rows + 0.0002 * tokens)
    made = measured.speed()
    assert made is not None
    assert (made.base, made.row, made.token) == pytest.approx((0.004, 0.0005, 0.0002), rel=1e-3)


@pytest.mark.parametrize("rows", [(8, 8, 8), (4, 5, 6)])
def test_measured_steps_are_never_negative(rows: tuple[int, ...]) -> None:
    measured = Measured()
    for number in range(60):
        measured.learn(StepShape(rows[number % 3]), 0.001 * (number % 3))
        measured.learn(StepShape(1, 0, 1, 10), 1e-6)
    made = measured.speed()
    assert made is not None
    assert min(made.base, made.row, made.token) >= 0.0


def test_a_quantile_is_followed() -> None:
    quantile = Quantile(0.9)
    for number in range(5000):
        quantile.see(0.5 + (number * 7919 % 1000) / 1000)  # evenly from 0.5 to 1.5
    assert quantile.value == pytest.approx(1.4, abs=0.1)
    for _ in range(1000):
        quantile.see(1e9)
    assert quantile.value == 4.0


@pytest.mark.parametrize(("predicted", "seconds"), [(1.1, SOONEST), (3.2, 2.2), (1e6, LATEST)])
def test_a_refusal_says_what_was_predicted_and_when_to_come_again(predicted: float, seconds: float) -> None:
    miss = late_first_token(predicted, 1.0)
    assert miss.retry_after == pytest.approx(seconds)
    assert f"in about {predicted:.1f} s, the objective is 1.0 s; try again in" in miss.message


def test_a_refusal_for_slow_tokens_is_in_milliseconds() -> None:
    miss = late_further_tokens(0.0424, 0.03, Scene(32, 0, 0.0, 32, 512, output=500.0))
    assert miss.message.startswith("each further token would take about 42 ms, the objective is 30 ms; try again in")
    assert miss.retry_after == SOONEST


# ------------------------------------------------------------------------------------------------------------ the gate


def gate(ttft: float | None = 1.0, tpot: float | None = None) -> Gate:
    return Gate(Objectives(ttft, tpot))


def scene(ahead: int, running: int = 32) -> Scene:
    return Scene(running=running, ahead=ahead, tokens=0.0, batch=32, budget=512, output=64.0)


def refused(gate: Gate, ahead: int) -> bool:
    return gate.refuses(scene(ahead), SPEED, 100.0, 0.0) is not None


def test_while_nothing_is_known_everything_is_taken() -> None:
    assert gate().refuses(scene(10_000), None, 4000.0, 0.5) is None
    assert gate().full(scene(10_000), None, 0.5) is None
    assert gate().speed(SIZES, lambda: 0.0, 0.0) is None


def test_an_idle_engine_takes_whatever_comes() -> None:
    assert gate(1e-6, 1e-6).refuses(scene(0, running=0), SPEED, 1e6, 0.0) is None


def test_what_was_waited_before_counts() -> None:
    assert gate().refuses(scene(0), SPEED, 100.0, 0.5) is None
    assert gate().refuses(scene(0), SPEED, 100.0, 0.99) is not None


def test_the_gate_does_not_flap_at_the_limit() -> None:
    one = gate()
    limit = next(ahead for ahead in range(100) if refused(gate(), ahead))
    decisions = [refused(one, limit - number % 2) for number in range(50)]  # the load is just at the limit
    assert all(decisions)
    assert not refused(one, limit * 3 // 4)
    assert not refused(one, limit - 1)


def test_the_queue_alone_decides_only_what_every_prompt_would_miss() -> None:
    one = gate()
    for ahead in range(60):
        if one.full(scene(ahead), SPEED, 0.0) is not None:
            assert refused(gate(), ahead)


def test_slow_tokens_are_refused() -> None:
    assert gate(None, 0.0199).refuses(scene(0), SPEED, 1.0, 0.0) is not None
    assert gate(None, 0.0201).refuses(scene(0), SPEED, 1.0, 0.0) is None


def test_one_that_has_waited_is_lost_once_it_cannot_make_it() -> None:
    one = gate()
    rest = first_token_seconds(scene(0), SPEED, 100.0)
    assert one.lost(scene(0), SPEED, 100.0, 0.99 - rest) is None
    miss = one.lost(scene(0), SPEED, 100.0, 1.01 - rest)
    assert miss is not None
    assert miss.predicted == pytest.approx(1.01)
    assert one.lost(scene(0, running=0), SPEED, 100.0, 5.0) is None  # nothing holds it up any more
    assert gate(None, 1.0).lost(scene(0), SPEED, 100.0, 1e9) is None


def test_first_tokens_that_take_longer_than_thought_are_allowed_for() -> None:
    one = gate()
    least = next(ahead for ahead in range(100) if refused(gate(), ahead))
    for _ in range(50):
        one.first_token(0.5, 1.0)
    assert refused(one, least * 2 // 3)
    short = gate()
    for _ in range(50):
        short.first_token(0.01, 1.0)  # short waits say nothing
    assert not refused(short, least * 2 // 3)


def test_prompts_that_others_have_computed_are_not_counted() -> None:
    one = gate()
    assert one.computed == 1.0
    for _ in range(50):
        one.started(100.0, 25.0)
    assert one.computed == pytest.approx(0.25)


def test_options_make_a_gate() -> None:
    assert make_gate(PacerOptions(slo_ttft_ms=100.0), None) is None
    made = make_gate(PacerOptions(admission="slo", slo_ttft_ms=250.0, slo_percentile=95.0), None)
    assert made is not None
    assert made.objectives == Objectives(0.25, None, 95.0)


def test_tokens_that_take_longer_than_thought_are_allowed_for() -> None:
    one = gate(None, 0.025)
    assert one.refuses(scene(0), SPEED, 1.0, 0.0) is None
    for _ in range(50):
        one.ended(60, 0.02, 0.03)
    assert one.output == pytest.approx(60.0)
    assert one.refuses(scene(0), SPEED, 1.0, 0.0) is not None


def test_the_way_of_a_request_is_counted_up_to_the_length_of_a_step() -> None:
    one = Gate(Objectives(1.0), wall=lambda: 100.0)
    assert one.delivery(99.9) == 0.0  # no step has run
    one.stepped(StepShape(1), 0.25)
    assert one.delivery(99.9) == pytest.approx(0.1)
    assert one.delivery(0.0) == 0.25
    assert one.delivery(200.0) == 0.0  # clocks are set back at times


def test_new_prompts_take_the_places_of_answers() -> None:
    """Each answer of 64 tokens makes place for a prompt of 320: five tokens of prompts a step for each of 32."""
    busy = Scene(running=32, ahead=1, tokens=0.0, batch=32, budget=512, output=64.0, prompt=320.0)
    assert further_token_seconds(busy, SPEED) == pytest.approx(SPEED.step(32) + 5 * 32 * SPEED.token)
    assert further_token_seconds(replace(busy, output=None), SPEED) == pytest.approx(SPEED.step(32))
