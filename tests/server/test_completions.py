"""`/v1/completions` over HTTP, against an engine that recites."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fakes import BOS, EOS, MAX_LEN, TEXT, Running, recited


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end in [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": "wheel", "prompt": "abc"} | body)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def test_sixteen_tokens_by_default(http: httpx.Client) -> None:
    made = complete(http)
    assert made["object"] == "text_completion"
    assert made["model"] == "wheel"
    assert made["id"].startswith("cmpl-")
    assert made["choices"] == [
        {"index": 0, "text": recited(16), "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert made["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 16,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_end_token_has_no_text_but_counts(http: httpx.Client) -> None:
    made = complete(http, prompt="brief", return_token_ids=True)
    choice = made["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (recited(5), "stop", None)
    assert choice["token_ids"] == [*TEXT.encode()[:5], EOS]
    assert choice["prompt_token_ids"] == [BOS, *b"brief"]
    assert made["usage"]["completion_tokens"] == 6


def test_ignore_eos_and_visible_control_tokens(http: httpx.Client) -> None:
    assert complete(http, prompt="brief", ignore_eos=True)["choices"][0]["text"] == recited(16)
    shown = complete(http, prompt="brief", skip_special_tokens=False, min_tokens=6, max_tokens=6)["choices"][0]
    assert shown["text"] == recited(5) + "<eos>"
    assert shown["finish_reason"] == "length"


def test_a_stop_string_may_stay_in_the_output(http: httpx.Client) -> None:
    asked = {"stop": ["turn", "urns"], "max_tokens": 20}
    cut = complete(http, **asked)["choices"][0]
    kept = complete(http, **asked, include_stop_str_in_output=True)["choices"][0]
    assert (cut["text"], cut["stop_reason"]) == ("Water ", "turn")
    assert (kept["text"], kept["stop_reason"]) == ("Water turn", "turn")
    body = {"prompt": "abc", "stream": True, "include_stop_str_in_output": True} | asked
    streamed = chunks(http.post("/v1/completions", json=body))
    assert "".join(part["choices"][0]["text"] for part in streamed) == "Water turn"


def test_a_prompt_is_cut_on_the_left(http: httpx.Client) -> None:
    made = complete(http, prompt="abcdef", truncate_prompt_tokens=3, echo=True, max_tokens=2, return_token_ids=True)
    assert made["choices"][0]["prompt_token_ids"] == list(b"def")
    assert made["choices"][0]["text"] == "def" + recited(2)
    assert made["usage"]["prompt_tokens"] == 3
    long = complete(http, prompt="x" * 1000, truncate_prompt_tokens=-1, max_tokens=10)
    assert long["usage"]["prompt_tokens"] == MAX_LEN - 10
    whole = complete(http, prompt="abc", truncate_prompt_tokens=100, return_token_ids=True)
    assert whole["choices"][0]["prompt_token_ids"] == [BOS, *b"abc"]


@pytest.mark.parametrize("wrong", [0, -2, MAX_LEN + 1])
def test_how_much_is_kept_of_a_prompt_has_a_range(http: httpx.Client, wrong: int) -> None:
    reply = http.post("/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": wrong})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "truncate_prompt_tokens"
    assert str(wrong) in reply.json()["error"]["message"]


def test_every_chunk_tells_usage_if_asked(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "stream": True, "max_tokens": 6, "stream_options": options}
    spent = [part["usage"]["completion_tokens"] for part in chunks(http.post("/v1/completions", json=body))]
    assert spent == sorted(spent)
    assert spent[-1] == 6
    assert 0 < spent[0] <= 6


def test_a_cache_salt_keeps_prefixes_apart(running: Running, http: httpx.Client) -> None:
    for salt in ("one", "two"):
        complete(http, prompt="salted", cache_salt=salt)
    complete(http, prompt="salted")
    assert [submit.salt for submit in running.core.submitted[-3:]] == [":one", ":two", ""]
    for wrong in ("", "x" * 257):
        reply = http.post("/v1/completions", json={"prompt": "a", "cache_salt": wrong})
        assert reply.json()["error"]["param"] == "cache_salt"


def test_stop_token_is_named(http: httpx.Client) -> None:
    choice = complete(http, stop_token_ids=[ord("r")])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Wate", "stop", ord("r"))


@pytest.mark.parametrize("stop", ["rn", ["xyz", "turns", "rn"], ["rns the"]])
def test_stop_string_is_cut_over_token_boundaries(http: httpx.Client, stop: Any) -> None:
    made = complete(http, stop=stop, max_tokens=60)
    choice = made["choices"][0]
    first = min(([stop] if isinstance(stop, str) else stop), key=lambda s: TEXT.find(s) + len(s) if s in TEXT else 999)
    assert choice["text"] == TEXT[: TEXT.find(first)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first)
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_stop_string_in_a_stream_is_withheld(http: httpx.Client) -> None:
    body = {"prompt": "abc", "stop": ["turns the eel", "größer"], "stream": True, "max_tokens": 100}
    parts = chunks(http.post("/v1/completions", json=body))
    assert "".join(part["choices"][0]["text"] for part in parts) == TEXT[: TEXT.find("größer")]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_stream(http: httpx.Client) -> None:
    body = {"prompt": "abc", "stream": True, "max_tokens": 40, "stream_options": {"include_usage": True}}
    response = http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, final, usage = chunks(response)
    assert "".join(part["choices"][0]["text"] for part in parts) == recited(40)
    assert all(part["choices"][0]["text"] and part["choices"][0]["finish_reason"] is None for part in parts)
    assert all(part["usage"] is None for part in [*parts, final])
    assert (final["choices"][0]["text"], final["choices"][0]["finish_reason"]) == ("", "length")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 40
    assert len({part["id"] for part in [*parts, final, usage]}) == 1


def test_stream_holds_characters_until_whole(http: httpx.Client) -> None:
    parts = chunks(
        http.post("/v1/completions", json={"prompt": "abc", "stream": True, "max_tokens": len(TEXT.encode())})
    )
    texts = [part["choices"][0]["text"] for part in parts]
    assert "".join(texts) == TEXT
    assert not any("�" in text for text in texts)
    assert "usage" not in parts[0]


def test_many_prompts_and_choices(http: httpx.Client, running: Any) -> None:
    before = len(running.core.submitted)
    made = complete(http, prompt=["one", "brief"], n=2, max_tokens=8, seed=7)
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in made["choices"]] == [
        recited(8),
        recited(8, 1),
        recited(5),
        recited(5, 1),
    ]
    assert made["usage"]["prompt_tokens"] == 4 + 6
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    sent = running.core.submitted[before:]
    assert [submit.choice for submit in sent] == [0, 1, 0, 1]
    assert sent[0].group == sent[1].group != sent[2].group == sent[3].group
    assert all(submit.params.seed == 7 and submit.params.n == 1 for submit in sent)


def test_seed_is_drawn_when_none_is_given(http: httpx.Client, running: Any) -> None:
    complete(http)
    complete(http)
    first, second = (submit.params.seed for submit in running.core.submitted[-2:])
    assert first is not None
    assert second is not None
    assert first != second


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], [[104, 105], [104]]])
def test_prompt_as_ids(http: httpx.Client, running: Any, prompt: Any) -> None:
    made = complete(http, prompt=prompt, max_tokens=1, echo=True)
    assert made["choices"][0]["text"] == "hiW"
    assert len(made["choices"]) == (2 if len(prompt) == 2 and isinstance(prompt[0], list) else 1)


def test_logprobs(http: httpx.Client) -> None:
    logprobs = complete(http, logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.25, -0.25, -0.25],
        "tokens": ["W", "a", "t"],
        "top_logprobs": [{"W": -0.25, "X": -1.25}, {"a": -0.25, "b": -1.25}, {"t": -0.25, "u": -1.25}],
    }


def test_logprobs_zero_reports_the_token_itself(http: httpx.Client) -> None:
    logprobs = complete(http, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"W": -0.25}]


def test_logprobs_of_parts_of_a_character(http: httpx.Client) -> None:
    at = len("Water turns the wheel ")
    logprobs = complete(http, logprobs=0, max_tokens=at + 4)["choices"][0]["logprobs"]
    assert logprobs["tokens"][at:] == ["bytes:\\xe2", "bytes:\\x80", "bytes:\\x93", " "]
    assert logprobs["text_offset"][at:] == [at, at, at, at + 1]


def test_echo_with_logprobs(http: httpx.Client) -> None:
    choice = complete(http, prompt="ab", echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["text"] == "abWa"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", "a", "b", "W", "a"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]


def test_echo_of_the_prompt_alone(http: httpx.Client) -> None:
    made = complete(http, prompt="ab", echo=True, logprobs=0, max_tokens=0)
    choice = made["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["<bos>", "a", "b"]
    assert (choice["finish_reason"], made["usage"]["completion_tokens"]) == ("length", 0)


def test_echo_and_logprobs_in_a_stream(http: httpx.Client) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 4, "stream": True, "n": 2}
    parts = chunks(http.post("/v1/completions", json=body))
    for index, said in enumerate(("Wate", "ater")):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "ab" + said
        offsets = [offset for choice in mine if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 0, 1, 2, 3, 4, 5]
        assert mine[-1]["logprobs"] is None


def test_token_ids_in_a_stream(http: httpx.Client) -> None:
    body = {"prompt": "brief", "return_token_ids": True, "stream": True}
    parts = [part["choices"][0] for part in chunks(http.post("/v1/completions", json=body))]
    assert parts[0]["prompt_token_ids"] == [BOS, *b"brief"]
    assert [token for part in parts for token in part.get("token_ids", [])] == [*TEXT.encode()[:5], EOS]


def test_what_the_engine_cannot_do_is_a_400_and_hurts_nobody_else(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["fine", "poison"]})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    streamed = http.post("/v1/completions", json={"prompt": "poison", "stream": True})
    assert "error" in chunks(streamed)[-1]
    assert complete(http)["choices"][0]["text"] == recited(16)


def test_many_prompts_and_choices_in_a_stream(http: httpx.Client) -> None:
    body = {"prompt": ["one", "brief"], "n": 2, "max_tokens": 8, "echo": True, "stream": True}
    *parts, spent = chunks(http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}}))
    texts, ends = [""] * 4, [""] * 4
    for choice in (part["choices"][0] for part in parts):
        assert ends[choice["index"]] == ""  # nothing comes after its end
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ""
    assert texts == ["one" + recited(8), "one" + recited(8, 1), "brief" + recited(5), "brief" + recited(5, 1)]
    assert ends == ["length", "length", "stop", "stop"]
    assert (spent["usage"]["prompt_tokens"], spent["usage"]["completion_tokens"]) == (4 + 6, 8 + 8 + 6 + 6)


def test_log_probabilities_of_a_prompt(http: httpx.Client) -> None:
    choices = complete(http, prompt=["ab", "c"], prompt_logprobs=2, echo=True, logprobs=0, max_tokens=1)["choices"]
    first, *rest = choices[0]["prompt_logprobs"]
    assert first is None  # of <bos>
    assert rest[0] == {
        "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -1.25, "rank": 2, "decoded_token": "b"},
    }
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 2]
    assert choices[0]["logprobs"]["top_logprobs"][1] == {"a": -0.25}  # as many as logprobs asks for
    alone = complete(http, prompt="ab", prompt_logprobs=0, max_tokens=0)["choices"][0]
    assert (alone["text"], len(alone["prompt_logprobs"])) == ("", 3)
    refused = http.post("/v1/completions", json={"prompt": "a", "prompt_logprobs": 0, "stream": True})
    assert refused.json()["error"]["param"] == "prompt_logprobs"
