"""The recipes that Noria is asked to run: every command of the file means what is written there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_checkpoint
from noria.bench.http import Record
from noria.bench.workloads import WorkloadSpec
from noria.cli import bench_batching
from noria.cli.bench_common import LoadRun
from noria.cli.main import main
from noria.config import EngineOptions

RECIPES = Path(__file__).parents[1] / "data" / "commands.md"


def recipes() -> list[list[str]]:
    """Every `noria bench` command, loops unrolled."""
    text = RECIPES.read_text(encoding="utf-8").replace("\\\n", " ")
    found, names, values = [], "", [""]
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["for"]:
            names, values = words[1], [word.strip(";") for word in words[3 : words.index("do")]]
        elif words == ["done"]:
            names, values = "", [""]
        elif words[:2] == ["noria", "bench"]:
            assert not names or f"${names}" in line
            found += [shlex.split(line.replace(f"${names}", value) if names else line)[1:] for value in values]
    return found


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineOptions, WorkloadSpec]]:
    """What would have been run."""
    seen: list[tuple[EngineOptions, WorkloadSpec]] = []

    def fake(options: EngineOptions, spec: WorkloadSpec, *_: Any) -> LoadRun:
        seen.append((options, spec))
        return LoadRun([Record(start=0.0, end=1.0, chunks=[0.5, 1.0], prompt_tokens=1, output_tokens=2)])

    monkeypatch.setattr(bench_batching, "run_in_process", fake)
    return seen


def test_every_recipe_but_that_of_experts_runs(
    asked: list[tuple[EngineOptions, WorkloadSpec]], capsys: pytest.CaptureFixture[str]
) -> None:
    commands = recipes()
    assert len(commands) == 1 + 6 + 2 + 1
    assert [run(command) for command in commands[:9]] == [0] * 9
    assert [spec.requests for _, spec in asked] == [1000] + [500] * 8
    assert {(spec.concurrency, spec.input, spec.output) for _, spec in asked} == {(100, 128, 128)}
    assert all(options.scheduler.continuous for options, _ in asked)
    assert [options.scheduler.max_num_seqs for options, _ in asked[1:7]] == [32, 64, 128, 256, 512, 1024]
    assert [options.pacer.enabled for options, _ in asked] == [True] + [False] * 6 + [True, False]
    assert all(options.scheduler.max_num_batched_tokens >= options.scheduler.max_num_seqs for options, _ in asked)
    capsys.readouterr()
    assert run(commands[9]) == 2
    said = capsys.readouterr().err
    assert re.search(r"--enable-moe-optimization: is not yet possible: .*experts", said)


@pytest.mark.parametrize(
    ("flags", "adaptive", "most"),
    [
        ((), True, 256),
        (("--batch-size", "64"), False, 64),
        (("--batch-size", "64", "--enable-adaptive-batch-size", "true"), True, 64),
        (("--enable-adaptive-batch-size", "false"), False, 256),
        (("--enable-continuous-batching", "false"), False, 256),
        (("--enable-moe-optimization", "false"), True, 256),
    ],
)
def test_who_sets_the_size(
    flags: tuple[str, ...], adaptive: bool, most: int, asked: list[tuple[EngineOptions, WorkloadSpec]]
) -> None:
    assert run(["bench", "continuous-batching", "--model", "m", "--slo-tpot-ms", "20", *flags]) == 0
    options, _ = asked[0]
    assert options.pacer.enabled is adaptive
    assert options.pacer.slo_tpot_ms == 20
    assert options.scheduler.max_num_seqs == most


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch-size", "0"), "--batch-size: must be in 1…1024"),
        (("--batch-size", "2000"), "--batch-size: must be in 1…1024"),
        (("--enable-adaptive-batch-size", "yes"), "--enable-adaptive-batch-size: must be true or false"),
        (
            ("--enable-continuous-batching", "false", "--enable-adaptive-batch-size", "true"),
            "--enable-adaptive-batch-size: a static batch has a fixed size",
        ),
        (("--slo-ttft-ms", "0"), "--slo-ttft-ms: must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "continuous-batching", "--model", "m", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_sizes_hold_on_a_real_engine(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "model")
    out = tmp_path / "found.json"
    load = ["--num-requests", "24", "--concurrency", "12", "--input-len", "6", "--output-len", "6"]
    command = ["bench", "continuous-batching", "--model", str(tmp_path / "model"), *load, "--threads", "1"]
    assert run([*command, "--batch-size", "3", "--json", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["median"]["completed"] == 24
    assert found["median"]["sizes"]["running"]["most"] == 3
    assert found["median"]["sizes"]["batch"] == {"least": 3, "median": 3.0, "most": 3}
    assert run([*command, "--enable-continuous-batching", "false", "--batch-size", "12", "--json", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["median"]["completed"] == 24
