"""Offline use, with a tiny random model and the real engine."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher

import noria
from helpers.tiny_models import write_checkpoint
from noria import LLM, SamplingParams
from noria.errors import ConfigError, EngineError, InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["water", "the wheel turns", "a longer prompt about a river and its mill " * 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint("llama", Path(folder))
    return str(folder)


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, num_blocks=200, max_num_seqs=8, threads=1) as made:
        yield made


def test_answers_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [answer.prompt for answer in together] == PROMPTS
    for prompt, answer in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, progress=False)
        assert alone.outputs == answer.outputs
        assert len(answer.outputs[0].token_ids) == 12
        assert answer.outputs[0].finish_reason == "length"
        assert answer.text == answer.outputs[0].text == llm.tokenizer.decode(answer.outputs[0].token_ids, True)
        assert llm.generate([answer.prompt_token_ids], GREEDY, progress=False)[0].outputs == answer.outputs


def test_the_package_offers_it_without_importing_it() -> None:
    assert noria.LLM is LLM


def test_many_more_prompts_than_seats(llm: LLM) -> None:
    answers = llm.generate(["water"] * 40, GREEDY, progress=True)
    assert len({answer.text for answer in answers}) == 1


def test_choices_and_parameters_per_prompt(llm: LLM) -> None:
    sampled = SamplingParams(n=3, seed=5, max_tokens=8, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    one, other = llm.generate(["water", "wheel"], [sampled, GREEDY], progress=False)
    assert [choice.index for choice in one.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in one.outputs}) > 1
    assert all(choice.logprobs is not None for choice in one.outputs)
    assert one.prompt_logprobs is not None
    assert one.prompt_logprobs.tokens == one.prompt_token_ids[1:]
    assert len(other.outputs) == 1
    (again,) = llm.generate("water", sampled, progress=False)
    assert again.outputs == one.outputs


def test_outputs_bound_to_grammars(llm: LLM) -> None:
    words = SamplingParams(temperature=1, seed=5, n=2, max_tokens=40, grammar=LLMatcher.grammar_from_regex("[ab]{5,9}"))
    free = SamplingParams(temperature=1, seed=5, max_tokens=12)
    bound, other = llm.generate(["water", "wheel"], [words, free], progress=False)
    for choice in bound.outputs:
        assert choice.finish_reason == "stop"
        assert re.fullmatch("[ab]{5,9}", choice.text)
    assert bound.outputs[0].text != bound.outputs[1].text
    assert llm.generate("wheel", free, progress=False)[0].outputs == other.outputs
    with pytest.raises(InvalidRequestError, match="grammar"):
        llm.generate("water", SamplingParams(max_tokens=4, grammar="%bad"), progress=False)


def test_defaults_are_sixteen_tokens(llm: LLM) -> None:
    assert len(llm.generate("water", progress=False)[0].outputs[0].token_ids) <= 16


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, GREEDY, progress=False)
    two = llm.chat([conversation, conversation], GREEDY, progress=False)
    assert [answer.outputs for answer in two] == [one.outputs] * 2
    assert "user: hello\nassistant: " in llm.tokenizer.decode(one.prompt_token_ids, True)
    assert llm.generate([one.prompt_token_ids], GREEDY, progress=False)[0].outputs == one.outputs


def test_stream(llm: LLM) -> None:
    whole = llm.generate("water", GREEDY, progress=False)[0].outputs[0]
    increments = list(llm.stream("water", GREEDY))
    assert [token for increment in increments for token in increment.token_ids] == whole.token_ids
    assert "".join(increment.text for increment in increments) == whole.text


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    stream = llm.stream("water", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("wheel", GREEDY, progress=False)
    assert llm._client.unfinished == 0


def test_refusals(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="512"):
        llm.generate(["fine", "x" * 600], GREEDY, progress=False)
    with pytest.raises(InvalidRequestError, match="2 for 1 prompts"):
        llm.generate("water", [GREEDY, GREEDY], progress=False)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[100_000]], GREEDY, progress=False)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        list(llm.stream([100_000], GREEDY))
    assert llm.generate([], GREEDY, progress=False) == []
    assert llm._client.unfinished == 0


def test_bad_settings_are_refused_before_anything_is_loaded(tiny: str) -> None:
    with pytest.raises(ConfigError, match="did you mean num_blocks"):
        LLM(tiny, num_block=3)
    with pytest.raises(noria.errors.PullError):
        LLM("/nowhere/at/all")


def test_admission_is_for_servers() -> None:
    with pytest.raises(ConfigError, match="--admission"):
        LLM("smollm2", admission="slo", slo_ttft_ms=500)


def test_closing_ends_all_threads(tiny: str) -> None:
    before = set(threading.enumerate())
    made = LLM(tiny, num_blocks=50, threads=1)
    made.generate("water", GREEDY, progress=False)
    assert set(threading.enumerate()) > before
    made.close()
    made.close()
    llm_threads = set(threading.enumerate()) - before
    left = [thread.name for thread in llm_threads if thread.name.startswith("noria")]
    assert not left
    with pytest.raises(EngineError):
        made.generate("water", GREEDY, progress=False)


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)"])
def test_a_process_ends_quietly_without_close(tiny: str, end: str) -> None:
    script = f"""
from noria import LLM, SamplingParams
llm = LLM({tiny!r}, num_blocks=50, threads=1)
llm.generate("water", SamplingParams(max_tokens=2), progress=False)
{end}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0 if end == "pass" else 3, "")
