"""Files of API keys, and rates."""

from __future__ import annotations

import asyncio
import logging
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from noria.config import ServerOptions
from noria.errors import ConfigError, InvalidRequestError, RateLimitError
from noria.server.access import Access, Bucket, Caller, duration
from noria.server.keys import MOST_KEYS, hashed, make_keys, read_key_file

HEX = sha256(b"second").hexdigest()


def write(folder: Path, text: str) -> str:
    path = folder / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_file_holds_keys_plain_or_hashed_with_their_limits(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
# ours
- name: first
  key: sk-1
  requests_per_minute: 60
- {{name: second, key: "sha256:{HEX}", tokens_per_minute: 1000, share: 3}}
""",
    )
    first, second = read_key_file(Path(path))
    assert (first.name, first.requests_per_minute, first.tokens_per_minute, first.share) == ("first", 60, None, 1.0)
    assert (second.name, second.requests_per_minute, second.tokens_per_minute, second.share) == (
        "second",
        None,
        1000,
        3,
    )
    assert first.digest == sha256(b"sk-1").digest()
    access = Access(ServerOptions(api_keys=("flag", hashed("other")), api_key_file=path))
    found = [access.caller(key) for key in (b"flag", b"other", b"sk-1", b"second", b"", b"third")]
    assert [one and one.name for one in found] == ["key-1", "key-2", "first", "second", None, None]


def test_json_is_a_file_of_keys_too(tmp_path: Path) -> None:
    path = write(tmp_path, '[\n\t{"name": "a", "key": "b"}]'.replace("\t", " "))
    assert [key.name for key in read_key_file(Path(path))] == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a list"),
        ("name: a", "must be a list"),
        ("- name: a\n  key: [", ":2 is not valid YAML"),
        ("- name: a\n  key: b\n- text\n", ":3: an entry must be"),
        ("- name: a\n  key: b\n- name: c\n", ":3: Object missing required field `key`"),
        ("- name: a\n  key: b\n  shares: 2\n", ":1: there is no 'shares'; did you mean share?"),
        ("- name: a\n  key: b\n  share: much\n", ":1: share: expected `float`"),
        ("- name: a\n  key: b\n  share: .nan\n", ":1: share"),
        ("- name: a\n  key: b\n  share: 1000\n", ":1: share: expected `float` <= 100.0"),
        ("- name: a\n  key: b\n  requests_per_minute: 0\n", ":1: requests_per_minute: expected `int` >= 1"),
        ("- name: a\n  key: 12\n", ":1: key: expected `str`"),
        ("- name: a\n  key: ''\n", ":1: key is empty"),
        ("- name: a\n  key: two words\n", ":1: key must be 1 to 512 printable ASCII"),
        ("- name: a\n  key: sha256:12\n", ":1: key must have 64 hexadecimal digits"),
        ("- name: a b\n  key: c\n", ":1: name must be"),
        ("- name: a\n  key: b\n- name: a\n  key: c\n", "two keys are named 'a'"),
        ("- name: a\n  key: b\n- name: c\n  key: b\n", "'a' and 'c' are the same key"),
        ("- {name: a, key: b}\n" * (MOST_KEYS + 1), f"at most {MOST_KEYS}"),
        ("[" * 3000, ""),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        make_keys((), path)
    assert str(raised.value).startswith("--api-key-file: ")
    assert message in str(raised.value)
    if message.startswith(":"):
        assert f"{path}{message}" in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        make_keys((), str(tmp_path / "none"))


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "- {name: a, key: b}")
    with caplog.at_level(logging.WARNING):
        Access(ServerOptions(api_key_file=path))
        assert not caplog.records
        Path(path).chmod(0o644)
        Access(ServerOptions(api_key_file=path))
    assert "chmod 600" in caplog.text


def test_reloading_keeps_what_was_used_and_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "- {name: a, key: b, requests_per_minute: 3}\n- {name: c, key: d}")
    access = Access(ServerOptions(api_key_file=path))
    caller = access.caller(b"b")
    assert caller is not None
    caller.admit()
    write(tmp_path, "- {name: a, key: new, requests_per_minute: 2}")
    asyncio.run(access.reload())
    assert access.caller(b"b") is None
    assert access.caller(b"d") is None
    caller = access.caller(b"new")
    assert caller is not None
    caller.admit()
    with pytest.raises(RateLimitError):
        caller.admit()
    write(tmp_path, "- {name: a")
    asyncio.run(access.reload())
    assert access.caller(b"new") is caller
    assert not access.open


def test_of_two_reloads_the_later_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(ServerOptions(api_key_file=write(tmp_path, "- {name: a, key: old}")))
    first = make_keys((), write(tmp_path, "- {name: a, key: one}"))
    second = make_keys((), write(tmp_path, "- {name: a, key: two}"))
    late = threading.Event()
    results = iter([lambda: (late.wait(10), first)[1], lambda: second])
    monkeypatch.setattr("noria.server.access.make_keys", lambda *_: next(results)())

    async def both() -> None:
        slow = asyncio.create_task(access.reload())
        await asyncio.sleep(0)
        await access.reload()
        late.set()
        await slow

    asyncio.run(both())
    assert access.caller(b"one") is None
    assert access.caller(b"two") is not None


def test_a_lower_rate_makes_no_debt() -> None:
    clock = Clock()
    bucket = Bucket(1_000_000, lambda: clock.now)
    bucket.use(500_000)
    lower = bucket.resized(1000)
    assert lower.level == 0.0
    assert lower.wait(1.0) == pytest.approx(0.06)
    lower.use(40.0)
    assert lower.resized(10).level == -40.0  # what was owed before stays
    assert lower.resized(2000).level == 960.0


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_by_the_minute_and_may_owe() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.wait(60) == 0
    assert bucket.wait(61) == pytest.approx(1.0)
    bucket.use(70)
    assert (bucket.level, bucket.wait(1)) == (-10, pytest.approx(11.0))
    clock.now += 11.0
    assert bucket.wait(1) == pytest.approx(0.0, abs=1e-9)
    clock.now += 1000.0
    assert bucket.level == 60


def test_tokens_of_prompts_and_answers_count_and_a_prompt_beyond_the_limit_never_fits() -> None:
    clock = Clock()
    caller = Caller("team", tokens=Bucket(100, clock))
    with pytest.raises(InvalidRequestError, match=r"101 tokens; key 'team' may use 100 per minute"):
        caller.take_prompt(101)
    caller.take_prompt(90)
    caller.admit()
    with pytest.raises(RateLimitError) as raised:
        caller.take_prompt(40)
    assert raised.value.retry_after == pytest.approx(18.0)
    caller.spend(20)
    with pytest.raises(RateLimitError) as raised:
        caller.admit()
    assert raised.value.retry_after == pytest.approx(6.6)
    assert (caller.admitted, caller.prompt_tokens, caller.generated) == (1, 90, 20)
    assert caller.limited == {"requests": 0, "tokens": 2}
    assert dict(caller.headers()) == {
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"1m6s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (366.25, "6m6.25s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
