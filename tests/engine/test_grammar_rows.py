"""Requests bound to grammars, in the real engine: the output matches, is exactly the same whatever else runs, and a
grammar that fails ends its own request only."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest

from helpers.engine_runs import Answer, Ask, drive, options, run
from helpers.tiny_models import write_checkpoint
from helpers.tiny_vocabulary import END, ENDS, START, TOKENS, text_of, vocabulary
from noria.engine.core import EngineCore
from noria.errors import BackendError, GrammarError
from noria.executor.local import LocalExecutor
from noria.messages import Abort, Submit
from noria.params import SamplingParams
from noria.plan import Admission
from noria.worker import grammar as worker_grammar
from noria.worker.grammar import Grammars, Matchers

VOCAB = 317
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["aa", "ab", "abc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


def regex(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


WORDS = regex("(ab|abc|aa){8,12}")
SUBJECTS = (
    SamplingParams(temperature=0.0, max_tokens=60, seed=0, grammar=JSON),
    SamplingParams(temperature=1.0, max_tokens=60, seed=11, logprobs=2, grammar=JSON),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_tokens=60, seed=2**63 + 5, grammar=WORDS),
    SamplingParams(
        temperature=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias={97: 2.0, 256 + 7: -100.0},
        max_tokens=60,
        min_tokens=4,
        logprobs=1,
        seed=5,
        grammar=JSON,
    ),
    SamplingParams(temperature=1.3, min_p=0.05, max_tokens=20, seed=4, grammar=regex("[a-z ]+")),
    SamplingParams(temperature=0.8, max_tokens=24, logprobs=2, seed=9, allowed_token_ids=(97, 98, 99, 150)),
    SamplingParams(temperature=0.0, max_tokens=24, min_tokens=20, seed=0, allowed_token_ids=(31, 32, END)),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_checkpoint("llama", Path(folder))
    return str(folder)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length))


def ask(number: int, params: SamplingParams, **more: Any) -> Ask:
    return Ask(prompt(100 + number, 37 + 20 * number), params, stop_ids=ENDS, **more)


def subjects(at_step: int = 0) -> list[Ask]:
    return [ask(i, params, at_step=at_step) for i, params in enumerate(SUBJECTS)]


def neighbours(count: int) -> list[Ask]:
    """Of various lengths, some bound to grammars, some of those in error."""
    rng = np.random.default_rng(1)
    grammars = (None, JSON, WORDS, "%bad")
    return [
        Ask(
            prompt(1000 + i, int(rng.integers(1, 150))),
            SamplingParams(
                temperature=float(i % 2), max_tokens=int(rng.integers(1, 40)), seed=i, grammar=grammars[i % 4]
            ),
            at_step=int(rng.integers(0, 30)),
            stop_ids=ENDS,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def expected(tiny: str) -> list[Answer]:
    """Each subject on its own, one after the other, in an engine without a prefix cache."""
    chosen = options(tiny, cache={"prefix_caching": False})
    executor = LocalExecutor(chosen)
    try:
        core = EngineCore(executor, chosen.cache, chosen.scheduler)
        core.handle(vocabulary())
        return [drive(core, [one])[0][0] for one in subjects()]
    finally:
        executor.close()


def same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for index, (one, other) in enumerate(zip(found[: len(expected)], expected, strict=True)):
        assert one.tokens == other.tokens, f"tokens of subject {index}"
        assert one.reason == other.reason
        assert (one.chosen, one.top_ids, one.top) == (other.chosen, other.top_ids, other.top)


def test_outputs_match_their_grammars_and_end(expected: list[Answer]) -> None:
    for index in (0, 1, 3):
        assert expected[index].reason == "stop"
        made = json.loads(text_of(expected[index].tokens))
        assert set(made) == {"name", "age", "tags"}
        assert 0 <= made["age"] <= 999
        assert len(made["name"]) <= 12
        assert set(made["tags"]) <= {"aa", "ab", "abc"}
    assert re.fullmatch("(ab|abc|aa){8,12}", text_of(expected[2].tokens))
    assert re.fullmatch("[a-z ]+", text_of(expected[4].tokens))
    for answer in expected:
        assert (answer.reason == "stop") == (answer.tokens[-1] in ENDS)
        assert not set(answer.tokens[:-1]) & {START, *ENDS}
        assert max(answer.tokens) < len(TOKENS)
    assert 256 + 7 not in expected[3].tokens  # "aa", which logit_bias forbids
    assert len(set(expected[5].tokens)) > 1
    assert set(expected[5].tokens) <= {97, 98, 99, 150}
    assert len(expected[5].tokens) == 24
    assert set(expected[6].tokens) <= {31, 32, END}
    assert END not in expected[6].tokens[:20]


@pytest.mark.parametrize("depth", [1, 2])
def test_among_others(tiny: str, expected: list[Answer], depth: int) -> None:
    chosen = options(tiny, scheduler={"in_flight_depth": depth})
    answers, _ = run(chosen, subjects(at_step=5) + neighbours(40), vocabulary())
    same(answers, expected)
    failed = answers[len(SUBJECTS) + 3 :: 4]
    assert {answer.reason for answer in failed} == {"error"}
    assert all("grammar" in str(answer.message) for answer in failed)


@pytest.mark.parametrize(
    "parts",
    [
        {"scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 16}},
        {"cache": {"num_blocks": 16, "block_size": 16, "prefix_caching": False}},
        {"cache": {"num_blocks": 16, "block_size": 16}, "scheduler": {"in_flight_depth": 2}},
        {"device": {"threads": 3}},
        {"scheduler": {"continuous": False, "static_timeout": 0.0, "max_num_seqs": 7}},
    ],
    ids=["chunks", "preemption", "preemption-in-flight", "threads", "static"],
)
def test_engine_modes(tiny: str, expected: list[Answer], parts: dict[str, dict[str, Any]]) -> None:
    answers, stats = run(options(tiny, **parts), subjects() + subjects() + neighbours(8), vocabulary())
    same(answers, expected)
    same(answers[len(SUBJECTS) :], expected)
    assert stats.preemptions_total > 0 or "cache" not in parts


def test_prefix_hits_and_choices(tiny: str, expected: list[Answer]) -> None:
    chosen = options(tiny)
    executor = LocalExecutor(chosen)
    try:
        core = EngineCore(executor, chosen.cache, chosen.scheduler)
        core.handle(vocabulary())
        same(drive(core, subjects())[0], expected)
        again, _ = drive(core, subjects())
        same(again, expected)
        assert all(answer.cached_tokens > 0 for answer in again)
        choices = [Ask(prompt(7, 40), SUBJECTS[1], group=1, choice=choice, stop_ids=ENDS) for choice in range(4)]
        together, _ = drive(core, choices)
        for one, answer in zip(choices, together, strict=True):
            same(drive(core, [one])[0], [answer])
        assert len({tuple(answer.tokens) for answer in together}) > 1
    finally:
        executor.close()


@pytest.mark.parametrize("kept", [1, 9, 15])
def test_resumed_in_the_middle(tiny: str, expected: list[Answer], kept: int) -> None:
    asks = [
        Ask(one.prompt, one.params, received=tuple(answer.tokens[:kept]), stop_ids=ENDS)
        for one, answer in zip(subjects(), expected, strict=True)
    ]
    answers, _ = run(options(tiny), asks, vocabulary())
    for answer, full in zip(answers, expected, strict=True):
        assert answer.tokens == full.tokens[kept:]
        assert answer.reason == full.reason


def test_the_reference_backend_says_the_same(tiny: str) -> None:
    asks = [ask(0, SamplingParams(temperature=0.0, max_tokens=40, seed=0, grammar=JSON)), ask(6, SUBJECTS[6])]
    answers = [
        run(options(tiny, model={"dtype": "f32"}, device={"backend": backend}), asks, vocabulary())[0]
        for backend in ("cpu", "reference")
    ]
    same(answers[0], answers[1])


def test_end_tokens(tiny: str) -> None:
    """Where a grammar may end, it may go on as well; where it must, it does, whatever min_tokens says."""
    asks = [
        ask(0, SamplingParams(temperature=0.0, max_tokens=40, min_tokens=30, grammar=regex("a{3}"), seed=0)),
        ask(1, SamplingParams(temperature=0.0, max_tokens=9, min_tokens=9, grammar=regex("[abc]+"), seed=0)),
        ask(2, SamplingParams(temperature=0.0, max_tokens=9, grammar=regex("a*"), seed=0, logit_bias={END: 100.0})),
        ask(3, SamplingParams(temperature=0.0, max_tokens=5, grammar=regex("[a-c]{30}"), seed=0)),
        ask(4, SamplingParams(temperature=0.0, max_tokens=6, grammar=regex("a"), seed=0)),
    ]
    asks[4] = Ask(asks[4].prompt, asks[4].params)  # ignore_eos: the model's end tokens are no end
    answers, _ = run(options(tiny), asks, vocabulary())
    assert [answer.reason for answer in answers] == ["stop", "length", "stop", "length", "length"]
    assert text_of(answers[0].tokens) == "aaa"
    assert answers[0].tokens[-1] in ENDS
    assert not set(answers[1].tokens) & set(ENDS)
    assert answers[2].tokens == [END]
    assert len(answers[3].tokens) == 5
    assert text_of(answers[4].tokens) == "a"
    assert set(answers[4].tokens[1:]) <= set(ENDS)


def test_a_grammar_that_comes_to_a_dead_end_ends_its_request_alone(tiny: str, expected: list[Answer]) -> None:
    """No token of this vocabulary stands for the byte that must come, although the text is possible."""
    lost = vocabulary()
    lengths = np.frombuffer(lost.lengths, "<i4").copy()
    assert lengths[ord("z")] == 1
    lengths[ord("z")] = 0
    lost = type(lost)(
        tokens=lost.tokens.replace(b"z", b"", 1),
        lengths=lengths.tobytes(),
        end_ids=lost.end_ids,
        special_ids=lost.special_ids,
    )
    stuck = SamplingParams(temperature=0.0, max_tokens=60, seed=0, grammar=regex("a[xy]az"))
    answers, _ = run(options(tiny), [*subjects()[:1], ask(5, stuck), *subjects()[2:4]], lost)
    same([answers[0], answers[2], answers[3]], [expected[0], expected[2], expected[3]])
    assert answers[1].reason == "error"
    assert "grammar" in str(answers[1].message)
    assert text_of(answers[1].tokens) in ("axa", "aya")


def test_received_tokens_that_do_not_match_end_in_error(tiny: str) -> None:
    asks = [
        Ask(prompt(1, 20), SamplingParams(max_tokens=30, seed=0, grammar=WORDS), received=(5, 6)),
        Ask(prompt(1, 20), SamplingParams(max_tokens=30, seed=0, grammar=WORDS), received=(97, 97)),
    ]
    answers, _ = run(options(tiny), asks, vocabulary())
    assert answers[0].reason == "error"
    assert answers[0].tokens == []
    assert answers[1].reason in ("length", "stop")


def test_a_model_without_end_tokens_refuses_grammars(tiny: str) -> None:
    answers, _ = run(options(tiny), [ask(0, SUBJECTS[0]), ask(1, SamplingParams(max_tokens=3, seed=1))], vocabulary(()))
    assert answers[0].reason == "error"
    assert "no end token" in str(answers[0].message)
    assert answers[1].reason == "length"


def test_requests_wait_for_the_vocabulary_and_can_be_aborted_meanwhile(tiny: str) -> None:
    chosen = options(tiny)
    executor = LocalExecutor(chosen)
    try:
        core = EngineCore(executor, chosen.cache, chosen.scheduler)
        for request_id in (1, 2):
            core.handle(
                Submit(
                    request_id=request_id,
                    prompt_ids=np.arange(9, dtype="<i4").tobytes(),
                    params=SamplingParams(max_tokens=4, seed=0, grammar=WORDS),
                )
            )
        assert core.step() is None
        assert core.has_work
        assert core.idle_seconds > 0
        assert core.stats.waiting == 2
        core.handle(Abort((1,)))
        core.handle(vocabulary())
        core.handle(vocabulary((3,)))  # a second one changes nothing
        finished = []
        while core.has_work:
            time.sleep(core.idle_seconds)
            outputs = core.step()
            finished += outputs.finished if outputs is not None else ()
        assert [(end.request_id, end.reason) for end in finished] == [(2, "length")]
        assert core.stats.generation_tokens_total == 4
    finally:
        executor.close()


def until_gone(grammars: Grammars, text: str) -> None:
    """The thread that compiled it may take a moment to let go of it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            grammars.find(text)
        except BackendError:
            return
        time.sleep(0.001)
    raise AssertionError("a grammar that nobody holds is kept")


