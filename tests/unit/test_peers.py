"""Noria beside other engines: the order, the workloads, the table, the conversion. No engine is needed for that."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_gguf import write_gguf
from helpers.tiny_models import write_checkpoint
from noria.bench.http import Record
from noria.bench.report import summarise
from noria.bench.workloads import make_requests, presets
from noria.cli.bench_common import make_spec, parse_lengths
from noria.files.resolve import resolve
from noria.frontend.tokenizer import load_tokenizer
from noria.models.loaders import open_checkpoint
from noria.quantize.schemes import dequantise_source
from peers import table
from peers.base import Load, Outcome, Place, Unavailable, Variant
from peers.convert import convert, hf_folder
from peers.environment import Environment, run_logged
from peers.llama_cpp import needs_workaround
from peers.runner import Loads, Plan, Runner
from peers.schedule import Job, jobs, label
from peers.sessions import as_asked, as_flags, driven, judged
from peers.store import Report, Run, Store

DRIVERS = Path(table.__file__).parent / "drivers"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    write_gguf("llama", tmp_path / "tiny.gguf", kind="Q8_0")
    return Place(tmp_path / "peers", str(tmp_path / "tiny.gguf"), resolve(str(tmp_path / "tiny.gguf")), 1)


def records(load: Load, tokens_per_s: float) -> list[Record]:
    """One after the other at a rate."""
    made, now = [], 0.0
    for request in load.requests:
        chunks = [now + (i + 1) / tokens_per_s for i in range(request.output_tokens)]
        made.append(Record(now, chunks[-1], chunks, len(request.prompt_ids), request.output_tokens))
        now = chunks[-1]
    return made


@dataclass
class FakeSession:
    peer: FakePeer
    variant: Variant
    seconds: float = 1.5
    pid: int = 0

    def measure(self, load: Load, scratch: Path) -> Outcome:
        if load.seed > 10_000:
            self.peer.diary.append(f"{self.peer.name} {self.variant.name} warm")
            return judged(summarise(records(load, 10)), load, None)
        self.peer.diary.append(f"{self.peer.name} {self.variant.name} {load.preset} {load.seed}")
        if load.preset in self.peer.hangs_on:
            return Outcome(None, "no end within 9 s")
        return judged(summarise(records(load, self.peer.speed)), load, 100.0)


@dataclass
class FakePeer:
    name: str
    variants: tuple[Variant, ...]
    speed: float
    diary: list[str]
    how: str = "HTTP"
    missing: str | None = None
    hangs_on: tuple[str, ...] = ()
    per_preset: bool = False
    starts: bool = True
    up: int = field(default=0)

    def prepare(self) -> None:
        if self.missing:
            raise Unavailable(self.missing)

    def version(self) -> str:
        return "1.0"

    def settings(self, variant: Variant, load: Load) -> tuple[str, ...]:
        return (str(load.callers),) if self.per_preset else ()

    @contextmanager
    def start(self, variant: Variant, settings: Sequence[str]) -> Iterator[FakeSession]:
        if not self.starts:
            raise Unavailable("no port")
        self.diary.append(f"{self.name} {variant.name} up")
        self.up += 1
        try:
            yield FakeSession(self, variant)
        finally:
            self.up -= 1


def fakes(diary: list[str], **changes: Any) -> tuple[FakePeer, FakePeer]:
    noria = FakePeer("Noria", (Variant("int8", "int8", "int8"), Variant("bf16", "bf16", "int8")), 200.0, diary)
    other = FakePeer("Other", (Variant("bf16", "bf16", "f16", ("int8", "bf16")),), 100.0, diary, **changes)
    return noria, other


# ---------------------------------------------------------------------------------------------------- order


def test_turns_come_one_after_the_other_and_counterparts_side_by_side() -> None:
    players = [("vLLM", "bf16"), ("Noria", "int8"), ("Noria", "bf16"), ("OpenVINO GenAI", "int8"), ("Other", "x")]
    order = list(jobs(players, ("W2", "W1"), 2))
    assert [(job.turn, job.preset) for job in order[:: len(players)]] == [(0, "W2"), (0, "W1"), (1, "W2"), (1, "W1")]
    first = [label(job.engine, job.variant) for job in order[: len(players)]]
    assert first == ["OpenVINO GenAI int8", "Noria int8", "vLLM bf16", "Noria bf16", "Other x"]
    assert len({job.name for job in order}) == len(order)


def test_slow_variants_are_measured_once_or_not_at_all() -> None:
    players = [("llama.cpp", "Q4_1"), ("llama.cpp", "Q8_0"), ("Noria", "int8")]
    order = list(jobs(players, ("W1", "W2", "W3", "W5", "W4"), 3))
    often, once = [("Noria", "int8"), ("llama.cpp", "Q8_0")], Job("W1", 1, "llama.cpp", "Q4_1", 100)
    assert [job for job in order if (job.preset, job.variant) == ("W1", "Q4_1")] == [once]
    assert [(job.engine, job.variant) for job in order if job.preset == "W1" and job.turn == 0] == often
    assert order.index(Job("W3", 2, "Noria", "int8")) < order.index(once) < order.index(Job("W5", 2, "Noria", "int8"))
    assert not [job for job in order if job.preset == "W4" and job.variant == "Q4_1"]
    for turns, some, count in ((1, ("W1",), 1), (2, ("W1", "W2", "W3", "W5", "W4"), 4), (3, ("W1", "W2"), 4)):
        assert [job.variant for job in jobs(players, some, turns)].count("Q4_1") == count
    assert len(list(jobs(players, ("W1", "W4"), 3, everything=True))) == 18


def run_all(place: Place, plan: Plan, *engines: FakePeer) -> Report:
    return Runner(place, engines, plan, Store(place.root / "runs"), {"commit": "abc"}, lambda line: None).run()


def test_engines_are_measured_in_turns_and_everything_is_stopped(place: Place) -> None:
    diary: list[str] = []
    noria, other = fakes(diary)
    report = run_all(place, Plan(("W2", "W4"), 2, 9.0, 2), noria, other)
    measured = [line.rpartition(" ")[0] for line in diary if line[-1].isdigit()]
    one_preset = ["Noria int8 {}", "Noria bf16 {}", "Other bf16 {}"]
    assert measured == 2 * [line.format(preset) for preset in ("W2", "W4") for line in one_preset]
    assert diary.count("Other bf16 up") == 1
    assert diary.index("Other bf16 warm") == diary.index("Other bf16 up") + 1
    assert noria.up == other.up == 0
    assert not report.missing
    assert len(report.runs) == 12
    assert {run.commit for run in report.runs} == {"abc"}


def test_new_settings_need_a_new_start(place: Place) -> None:
    diary: list[str] = []
    run_all(place, Plan(("W2", "W3", "W4"), 1, 9.0, 2), *fakes(diary, per_preset=True))
    assert diary.count("Other bf16 up") == 2  # W2 and W3 have one caller, W4 two
    assert diary.count("Other bf16 warm") == 2


def test_an_engine_that_hangs_is_restarted_and_not_asked_again(place: Place) -> None:
    diary: list[str] = []
    noria, other = fakes(diary, hangs_on=("W2",))
    report = run_all(place, Plan(("W2", "W4"), 2, 9.0, 2), noria, other)
    assert [line[:13] for line in diary if line.startswith("Other bf16 W")] == 1 * ["Other bf16 W2"] + 2 * [
        "Other bf16 W4"
    ]
    assert diary.count("Other bf16 up") == 2
    text = table.markdown(report, [noria, other], WHERE, {})
    assert "| Other | bf16 | f16 | – | HTTP | 0 | no end within 9 s | – |" in text


def test_an_engine_that_does_not_start_loses_only_its_own_rows(place: Place) -> None:
    diary: list[str] = []
    noria, other = fakes(diary, starts=False)
    report = run_all(place, Plan(("W2", "W4"), 2, 9.0, 2), noria, other)
    assert len(report.runs) == 8
    assert {run.engine for run in report.runs} == {"Noria"}
    assert report.missing == {"Other bf16 on W2": "no port"}


def test_a_run_is_taken_up_where_it_ended(place: Place) -> None:
    diary: list[str] = []
    plan = Plan(("W2",), 2, 9.0, 2)
    run_all(place, plan, *fakes(diary))
    (lost,) = (place.root / "runs").glob("W2-2-Other-bf16.json")
    lost.unlink()
    diary.clear()
    report = run_all(place, plan, *fakes(diary))
    assert [line for line in diary if "W2" in line] == ["Other bf16 W2 101"]
    assert len(report.runs) == 6
    assert diary.count("Noria int8 up") == 0
    again = sorted(Store(place.root / "runs"), key=lambda run: (run.turn, run.engine, run.variant))
    assert again == sorted(report.runs, key=lambda run: (run.turn, run.engine, run.variant))


def test_nothing_begins_that_would_end_too_late(place: Place) -> None:
    diary: list[str] = []
    report = run_all(place, Plan(("W1", "W2"), 1, 9.0, 2, seconds=50.0), *fakes(diary))
    assert {run.preset for run in report.runs} == {"W2"}


def test_an_engine_that_cannot_be_had_is_a_line_that_says_why(place: Place) -> None:
    diary: list[str] = []
    noria, other = fakes(diary, missing="there is no\n compiler")
    report = run_all(place, Plan(("W2",), 1, 9.0, 1), noria, other, fakes(diary)[1])
    assert report.missing == {"Other": "there is no compiler"}
    assert "- Other: there is no compiler" in table.markdown(report, [noria, other], WHERE, {})
    assert any(run.engine == "Other" for run in report.runs)  # the next one was taken


# ---------------------------------------------------------------------------------------------------- workloads


def test_the_load_generator_draws_the_same_requests(place: Place) -> None:
    loads = Loads(place, Plan(("W4", "W5"), 1, 9.0, 6))
    for load in (loads.of("W4", 1), loads.of("W5", 1), loads.warm_up(loads.of("W4", 1))):
        flags = as_flags(load)
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        changes = {
            "requests": int(given["--num-requests"]),
            "concurrency": int(given["--concurrency"]),
            "input": parse_lengths(given["--input-len"], "--input-len"),
            "output": parse_lengths(given["--output-len"], "--output-len"),
            "shared": int(given["--shared-len"]),
        }
        spec = make_spec(given["--preset"], changes)
        tokenizer = load_tokenizer(place.files)
        drawn = make_requests(spec, tokenizer, int(given["--seed"]), "text", Path(given["--dataset"]))
        assert tuple(drawn) == load.requests
        assert as_asked(load)["requests"][0]["prompt_ids"] == load.requests[0].prompt_ids


def test_no_turn_shares_a_prefix_with_another(place: Place) -> None:
    loads = Loads(place, Plan(("W4",), 3, 9.0, 2))
    made = [*(loads.of("W4", turn) for turn in range(3)), loads.warm_up(loads.of("W4", 0))]
    starts = {load.requests[0].prompt[:40] for load in made}
    assert len(starts) == 4
    first = made[0]
    assert first.requests[0].prompt[:1000] == first.requests[1].prompt[:1000]
    assert first.longest == 896 + 32 + 32
    assert first.callers == 2
    assert presets()["W4"].requests == 100  # the preset itself is not changed


def test_a_run_with_failures_or_short_answers_is_not_compared(place: Place) -> None:
    load = Loads(place, Plan(("W2",), 1, 9.0, 3)).of("W2", 0)
    good = records(load, 10)
    assert judged(summarise(good), load, None).error is None
    good[0].output_tokens -= 1
    assert judged(summarise(good), load, None).error == "383 output tokens instead of 384"
    good[0].error = "HTTP 500"
    assert judged(summarise(good), load, None).error == "2 of 3 completed: HTTP 500"
    good = records(load, 10)
    good[0].prompt_tokens *= 2
    assert "prompt tokens instead of 384" in str(judged(summarise(good), load, None).error)


# ---------------------------------------------------------------------------------------------------- table

WHERE = {"model": "tiny", "commit": "abc", "cpu": "CPU", "isa": "avx2", "threads": 1, "time": "now", "requests": None}


AGAINST = {"Other bf16": ("int8", "bf16")}


def run_of(preset: str, engine: str, variant: str, turn: int, rate: float) -> Run:
    figures = {"output_tokens_per_s": rate, "wall_s": 1000 / rate, "prompt_tokens": 500, "output_tokens": 1000}
    figures |= {"completed": 1, "ttft_ms": {"p50": 5.0, "p99": 9.0}, "tpot_ms": None}
    return Run(preset, turn, engine, variant, Outcome(figures, None, 321.0), 2.0)


def test_ratios_are_taken_turn_by_turn() -> None:
    runs = []
    for preset in ("W1", "W4"):
        for turn, (ours, theirs) in enumerate([(200, 100), (90, 30), (50, 50)]):
            runs.append(run_of(preset, "Noria", "int8", turn, ours))
            runs.append(run_of(preset, "Other", "bf16", turn, theirs))
    first, second = table.ratios(runs, AGAINST)
    assert (first["preset"], first["noria"], first["against"]) == ("W1", "int8", "Other bf16")
    assert (first["ratio"], first["least"], first["most"], first["turns"]) == (2.0, 1.0, 3.0, 3)
    assert second["figure"] == "wall s"
    assert second["ratio"] == pytest.approx(2.0)  # less time is better, so ahead is above 1 too
    alone = run_of("W2", "Other", "bf16", 0, 100)
    assert alone.outcome.figures is not None
    alone.outcome.figures["tpot_ms"] = {"p50": 8.0}
    assert table.figure(alone) == 125.0  # decoding alone, without the prompt
    runs[1].outcome.error = "broken"
    assert table.ratios(runs, AGAINST)[0]["turns"] == 2


def test_the_median_run_is_shown() -> None:
    runs = [run_of("W1", "Other", "bf16", turn, rate) for turn, rate in enumerate([30.0, 10.0, 20.0])]
    run, count = table.medians(runs)["W1", "Other", "bf16"]
    assert (run.turn, count) == (2, 3)
    runs[2].outcome.error = "short"
    assert table.medians(runs)["W1", "Other", "bf16"][1] == 2


def test_markdown_and_json(tmp_path: Path) -> None:
    diary: list[str] = []
    engines = fakes(diary)
    report = Report(
        [run_of("W1", "Noria", "int8", 0, 1234.5), run_of("W1", "Other", "bf16", 0, 100)], {}, {"Other": "7"}
    )
    text = table.write(tmp_path / "out" / "peers", report, engines, WHERE, {"Noria int8": 13.415})
    assert "commit abc, CPU, avx2, 1 threads" in text
    assert "Other 7" in text
    assert "| Noria | int8 | int8 | 13.41 | HTTP | 1 | 1,234.5 | 617 | 0.8 | 5 / 9 | – | 321 | 2.0 |" in text
    assert "| Other | bf16 | f16 | – | HTTP | 1 | 100.0 |" in text
    assert "| W1 | int8 | Other bf16 | output tok/s | 12.35 (12.35…12.35) | 1 |" in text
    assert "Shortened" not in text
    assert "at most 9 requests" in table.markdown(report, engines, WHERE | {"requests": 9}, {})
    assert (tmp_path / "out" / "peers.md").read_text(encoding="utf-8") == text
    values = json.loads((tmp_path / "out" / "peers.json").read_text(encoding="utf-8"))
    assert values["machine"]["commit"] == "abc"
    assert values["runs"][1]["outcome"]["figures"]["wall_s"] == 10.0
    assert values["variants"]["Other"][0]["cache"] == "f16"
    widths = {line.count("|") for line in text.splitlines() if line.startswith(("| Noria", "| engine"))}
    assert len(widths) == 1


# ---------------------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("case", ["llama", "llama_tied", "llama_biases", "qwen2", "qwen3"])
def test_a_converted_model_is_the_same_model(tmp_path: Path, case: str) -> None:
    write_gguf(case, tmp_path / "tiny.gguf", kind="Q8_0")
    files = resolve(str(tmp_path / "tiny.gguf"))
    convert(files, tmp_path / "out", "float32")
    ours, theirs = open_checkpoint(files), open_checkpoint(resolve(str(tmp_path / "out")))
    assert ours.names == theirs.names
    for name in ours.names:
        if len(ours.shape(name)) == 1:
            np.testing.assert_array_equal(ours.vector(name), theirs.vector(name))
        else:
            np.testing.assert_array_equal(dequantise_source(ours.source(name)), dequantise_source(theirs.source(name)))
    for key in ("hidden", "heads", "kv_heads", "head_dim", "rope", "norm_eps", "tied", "qkv_bias", "max_position"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    text = "The wheel <|eos|> turns, água."
    before, after = load_tokenizer(files), load_tokenizer(resolve(str(tmp_path / "out")))
    assert before.encode(text, add_bos=True) == after.encode(text, add_bos=True)


def test_conversion_is_done_once_and_bf16(place: Place) -> None:
    folder = hf_folder(place)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert hf_folder(place) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert open_checkpoint(resolve(str(folder))).config.stored_dtype == "bf16"
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"] == ["LlamaForCausalLM"]


def test_a_model_in_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "model")
    files = resolve(str(tmp_path / "model"))
    assert hf_folder(Place(tmp_path / "peers", files.name, files, 1)) == tmp_path / "model"


def test_what_cannot_be_said_in_a_config_is_refused(tmp_path: Path) -> None:
    write_gguf("gemma3", tmp_path / "tiny.gguf", kind="Q8_0")
    with pytest.raises(Unavailable, match="gemma3"):
        hf_folder(Place(tmp_path / "peers", "tiny", resolve(str(tmp_path / "tiny.gguf")), 1))


# ---------------------------------------------------------------------------------------------------- drivers

DRIVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from loop import Callers, serve
print("a library's banner")
most = 0
def run(callers):
    live = {}
    while not callers.finished:
        for index in callers.due():
            live[index] = callers.requests[index]["output_tokens"]
        assert len(live) <= 2, "more at a time than there are callers"
        if "fail" in sys.argv:
            raise ValueError("no\\nmemory")
        if "hang" in sys.argv:
            time.sleep(60)
        now = time.perf_counter()
        for index in list(live):
            callers.token(index, 1, now)
            live[index] -= 1
            if not live[index]:
                del live[index]
                callers.end(index, now)
        print("noise", end="")
serve(run, lambda windows: [[-1.0] * (len(window) - 1) for window in windows])
"""


