"""The learned predictor: what it picks on a machine that it knows."""

from __future__ import annotations

import pytest

from helpers.step_times import decode, mixed, taught, truth
from noria.pacer.base import Load, Objectives, Prediction, Sizes
from noria.pacer.learned import LearnedPredictor
from noria.pacer.steptime import StepTimeModel

MOST = Sizes(256, 512)


def load(waiting: int = 100, running: int = 64, prompt: float = 128.0, output: float = 128.0) -> Load:
    return Load(
        running=running,
        waiting=waiting,
        running_context=prompt + output / 2,
        waiting_prompt=prompt,
        mean_prompt=prompt,
        mean_output=output,
    )


def predict(
    given: Load, ttft: float | None = None, tpot: float | None = None, least: int = 1, most: Sizes = MOST
) -> Prediction:
    return LearnedPredictor(taught(600), Objectives(ttft, tpot)).predict(given, Sizes(64, 512), most, least)


def step(batch: int, prompt: float, output: float) -> float:
    """Mean seconds of a step while each row's place costs its successor's prompt."""
    context = int(prompt + output / 2)
    share = batch / output  # of the steps that compute a prompt, one each
    one = mixed(batch, 1, int(prompt), context)
    return (1 - share) * truth(decode(batch, context)) + share * truth(one)


def test_without_objectives_takes_what_costs_no_throughput() -> None:
    chosen = predict(load()).sizes
    assert chosen.batch >= 100

    def rate(batch: int) -> float:
        return batch / step(batch, 128, 128)

    assert rate(chosen.batch) >= 0.97 * rate(256)
    assert chosen.budget == 512


@pytest.mark.parametrize("output", [64.0, 128.0, 400.0])
@pytest.mark.parametrize("prompt", [64.0, 128.0, 400.0])
def test_keeps_within_the_objective_and_comes_near_it(prompt: float, output: float) -> None:
    chosen = predict(load(prompt=prompt, output=output), tpot=0.03).sizes
    assert 0.6 * 0.03 < step(chosen.batch, prompt, output) < 1.1 * 0.03


def test_a_looser_objective_allows_a_larger_batch() -> None:
    sizes = [predict(load(), tpot=tpot).sizes.batch for tpot in (0.008, 0.015, 0.03, 0.06)]
    assert sizes == sorted(set(sizes))


def test_longer_prompts_and_contexts_make_the_batch_smaller() -> None:
    sizes = [predict(load(prompt=prompt), tpot=0.03).sizes.batch for prompt in (16.0, 128.0, 512.0)]
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_percentile_further_out_makes_the_batch_smaller() -> None:
    model = taught(600, noise=0.1)

    def batch(percentile: float) -> int:
        predictor = LearnedPredictor(model, Objectives(None, 0.03, percentile))
        return predictor.predict(load(), MOST, MOST, 1).sizes.batch

    assert batch(99.0) <= batch(90.0) < batch(50.0)


def test_an_objective_that_cannot_be_kept_sacrifices_no_throughput() -> None:
    chosen = predict(load(), tpot=0.0001)
    assert chosen.sizes.batch >= 100
    assert "no size keeps" in chosen.reason


def test_the_budget_has_room_for_the_batch_and_a_prompt() -> None:
    for tpot in (None, 0.005, 0.02, 0.1):
        sizes = predict(load(), tpot=tpot).sizes
        assert sizes.batch < sizes.budget <= 512
    assert predict(load(), most=Sizes(256, 64)).sizes.budget <= 256


def test_keeps_within_what_may_be_set() -> None:
    assert predict(load(), tpot=0.001, least=8).sizes.batch >= 8
    assert predict(load(), most=Sizes(4, 64)).sizes.batch <= 4
    assert predict(load(), least=999, most=Sizes(4, 64)).sizes.batch == 4
    assert predict(load(), most=Sizes(1, 1)).sizes == Sizes(1, 1)


def test_answers_before_there_was_a_request() -> None:
    assert predict(Load()).sizes.batch >= 1


def test_says_what_a_step_will_take() -> None:
    chosen = predict(load(), tpot=0.03)
    assert chosen.step_seconds == pytest.approx(step(chosen.sizes.batch, 128, 128), rel=0.25)
    assert "TPOT" not in chosen.reason


def test_is_trusted_when_its_model_is() -> None:
    predictor = LearnedPredictor(StepTimeModel(), Objectives())
    assert not predictor.trusted
    assert predictor.error is None
    for _ in range(30):
        for shape in (decode(4), decode(40), mixed(4, 1, 100)):
            predictor.learn(shape, truth(shape))
    predictor.model.settle()
    assert predictor.trusted
    assert predictor.error is not None
    assert predictor.error < 0.1


@pytest.mark.parametrize("tpot", [None, 0.03])
def test_sizes_that_are_about_as_good_stay(tpot: float | None) -> None:
    """Otherwise the least change of the load would move them between sizes that do the same."""
    predictor = LearnedPredictor(taught(600), Objectives(None, tpot))
    now = predictor.predict(load(), MOST, MOST, 1).sizes
    for prompt in (120.0, 128.0, 122.0, 127.0):
        assert predictor.predict(load(prompt=prompt), now, MOST, 1).sizes == now
    near = Sizes(now.batch + 1 if tpot is None else now.batch - 1, now.budget)
    assert predictor.predict(load(), near, MOST, 1).sizes == near


def test_sizes_that_are_worse_do_not_stay() -> None:
    predictor = LearnedPredictor(taught(600), Objectives(None, 0.03))
    best = predictor.predict(load(), MOST, MOST, 1).sizes.batch
    assert best < MOST.batch  # that of the start keeps no objective
    assert predictor.predict(load(), Sizes(best // 2, 512), MOST, 1).sizes.batch > 0.9 * best
    assert predictor.predict(load(prompt=600.0), Sizes(best, 512), MOST, 1).sizes.batch < 0.8 * best


def test_a_batch_that_buys_nothing_does_not_stay() -> None:
    predictor = LearnedPredictor(taught(600), Objectives())
    assert predictor.predict(load(), MOST, MOST, 1).sizes.batch < 200