def test_grammars_are_compiled_once_and_stay_while_somebody_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_grammar, "_MOST_KEPT", 2)
    grammars = Grammars(VOCAB)
    grammars.load(vocabulary())
    try:
        texts = [regex(f"a{{{i}}}") for i in range(1, 6)]
        first = grammars.compile(texts[0]).result()
        assert grammars.compile(texts[0]).result() is first
        for text in texts[1:]:
            grammars.compile(text).result()
        assert grammars.find(texts[0]) is first
        assert grammars.compile(texts[0]).result() is first
        assert grammars.find(texts[4]).text == texts[4]
        until_gone(grammars, texts[1])  # neither held nor among the last ones
        for _ in range(2):
            with pytest.raises(GrammarError, match="cannot be used"):
                grammars.compile("%bad").result()
    finally:
        grammars.close()


def test_texts_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(VOCAB)
    grammars.load(vocabulary())
    try:
        long, short = regex("a" * 300), regex("b")
        monkeypatch.setattr(worker_grammar, "_MOST_KEPT_CHARACTERS", 200)
        grammars.compile(long).result()
        grammars.compile(short).result()
        assert grammars.find(short).text == short
        until_gone(grammars, long)
    finally:
        grammars.close()


def test_others_with_the_same_grammar_do_not_use_up_what_a_row_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a matcher share the states of their lexer, of which there may be so many."""
    limits = llguidance.LLParserLimits(max_lexer_states=400, verbose_errors=False)
    monkeypatch.setattr(worker_grammar, "make_limits", lambda: limits)
    matchers = Matchers(3, VOCAB, 1)
    matchers.grammars.load(vocabulary())
    params = SamplingParams(seed=0, grammar=regex("[ab]*a[ab]{30}"))
    held = matchers.grammars.compile(str(params.grammar)).result()
    random, slots, blocks = np.random.default_rng(0), np.array([0, 1, 2], np.int32), np.empty(0, np.int32)

    def begin(slot: int) -> None:
        matchers.admit(Admission(slot, np.array([1], np.int32), 1, params, (), 0, blocks))

    try:
        begin(0)
        while not (failed := matchers.wait(slots[:1])):
            matchers.advance(slots[:1], random.choice([97, 98], 1).astype(np.int32))
        assert "too many states" in failed[0]  # by itself
        assert matchers.grammars.find(held.text) is held
        for slot in (1, 2):
            begin(slot)
        for _ in range(20):
            assert not matchers.wait(slots[1:])
            matchers.advance(slots[1:], random.choice([97, 98], 2).astype(np.int32))
    finally:
        matchers.close()


def test_tokens_beyond_the_head_or_too_long_are_never_allowed() -> None:
    """A head with fewer tokens than the tokenizer, one with more, and a token of which no grammar can speak."""
    known = vocabulary()
    lengths = np.frombuffer(known.lengths, "<i4")
    lengths = np.append(lengths, 5000).astype("<i4")
    longer = type(known)(
        tokens=known.tokens + b"a" * 5000,
        lengths=lengths.tobytes(),
        end_ids=(END, 9999),
        special_ids=(START, END, 9999),
    )
    for head in (END + 1, len(lengths), len(lengths) + 50):
        grammars = Grammars(head)
        grammars.load(longer)
        try:
            matcher = grammars.compile(regex("a*")).result().prototype.deep_copy()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = {token for token in np.flatnonzero(bits).tolist() if token < head}
            assert allowed == {token for token, text in enumerate(TOKENS) if text.strip(b"a") == b"" and text} | {END}
            assert not bits[head:].any()
        finally:
            grammars.close()