def driver(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    return [sys.executable, str(tmp_path / "driver.py"), str(DRIVERS), *more]


def test_a_driver_runs_loads_until_it_is_stopped(place: Place, tmp_path: Path) -> None:
    loads = Loads(place, Plan(("W4",), 2, 20.0, 2))
    with driven(driver(tmp_path), tmp_path / "log") as session:
        for turn in range(2):
            outcome = session.measure(loads.of("W4", turn), tmp_path)
            assert outcome.error is None
            assert outcome.figures is not None
            assert outcome.figures["output_tokens"] == 64
            assert outcome.memory_mb is not None
            assert outcome.memory_mb > 1
    assert session.process.returncode is not None


@pytest.mark.parametrize(
    ("mode", "limit", "says"), [("fail", 20.0, "ValueError: no memory"), ("hang", 0.3, "no end within")]
)
def test_a_driver_that_fails_or_hangs(place: Place, tmp_path: Path, mode: str, limit: float, says: str) -> None:
    load = Loads(place, Plan(("W4",), 1, limit, 2)).of("W4", 0)
    with driven(driver(tmp_path, mode), tmp_path / "log") as session:
        outcome = session.measure(load, tmp_path)
    assert outcome.figures is None
    assert says in str(outcome.error)
    assert outcome.broken
    assert session.process.returncode is not None


def test_a_driver_that_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import there_is_no_such_module"]
    with pytest.raises(Unavailable, match="ModuleNotFoundError"), driven(command, tmp_path / "log"):
        raise AssertionError("it cannot be up")


# ---------------------------------------------------------------------------------------------------- installation


def test_an_installation_that_fails_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(Unavailable, match="no room"):
        run_logged([sys.executable, "-c", "import sys; sys.exit('no room')"], log, float("inf"))
    with pytest.raises(Unavailable, match="not done in time"):
        run_logged([sys.executable, "-c", "import time; time.sleep(30)"], log, 0.0)
    with pytest.raises(Unavailable, match="could not be run"):
        run_logged([str(tmp_path / "none")], log, float("inf"))
    assert "no room" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("compiler", "needed"),
    [
        ("c++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright", True),
        ("g++ (GCC) 11.4.1 20231218", True),
        ("g++ (GCC) 12.4.0", False),
        ("c++ (Ubuntu 13.2.0-4ubuntu3) 13.2.0", True),
        ("g++ (GCC) 14.1.0", False),
        ("Debian clang version 13.0.1", False),
        ("", False),
    ],
)
def test_compilers_that_break_amx_are_known(compiler: str, needed: bool) -> None:
    assert needs_workaround(compiler, "flags : fpu amx_tile amx_int8") is needed
    assert not needs_workaround(compiler, "flags : fpu avx512f")


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "installed.json").write_text('[["torch==1"]]', encoding="utf-8")
    Environment(tmp_path, [["torch==1"]], 1.0).make()  # would need an index otherwise
    assert not (tmp_path / "bin").exists()
