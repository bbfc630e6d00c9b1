"""Checkpoints with random weights: both forms hold the same model, in the shape that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_model import Shape, write_model

from helpers.tiny_gguf import write_gguf
from noria.files.resolve import resolve
from noria.frontend.tokenizer import load_tokenizer
from noria.models.loaders import open_checkpoint
from noria.quantize.schemes import dequantise_source

TINY = Shape(2, 64, 4, 2, 16, 96, 640, 256)


@pytest.fixture
def donor(tmp_path: Path) -> str:
    write_gguf("llama", tmp_path / "donor.gguf", kind="F32")
    return str(tmp_path / "donor.gguf")


def test_gguf_and_safetensors_hold_the_same_model(tmp_path: Path, donor: str) -> None:
    write_model(TINY, "BF16", tmp_path / "a.gguf", donor)
    write_model(TINY, "BF16", tmp_path / "b", donor)
    ours, theirs = open_checkpoint(resolve(str(tmp_path / "a.gguf"))), open_checkpoint(resolve(str(tmp_path / "b")))
    assert ours.names == theirs.names
    for name in ours.names:
        if len(ours.shape(name)) == 1:
            np.testing.assert_array_equal(ours.vector(name), theirs.vector(name))
        else:
            values = dequantise_source(ours.source(name))
            np.testing.assert_array_equal(values, dequantise_source(theirs.source(name)))
            assert np.std(values) == pytest.approx(values.shape[1] ** -0.5, rel=0.05)
    for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "tied", "qkv_bias", "max_position", "vocab"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    assert ours.config.vocab == 640
    text = "The wheel turns."
    wanted = load_tokenizer(resolve(donor)).encode(text, add_bos=False)
    for made in ("a.gguf", "b"):
        assert load_tokenizer(resolve(str(tmp_path / made))).encode(text, add_bos=False) == wanted


@pytest.mark.parametrize(("kind", "held"), [("Q4_0", "q4_0"), ("Q8_0", "q8_0")])
def test_quantised_weights_have_the_same_spread(tmp_path: Path, donor: str, kind: str, held: str) -> None:
    write_model(TINY, kind, tmp_path / "a.gguf", donor)
    checkpoint = open_checkpoint(resolve(str(tmp_path / "a.gguf")))
    assert checkpoint.config.stored_dtype.lower() == held
    values = dequantise_source(checkpoint.source("model.layers.1.mlp.down_proj.weight"))
    assert values.shape == (64, 96)
    assert np.std(values) == pytest.approx(96**-0.5, rel=0.1)
    assert not list(tmp_path.glob("*.part"))
