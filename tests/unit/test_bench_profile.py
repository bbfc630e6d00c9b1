"""The step profile: every step is booked once, and its parts are the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.plans import plan
from helpers.tiny_models import write_checkpoint
from noria.bench.offline import run_offline
from noria.bench.profile import HEAD, PREPARE, REST, SAMPLING, WAITING, Profile, kind_of, open_engine
from noria.bench.workloads import BenchRequest
from noria.cli.main import main
from noria.config import DeviceOptions, EngineOptions, ModelOptions, SchedulerOptions
from noria.errors import ConfigError


@pytest.mark.parametrize(
    ("counts", "kind"),
    [([1, 1, 1], "decode"), ([7], "prefill"), ([1, 1, 1, 4], "prefill"), ([1, 1, 1, 3], "mixed"), ([2, 1, 1], "mixed")],
)
def test_kinds_of_steps(counts: list[int], kind: str) -> None:
    assert kind_of(plan(0, [(slot, 0, count, False) for slot, count in enumerate(counts)])) == kind


def make_options(folder: Path, **device: Any) -> EngineOptions:
    return EngineOptions(
        model=ModelOptions(model=str(folder)),
        scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=16),
        device=DeviceOptions(**device),
    )


def test_every_step_and_token_is_booked_once(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    rng = np.random.default_rng(0)
    requests = [BenchRequest("", tuple(rng.integers(0, 300, length).tolist()), 6) for length in (5, 20, 11)]
    profile = Profile()
    with open_engine(make_options(tmp_path), profile) as core:
        records = run_offline(core, requests, 2)
        steps = core.stats.steps_total
    assert [record.output_tokens for record in records] == [6, 6, 6]
    found = profile.kinds
    assert sum(kind.steps for kind in found.values()) == steps
    # The last token that is sampled is not computed.
    assert sum(kind.tokens for kind in found.values()) == 5 + 20 + 11 + 3 * (6 - 1)
    for kind in (found["prefill"], found["decode"]):
        assert {WAITING, PREPARE, HEAD, SAMPLING, REST, "linear 160→96", "attention 6/2×16"} <= set(kind.parts)
        assert min(kind.parts.values()) >= -1e-9
        assert kind.schedule > 0
        assert kind.update > 0
    shown = profile.as_json()["decode"]
    assert shown["steps"] == found["decode"].steps
    assert shown["tokens_per_step"] == found["decode"].tokens / found["decode"].steps
    assert sum(shown["parts_ms"].values()) == pytest.approx(shown["step_ms"])


def test_without_a_profile_the_engine_is_the_plain_one(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    with open_engine(make_options(tmp_path)) as core:
        records = run_offline(core, [BenchRequest("", (1, 2, 3), 2)], 1)
    assert records[0].output_tokens == 2


def test_a_backend_without_clocks_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="--profile"),
        open_engine(make_options(tmp_path, backend="reference"), Profile()),
    ):
        pass


def test_the_command_prints_and_writes_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint("llama", tmp_path / "model")
    path = tmp_path / "out.json"
    load = ["--num-requests", "3", "--concurrency", "2", "--input-len", "12", "--output-len", "4"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "offline", "--model", str(tmp_path / "model"), *load, "--profile", "--json", str(path)])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "decode:" in out
    assert "waiting for a plan" in out
    profile = json.loads(path.read_text(encoding="utf-8"))["profile"]
    assert {"steps", "tokens_per_step", "step_ms", "parts_ms", "engine_schedule_ms", "engine_update_ms"} == set(
        profile["decode"]
    )
