"""Windows, scores and settings of the perplexity evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.forward import prompt_logits
from helpers.tiny_models import write_checkpoint
from noria.backends.base import DenseSource, Scheme
from noria.backends.reference import ReferenceBackend
from noria.bench.perplexity import Evaluator, Regrouped, Score, cut_windows, model_options, window_batch
from noria.errors import ConfigError
from noria.files.resolve import resolve
from noria.models.loaders import open_checkpoint


def test_windows_are_spread_over_the_text() -> None:
    ids = np.arange(100, dtype=np.int32)
    cut = cut_windows(ids, 10, 4, None)
    assert cut.shape == (4, 10)
    assert cut[:, 0].tolist() == [0, 30, 60, 90]
    with_bos = cut_windows(ids, 10, 4, 7)
    assert with_bos.shape == (4, 10)
    assert (with_bos[:, 0] == 7).all()
    assert with_bos[-1, -1] == 99
    with pytest.raises(ConfigError, match="100 tokens; 11 windows need 110"):
        cut_windows(ids, 10, 11, None)


def test_perplexity_and_its_change() -> None:
    base = Score(np.full((2, 50), -np.log(4.0), np.float32), 1.0)
    assert base.perplexity == pytest.approx(4.0)
    worse = Score(base.log_probs - np.float32(0.01), 1.0)
    change, error = worse.change(base)
    assert change == pytest.approx(np.exp(0.01) - 1, rel=1e-4)
    assert error == pytest.approx(0, abs=1e-6)
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 50)).astype(np.float32)
    assert Score(base.log_probs + noise, 1.0).change(base)[1] == pytest.approx(0.01, rel=0.2)


def test_weights_are_named_as_flags() -> None:
    assert model_options("m", "bf16").quantization == "none"
    assert model_options("m", "f32").dtype == "f32"
    assert model_options("m", "int8").quantization == "int8"
    assert model_options("m", "auto").quantization == "auto"
    with pytest.raises(ConfigError, match="--weights"):
        model_options("m", "int3")


def test_regrouped_changes_int8_only() -> None:
    backend = Regrouped(ReferenceBackend(), 192)
    source = DenseSource(np.ones((4, 96), np.float32))
    assert backend.pack(source, Scheme("int8", 64)).scheme == Scheme("int8", 96)
    assert backend.pack(source, Scheme("int4", 32)).scheme == Scheme("int4", 32)
    assert backend.name == "reference"


def test_a_window_is_one_sequence_in_order() -> None:
    batch = window_batch(np.arange(40, dtype=np.int32))
    assert batch.block_tables.tolist() == [[0, 1, 2]]
    assert batch.output_rows.tolist() == list(range(39))
    assert batch.kv_lengths.tolist() == [40]


@pytest.mark.parametrize("weights", ["f32", "int8"])
def test_scores_are_the_log_softmax_of_the_models_logits(tmp_path: Path, weights: str) -> None:
    write_checkpoint("llama", tmp_path / "m")
    backend, options = ReferenceBackend(), model_options("m", weights)
    windows = np.random.default_rng(0).integers(0, 300, (2, 80)).astype(np.int32)  # more than LOGITS_ROWS at once
    evaluator = Evaluator(open_checkpoint(resolve(str(tmp_path / "m"))), backend, options, 80)
    done: list[int] = []
    score = evaluator.score(windows, "f32", lambda: done.append(1))
    assert len(done) == 2
    assert weights in evaluator.model.schemes
    flags = {"dtype": options.dtype, "quantization": options.quantization}
    for window, scored in zip(windows, score.log_probs, strict=True):
        logits = prompt_logits(str(tmp_path / "m"), window.tolist(), "reference", **flags).astype(np.float64)[:-1]
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(scored, np.take_along_axis(expected, window[1:, None], 1)[:, 0], atol=1e-5)
