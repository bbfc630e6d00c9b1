"""Random schedules: whatever comes and goes, each request's answer is the one it would get alone."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.engine_driver import Driver
from helpers.fake_executor import VOCAB, alone, score
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
        "num_blocks": draw(st.integers(3, 20)) if layout == "paged" else draw(st.integers(6, 30)),
        "depth": depth,
        "slots": draw(st.integers(1, 6)),
        "budget": draw(st.integers(1, 40)),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "continuous": draw(st.sampled_from([True, True, True, False])),
        "static_timeout": 0.0,
        "max_preemptions": draw(st.integers(0, 3)),
        "max_model_len": MAX_MODEL_LEN,
    }


@st.composite
def requests(draw):
    prompt = BASE[: draw(st.integers(0, 40))] + draw(st.lists(st.integers(0, 5), max_size=12))
    prompt = prompt or [1]
    scored = draw(st.sampled_from([None, None, None, 0, 2]))
    max_tokens = draw(st.integers(1 if scored is None else 0, 14))
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "prompt_logprobs": scored,
        "logprobs": draw(st.sampled_from([None, 1])),
        "stop_ids": tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=20))),
        "seed": draw(st.integers(0, 3)),
        "priority": draw(st.integers(0, 2)),
        "salt": draw(st.sampled_from(["", "", "other"])),
        "received": draw(st.integers(0, 5)),
        "choices": draw(st.sampled_from([1, 1, 1, 3])),
        "at": draw(st.integers(0, 12)),
        "abort_after": draw(st.sampled_from([None, None, None, 0, 1, 3, 8])),
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
            )
            entry = dict(one, id=request_id, choice=choice, params=params)
            entry["group"] = number + 1 if one["choices"] > 1 else 0
            yield entry


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds(), st.lists(requests(), min_size=1, max_size=9))
def test_neighbours_change_nothing(world, wanted):
    driver = Driver(**world)
    most = driver.core.info.max_model_len
    entries, aborted, tick = list(expand(wanted)), set(), 0
    expected = {}
    for entry in entries:
        answer = None
        if len(entry["prompt"]) + min(1, entry["max_tokens"]) <= most:
            output, reason = alone(entry["prompt"], entry["params"], entry["stop_ids"], entry["choice"], most)
            entry["received"] = output[: min(entry["received"], max(0, len(output) - 1))]
            answer = (output[len(entry["received"]) :], reason)
        else:
            entry["received"] = []
        expected[entry["id"]] = answer
    work = sum(len(entry["prompt"]) + entry["max_tokens"] for entry in entries)
    last = max(entry["at"] + (entry["abort_after"] or 0) for entry in entries)
    while tick <= last or driver.core.has_work:
        for entry in entries:
            if entry["at"] == tick:
                driver.submit(
                    entry["id"],
                    entry["prompt"],
                    **{name: entry[name] for name in ("received", "stop_ids", "priority", "salt", "choice", "group")},
                    **{
                        name: entry[name]
                        for name in ("max_tokens", "min_tokens", "prompt_logprobs", "logprobs", "seed")
                    },
                    arrival=float(tick),
                )
            ended = entry["id"] in driver.seen and driver.seen[entry["id"]].finished
            if entry["abort_after"] is not None and entry["at"] + entry["abort_after"] == tick and not ended:
                driver.abort(entry["id"])
                aborted.add(entry["id"])
        driver.step()
        tick += 1
        assert tick <= last + 10 + work * (world["max_preemptions"] + 2), "requests are starving"
    check_answers(driver, entries, expected, aborted)


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
            positions = range(1, len(entry["prompt"]))
            assert np.frombuffer(values.tokens, "<i4").tolist() == entry["prompt"][1:]
            wanted = np.array([score(entry["prompt"], position) for position in positions], np.float32)
            np.testing.assert_array_equal(np.frombuffer(values.chosen, "<f4"), wanted)
            assert len(np.frombuffer(values.top, "<f4")) == len(positions) * values.k
        else:
            assert not seen.prompt_logprobs
    stats = driver.core.stats
    assert (stats.running, stats.waiting, stats.held_blocks) == (0, 0, 0)
