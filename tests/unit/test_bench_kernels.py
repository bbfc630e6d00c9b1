"""`noria bench kernels`: every op and product at every number of rows, and what oneDNN is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_models import write_checkpoint
from noria import _native
from noria.bench import onednn
from noria.bench.limits import MachineLimits, measure_limits
from noria.bench.products import products_of, random_product, time_products
from noria.bench.steps import Phase, StepBench
from noria.cli.main import main
from noria.config import EngineOptions, ModelOptions
from noria.errors import ConfigError


@pytest.fixture(scope="module")
def limits() -> MachineLimits:
    return measure_limits(2, seconds=0.002, most_bytes=4 << 20)


@pytest.fixture(autouse=True)
def _keep_the_level() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.select_isa(before)


def test_a_model_s_products_are_listed_once(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    _native.select_isa("avx2" if "avx2" in _native.available_isas() else _native.isa())  # whose int8 has groups
    bench = StepBench(
        EngineOptions(model=ModelOptions(model=str(tmp_path), quantization="int8")), [Phase("decode", 1, 2)]
    )
    products = products_of(bench.graph)
    assert [product.label for product in products] == [
        "96→160 int8/64",  # queries, keys, values: 96 + 32 + 32
        "96→96 int8/64",
        "96→320 int8/64",  # gate and up; the head's shape is the same
        "160→96 int8/32",
    ]
    assert [(product.n, product.k) for product in products] == [(160, 96), (96, 96), (320, 96), (96, 160)]


def test_products_are_timed_with_every_number_of_rows(limits: MachineLimits) -> None:
    products = [random_product(scheme, "70x40") for scheme in ("f32", "bf16", "int8/8", "int4/8")]
    asked: list[tuple[str, int, int, int]] = []
    ran: list[int] = []

    class Fake:
        def product(self, scheme: str, n: int, k: int, rows: int) -> Any:
            asked.append((scheme, n, k, rows))
            return None if scheme == "int4" else ran.append

    pool: Any = _native.Pool(2)
    other: Any = Fake()
    times = list(time_products(products, [1, 5], pool, limits, other, 0.001))
    assert [(one.product, one.rows) for one in times] == [
        (f"40→70 {scheme}", rows) for scheme in ("f32", "bf16", "int8/8", "int4/8") for rows in (1, 5)
    ]
    assert all(one.seconds > 0 and one.of_limit > 0 for one in times)
    assert [one.operations for one in times[:2]] == [2 * 70 * 40, 5 * 2 * 70 * 40]
    assert times[4].weight_bytes == products[2].parts[0].nbytes
    assert asked[4:6] == [("int8", 70, 40, 1), ("int8", 70, 40, 5)]
    assert [one.onednn is None for one in times] == [False] * 6 + [True] * 2
    assert ran


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        ("int8/64", "576", "--shapes: must be OUTPUTSxINPUTS"),
        ("int9", "8x8", "--schemes: must be"),
        ("int8/x", "8x8", "--schemes: must be"),
        ("int8/7", "64x64", "--schemes: int8/7 of 64x64"),
        ("f32", "0x8", "--schemes: must be"),
    ],
)
def test_wrong_products_are_refused(scheme: str, shape: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        random_product(scheme, shape)


def test_without_pytorch_there_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(onednn, "importlib", SimpleNamespace(import_module=missing))
    assert onednn.load_onednn(2) is None


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", "kernels", "--seconds", "0.001", *arguments])
    return int(end.value.code or 0)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch, limits: MachineLimits) -> None:
    monkeypatch.setattr("noria.bench.limits.measure_limits", lambda threads: limits)
    monkeypatch.setattr("noria.bench.onednn.load_onednn", lambda threads: None)


@pytest.mark.usefixtures("_quick")
def test_the_command_covers_ops_and_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint("llama", tmp_path / "model")
    path = tmp_path / "out.json"
    model = str(tmp_path / "model")
    assert run("--model", model, "--rows", "1,3,300", "--context", "9", "--threads", "2", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "whole step" in out
    assert "300 rows" in out
    assert "no comparison with oneDNN" in out
    found = json.loads(path.read_text(encoding="utf-8"))
    # More rows than run at once by default are those of one prompt.
    assert [(one["phase"], one["tokens"]) for one in found["ops"]] == [("decode", 1), ("decode", 3), ("prefill", 300)]
    assert {row["op"] for row in found["ops"][0]["ops"]} == {row["op"] for row in found["ops"][2]["ops"]}
    head = next(row for row in found["ops"][2]["ops"] if row["op"].startswith("head"))
    assert head["operations"] == 2 * 300 * 320 * 96
    assert {one["rows"] for one in found["products"]} == {1, 3, 300}
    assert found["onednn"] is None


@pytest.mark.usefixtures("_quick")
def test_products_of_given_shapes_need_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    level = _native.available_isas()[0]
    shapes = ["--shapes", "64x32,32x64", "--schemes", "int8/32,f32", "--rows", "2"]
    assert run(*shapes, "--isa", level, "--threads", "1", "--json", str(path)) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [one["product"] for one in found["products"]] == ["32→64 int8/32", "64→32 int8/32", "32→64 f32", "64→32 f32"]
    assert found["machine"]["isa"] == level
    assert "ops" not in found


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("flags", "message"), [(["--rows", "0"], "--rows: must name"), (["--isa", "avx9000"], "--isa: ISA level 'avx9000'")]
)
def test_wrong_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*flags, "--shapes", "8x8") == 2
    assert message in capsys.readouterr().err
