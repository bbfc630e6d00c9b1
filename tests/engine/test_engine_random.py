"""Random schedules: whatever comes and goes, each request's answer is the one it would get alone."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.engine_driver import Driver
from helpers.fake_executor import VOCAB, alone, digests, score_of
from noria.pacer.base import Sizes
from noria.params import SamplingParams

BASE = [(7 * position + 3) % VOCAB for position in range(40)]
MAX_MODEL_LEN = 64


@st.composite
def worlds(draw):
    layout = draw(st.sampled_from(["paged", "paged", "paged", "contiguous"]))
    depth = draw(st.integers(1, 2))
    return {
        "cache": {
            "layout": layout,
            "prefix_caching": draw(st.booleans()),
            "reclaim_strategy": draw(st.sampled_from(["lru", "fifo", "random"])),
            "reclaim_ratio": draw(st.sampled_from([0.01, 0.1, 0.5, 1.0])),
        },
        "num_blocks": draw(st.integers(4, 12)) if layout == "paged" else draw(st.integers(6, 30)),
        "depth": depth,
        "slots": draw(st.integers(2, 6)),
        "budget": draw(st.sampled_from([1, 5, 8, 16, 30, 64, 200])),
        "policy": (policy := draw(st.sampled_from(["fcfs", "priority", "fair"]))),
        "continuous": policy == "fair" or draw(st.sampled_from([True, True, True, False])),
        "static_timeout": 0.0,
        "fusion": draw(st.booleans()),
        "prefetch": draw(st.booleans()),
        "max_preemptions": draw(st.integers(0, 3)),
        "max_model_len": MAX_MODEL_LEN,
        "sizes": draw(st.lists(st.tuples(st.integers(1, 7), st.sampled_from([1, 3, 6, 10, 64, 300])), max_size=6)),
    }


@st.composite
def requests(draw):
    # Few prefixes and suffixes, many at the edge of a block, so that sharing is the rule.
    prompt = BASE[: draw(st.sampled_from([0, 3, 8, 9, 15, 16, 17, 24, 32, 33]))] + [5] * draw(
        st.sampled_from([0, 0, 1, 2, 8])
    )
    prompt = prompt or [1]
    scored = draw(st.sampled_from([None, None, None, 0, 2]))
    max_tokens = draw(st.sampled_from([2, 1 if scored is None else 0, 9, 20, 30]))
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, draw(st.sampled_from([0, 0, 4]))),
        "prompt_logprobs": scored,
        "logprobs": draw(st.sampled_from([None, 1])),
        "stop_ids": tuple(range(draw(st.sampled_from([0, 0, 2, 8])))),
        "seed": draw(st.integers(0, 3)),
        "priority": draw(st.integers(0, 2)),
        "salt": draw(st.sampled_from(["", "", "other"])),
        "tenant": draw(st.sampled_from(["", "a", "b"])),
        "share": draw(st.sampled_from([1.0, 1.0, 0.01, 7.0])),
        "received": draw(st.sampled_from([0, 0, 0, 5])),
        "choices": draw(st.sampled_from([1, 1, 3])),
        "grammar": draw(st.sampled_from([None, None, "anything"])),
        "at": draw(st.integers(0, 6)),
        "abort_after": draw(st.sampled_from([None, None, None, None, 1, 2, 5])),
    }


def expand(wanted):
    """One entry per engine request: choices fanned out, tokens received in an earlier life filled in."""
    request_id = 0
    for number, one in enumerate(wanted):
        for choice in range(one["choices"]):
            request_id += 1
            params = SamplingParams(
                max_tokens=one["max_tokens"],
                min_tokens=one["min_tokens"],
                seed=one["seed"],
                prompt_logprobs=one["prompt_logprobs"],
                logprobs=one["logprobs"],
                # (With a grammar, an end token counts even before `min_tokens`.)
                grammar=None if one["min_tokens"] else one["grammar"],
            )
            entry = dict(one, id=request_id, choice=choice, params=params)
            entry["group"] = number + 1 if one["choices"] > 1 else 0
            yield entry


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds(), st.lists(requests(), min_size=2, max_size=10))
def test_neighbours_change_nothing(world, wanted):
    check_world(world, wanted)


@pytest.mark.parametrize("seed", range(60))
def test_crowded_worlds(seed):
    """The same where it is always tight: many alike requests, a cache for two or three of them."""
    random = Random(seed)
    depth = 1 + seed % 2
    world = {
        "cache": {
            "layout": "contiguous" if seed % 10 == 9 else "paged",
            "prefix_caching": random.random() < 0.7,
            "reclaim_strategy": random.choice(["lru", "fifo", "random"]),
            "reclaim_ratio": random.choice([0.01, 0.2, 1.0]),
        },
        "num_blocks": random.randint(8, 14),
        "depth": depth,
        "slots": random.randint(3, 8),
        "budget": random.choice([3, 9, 20, 40, 200]),
        "policy": (policy := random.choice(["fcfs", "priority", "fair"])),
        "continuous": policy == "fair" or random.random() < 0.85,
        "static_timeout": 0.0,
        "fusion": random.random() < 0.7,
        "prefetch": random.random() < 0.7,
        "max_preemptions": random.randint(0, 4),
        "max_model_len": MAX_MODEL_LEN,
        "sizes": [(random.randint(1, 9), random.choice([1, 4, 12, 30, 300])) for _ in range(random.choice([0, 1, 7]))],
    }
    check_world(world, [crowd_member(random) for _ in range(12)])


def crowd_member(random):
    scored = random.choice([None, None, None, 1])
    prompt = BASE[: random.choice([3, 8, 16, 17, 24, 31])] + [random.randrange(2)] * random.choice([0, 1, 8])
    return {
        "prompt": prompt,
        "max_tokens": random.choice([1, 4, 17, 30]),
        "min_tokens": random.choice([0, 0, 1]),
        "prompt_logprobs": scored,
        "logprobs": random.choice([None, 1]),
        "stop_ids": tuple(range(random.choice([0, 1, 3]))),
        "seed": random.randrange(3),
        "priority": random.randrange(3),
        "salt": random.choice(["", "", "", "other"]),
        "tenant": random.choice(["", "", "a", "b"]),
        "share": random.choice([1.0, 1.0, 0.01, 7.0]),
        "received": random.choice([0, 0, 0, 6]),
        "choices": random.choice([1, 1, 2, 4]),
        "grammar": random.choice([None, None, "anything"]),
        "at": random.randrange(8),
        "abort_after": random.choice([None, None, None, 1, 2, 4]),
    }


def check_world(world, wanted):
    sizes = [Sizes(*one) for one in world["sizes"]]
    driver = Driver(**{name: value for name, value in world.items() if name != "sizes"})
    most = driver.core.info.max_model_len
    entries, aborted, tick = list(expand(wanted)), set(), 0
    expected = {entry["id"]: resolve(entry, most) for entry in entries}
    last = max(entry["at"] + (entry["abort_after"] or 0) for entry in entries)
    work = sum(len(entry["prompt"]) + entry["max_tokens"] for entry in entries)
    while tick <= last or driver.core.has_work:
        for entry in entries:
            if entry["at"] == tick:
                submit(driver, entry)
            ended = entry["id"] in driver.seen and driver.seen[entry["id"]].finished
            if entry["abort_after"] is not None and entry["at"] + entry["abort_after"] == tick and not ended:
                driver.abort(entry["id"])
                aborted.add(entry["id"])
        if sizes:
            driver.core._scheduler.bind(sizes[tick % len(sizes)])
        step_within_sizes(driver)
        tick += 1
        assert tick <= last + 10 + work * (world["max_preemptions"] + 2), "requests are starving"
    check_answers(driver, entries, expected, aborted)


def step_within_sizes(driver):
    """A step, which admits none beyond the batch in force, and keeps the token budget."""
    scheduler, plans = driver.core._scheduler, driver.executor.plans
    running, planned, sizes = len(scheduler.running), len(plans), scheduler.sizes
    driver.step()
    for plan in plans[planned:]:
        assert plan.tokens <= sizes.budget
        assert len(plan.slots) <= max(running, sizes.batch)
        assert not plan.admitted or running <= sizes.batch


def resolve(entry, most):
    """What the request must answer, None if it must be refused; turns the number of received tokens into tokens."""
    if len(entry["prompt"]) + min(1, entry["max_tokens"]) > most:
        entry["received"] = []
        return None
    output, reason = alone(entry["prompt"], entry["params"], entry["stop_ids"], entry["choice"], most)
    entry["received"] = output[: min(entry["received"], max(0, len(output) - 1))]
    return output[len(entry["received"]) :], reason


def submit(driver, entry):
    own = ("received", "stop_ids", "priority", "salt", "choice", "group", "tenant", "share")
    params = ("max_tokens", "min_tokens", "prompt_logprobs", "logprobs", "seed")
    more = {name: entry[name] for name in own + params}
    driver.submit(entry["id"], entry["prompt"], arrival=float(entry["at"]), **more)


def check_answers(driver, entries, expected, aborted):
    for entry in entries:
        seen = driver.seen.get(entry["id"])
        if entry["id"] in aborted:
            assert seen is None or not seen.finished
            continue
        finished = driver.finish(entry["id"])
        if expected[entry["id"]] is None:
            assert finished.reason == "error"
            assert "no room" in finished.message
            continue
        tokens, reason = expected[entry["id"]]
        assert seen.tokens == tokens
        assert finished.reason == reason
        assert finished.stop_id == (tokens[-1] if reason == "stop" else None)
        assert finished.preemptions <= driver.core._scheduler._max_preemptions
        if entry["logprobs"] is not None:
            np.testing.assert_allclose(seen.logprobs, [-token / 10 for token in tokens], rtol=1e-6)
        if entry["prompt_logprobs"] is not None and not entry["received"]:
            (values,) = seen.prompt_logprobs
            prompt = entry["prompt"]
            assert np.frombuffer(values.tokens, "<i4").tolist() == prompt[1:]
            right = np.array([score_of(digest) for digest in digests(prompt)[1:]], np.float32)
            np.testing.assert_array_equal(np.frombuffer(values.chosen, "<f4"), right)
            assert len(np.frombuffer(values.top, "<f4")) == len(right) * values.k
        else:
            assert not seen.prompt_logprobs
    stats = driver.core.stats
    assert (stats.running, stats.waiting, stats.held_blocks) == (0, 0, 0)
