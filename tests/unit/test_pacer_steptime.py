"""The model of step times: what it learns, what it does not take in, what it says of steps that have not run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.step_times import decode, mixed, shapes, taught, truth
from noria.pacer.base import StepShape
from noria.pacer.steptime import Fit, StepTimeModel

DATA = Path(__file__).parent.parent / "data"


def off(model: StepTimeModel, shape: StepShape, slow: float = 1.0) -> float:
    seconds = model.seconds(shape)
    assert seconds is not None
    return abs(seconds / truth(shape, slow) - 1.0)


def test_knows_nothing_at_first() -> None:
    model = StepTimeModel()
    assert model.seconds(decode(4)) is None
    assert model.error == math.inf
    assert not model.trusted
    assert model.steps == 0


def test_predicts_steps_within_ten_per_cent() -> None:
    model, random = taught(200), np.random.default_rng(1)
    errors = []
    for shape in shapes(random, 200):
        errors.append(off(model, shape))
        model.learn(shape, truth(shape) * random.lognormal(0.0, 0.03))
    assert np.median(errors) < 0.1
    assert model.error < 0.1
    assert model.trusted
    assert model.steps >= 200


def test_many_short_steps_are_learned_as_well() -> None:
    model = StepTimeModel()
    for _ in range(300):
        for shape in (decode(1), decode(2), mixed(1, 1, 128)):
            model.learn(shape, truth(shape))
    assert max(off(model, shape) for shape in (decode(1), decode(2), mixed(1, 1, 128))) < 0.1


def test_outliers_teach_little() -> None:
    model, random = taught(300), np.random.default_rng(2)
    for shape in shapes(random, 300):
        late = 20.0 if random.random() < 0.05 else 1.0
        model.learn(shape, late * truth(shape) * random.lognormal(0.0, 0.03))
    assert np.median([off(model, shape) for shape in shapes(random, 100)]) < 0.1
    assert model.trusted


def test_one_outlier_changes_a_prediction_by_a_few_per_cent() -> None:
    model = taught(300)
    model.settle()
    before = model.seconds(decode(40))
    assert before is not None
    model.learn(decode(40), 5.0)
    after = model.seconds(decode(40))
    assert after is not None
    assert abs(after / before - 1.0) < 0.1


@pytest.mark.parametrize(("slow", "steps"), [(3.0, 50), (0.4, 150)])
def test_a_lasting_change_of_level_is_followed(slow: float, steps: int) -> None:
    model, random = taught(400), np.random.default_rng(3)
    for shape in shapes(random, steps):
        model.learn(shape, truth(shape, slow) * random.lognormal(0.0, 0.03))
    assert np.median([off(model, shape, slow) for shape in shapes(random, 100)]) < 0.15


def test_decoding_for_long_does_not_forget_what_prefill_costs() -> None:
    model = taught(400, noise=0.0)
    wanted = [mixed(20, 1, 128), mixed(20, 2, 300)]
    for number in range(20_000):
        shape = decode(20 + number % 3)
        model.learn(shape, truth(shape))
    assert max(off(model, shape) for shape in wanted) < 0.2


def test_batches_never_seen_are_extrapolated_sanely() -> None:
    model, random = StepTimeModel(), np.random.default_rng(4)
    for number in range(300):
        shape = mixed(4, 1, 100) if number % 10 == 0 else decode(4 + number % 5)
        model.learn(shape, truth(shape) * random.lognormal(0.0, 0.03))
    for rows in (16, 32, 64, 128):
        assert off(model, decode(rows)) < 0.6


columns = st.tuples(
    st.integers(0, 1024), st.integers(0, 4096), st.integers(0, 64), st.integers(0, 4096), st.integers(0, 4096)
)


def shape_of(rows: int, context: int, prompts: int, tokens: int, before: int) -> StepShape:
    tokens = max(tokens, 2 * prompts) if prompts else 0
    return StepShape(rows, rows * context, prompts, tokens, tokens * before)


@settings(max_examples=50, deadline=None)
@given(
    seen=st.lists(st.tuples(columns, st.floats(1e-4, 10.0)), min_size=1, max_size=60),
    asked=columns,
    more=columns,
)
def test_a_larger_step_never_takes_less_whatever_was_learned(
    seen: list[tuple[tuple[int, ...], float]], asked: tuple[int, ...], more: tuple[int, ...]
) -> None:
    model = StepTimeModel()
    for given_columns, seconds in seen:
        model.learn(shape_of(*given_columns), seconds)
    model.learn(decode(1), 300.0)  # whatever is pending is taken in with this
    small = StepShape(*asked)
    large = StepShape(*(a + b for a, b in zip(asked, more, strict=True)))
    first, second = model.seconds(small), model.seconds(large)
    assert first is not None
    assert second is not None
    assert 0.0 < first <= second * (1 + 1e-9)
    assert math.isfinite(second)


def test_what_cannot_be_a_step_time_is_left_out() -> None:
    model = taught(100)
    model.settle()
    before, steps = model.seconds(decode(10)), model.steps
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e9):
        model.learn(decode(10), seconds)
    model.settle()
    assert (model.seconds(decode(10)), model.steps) == (before, steps)


def test_steps_that_are_all_alike_have_to_be_many() -> None:
    model, rng = StepTimeModel(), np.random.default_rng(4)
    full = StepShape(128, 128 * 200)
    for _ in range(200):
        model.learn(full, 0.03 * float(rng.normal(1.0, 0.02)))
    model.settle()
    assert not model.trusted
    for _ in range(100):
        model.learn(full, 0.03 * float(rng.normal(1.0, 0.02)))
    model.settle()
    assert model.trusted  # an engine that is full from its start has to come down to keep an objective
    smaller = model.seconds(StepShape(32, 32 * 200))
    assert smaller is not None
    assert 0.005 < smaller < 0.02


def test_not_trusted_while_errors_are_large() -> None:
    model, random = StepTimeModel(), np.random.default_rng(5)
    for shape in shapes(random, 500):
        model.learn(shape, truth(shape) * random.lognormal(0.0, 1.5))
    assert model.error > 0.4
    assert not model.trusted


def test_many_shapes_at_once_are_predicted_as_one_by_one() -> None:
    model = taught()
    asked = [decode(1), decode(100), mixed(3, 2, 200)]
    table = np.array(
        [[s.decode_rows, s.decode_context, s.prefill_rows, s.prefill_tokens, s.prefill_context] for s in asked]
    )
    np.testing.assert_allclose(model.predict(table.astype(float)), [model.seconds(shape) for shape in asked])


def test_margins_grow_with_the_percentile_and_shrink_with_the_steps_taken_together() -> None:
    model = taught(600, noise=0.1)
    assert model.margin(50.0) < model.margin(90.0) < model.margin(99.0)
    assert 1.05 < model.margin(90.0) < 1.4
    assert 1.0 < model.margin(90.0, 20.0) < model.margin(90.0)
    assert StepTimeModel().margin(90.0) == 1.0


def test_a_fit_is_taken_up_and_soon_follows_another_day() -> None:
    fit = taught().fit
    assert isinstance(fit, Fit)
    again, random = StepTimeModel(fit), np.random.default_rng(6)
    assert np.median([off(again, shape) for shape in shapes(random, 100)]) < 0.1
    assert not again.trusted  # it has yet to be seen whether it is right today
    for shape in shapes(random, 80):
        again.learn(shape, truth(shape, 2.5) * random.lognormal(0.0, 0.03))
    again.settle()
    assert np.median([off(again, shape, 2.5) for shape in shapes(random, 100)]) < 0.15
    assert again.trusted


@pytest.mark.parametrize(("name", "most"), [("w1", 0.13), ("w5", 0.1)])
def test_predicts_the_steps_of_a_real_run(name: str, most: float) -> None:
    """Steps of SmolLM2 on a machine that others used too: successive steps of one shape differ by 5 % in the median."""
    with np.load(DATA / f"steps_{name}.npz", allow_pickle=False) as stored:
        shapes, seconds = stored["shapes"].tolist(), (stored["micros"] / 1e6).tolist()
    model, errors = StepTimeModel(), []
    for columns, taken in zip(shapes, seconds, strict=True):
        predicted = model.seconds(StepShape(*columns)) or 0.0
        errors.append(abs(predicted / taken - 1.0))
        model.learn(StepShape(*columns), taken)
    assert np.median(errors[200:]) < most
    assert model.trusted


@pytest.mark.parametrize(
    "machine",
    [
        lambda shape: 0.004 + 2e-4 * shape.tokens,
        lambda shape: 4e-4 + 2e-5 * shape.tokens,
        lambda shape: 1e-3 * shape.tokens,
        lambda shape: 0.01,
        lambda shape: 0.002 + 1e-6 * shape.decode_context + 1e-5 * shape.prefill_tokens,
    ],
)
def test_machines_unlike_the_profile_are_learned_for_good(machine) -> None:
    """What the level takes over from a mood that never ends must not take it away from what shapes cost."""
    model = StepTimeModel()
    for number, shape in enumerate(shapes(np.random.default_rng(0), 4000)):
        model.learn(shape, machine(shape))
        if number > 500 and number % 500 == 0:
            assert model.error < 0.2
            assert model.trusted


@pytest.mark.parametrize("seed", range(20))
def test_times_that_nothing_fits_leave_a_model_that_can_go_on(seed: int) -> None:
    random = np.random.default_rng(seed)
    model = StepTimeModel()
    wild = (lambda: 2e-6, lambda: 3599.0, lambda: random.choice([2e-6, 3599.0]), lambda: 10 ** random.uniform(-5, 3))
    for shape in shapes(random, 300):
        model.learn(shape, float(wild[seed % 4]()))
        seconds = model.seconds(shape)
        assert seconds is None or 0.0 < seconds < math.inf
    for shape in shapes(random, 3000):
        model.learn(shape, truth(shape))
    assert np.median([off(model, shape) for shape in shapes(random, 50)]) < 0.7


@pytest.mark.parametrize("theta", [[0.0] * 8, [0.0] * 7 + [1e4], [1e4] * 8])
@pytest.mark.parametrize("information", [0.0, 1.0, 1e15])
def test_what_was_stored_may_be_absurd(theta: list[float], information: float) -> None:
    model = StepTimeModel(Fit(theta, (information * np.eye(8)).tolist(), 49.0, [9] * 17, 100))
    for shape in shapes(np.random.default_rng(1), 300):
        model.learn(shape, truth(shape))
        seconds = model.seconds(shape)
        assert seconds is None or 0.0 < seconds < math.inf
    assert math.isfinite(sum(model.fit.theta))
