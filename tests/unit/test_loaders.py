"""Checkpoints of both kinds: names, rows in their place, and weights that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file, save_file

from helpers.forward import prompt_logits
from helpers.tiny_gguf import write_gguf
from helpers.tiny_models import CASES, make_tensors, write_checkpoint
from noria.backends import get_backend
from noria.backends.base import GroupedSource
from noria.config import ModelOptions
from noria.errors import ModelError, UnsupportedModelError, WeightsError
from noria.files.resolve import resolve
from noria.models.loaders import Checkpoint, open_checkpoint
from noria.models.registry import build_model
from noria.quantize.schemes import dequantise_source

PROMPT = np.random.default_rng(7).integers(0, 320, 40).tolist()
IN_BOTH = sorted(CASES.keys() - {"llama_dynamic", "llama_yarn", "qwen2_window", "gemma3_linear"})


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(resolve(str(path)))


def change(folder: Path, remove: tuple[str, ...] = (), **add: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if name not in remove}
    save_file(kept | add, folder / "model.safetensors")


def build(path: Path, **options: Any) -> Any:
    backend = get_backend("reference")
    return build_model(opened(path), backend, ModelOptions(model=str(path), **options), 64)


@pytest.mark.parametrize("name", IN_BOTH)
def test_gguf_gives_the_logits_of_safetensors(name: str, tmp_path: Path) -> None:
    # GGUF files do not record Gemma's query_pre_attn_scalar: it is the head's width there.
    changes = {"query_pre_attn_scalar": 32} if name == "gemma3" else {}
    write_checkpoint(name, tmp_path / "hf", **changes)
    write_gguf(name, tmp_path / "tiny.gguf", **changes)
    first = prompt_logits(str(tmp_path / "hf"), PROMPT, "reference", dtype="f32")
    second = prompt_logits(str(tmp_path / "tiny.gguf"), PROMPT, "reference", dtype="f32")
    np.testing.assert_allclose(second, first, rtol=0, atol=2e-5)
    assert np.abs(first).max() > 1


@pytest.mark.parametrize(
    ("options", "shared"),
    [({"dtype": "f32"}, True), ({"dtype": "bf16"}, True), ({"quantization": "int8"}, False)],
)
def test_a_tied_head_is_the_table_too_where_it_holds_values_as_they_are(
    options: dict[str, str], shared: bool, tmp_path: Path
) -> None:
    write_checkpoint("llama_tied", tmp_path)
    model = build(tmp_path, **options)
    table = model.graph.ops[0].table
    assert (table.vocab, table.width) == (model.config.vocab, model.config.hidden)
    assert (table.data is model.graph.head.data) == shared
    assert (table.nbytes == 0) == shared


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama_biases", "phi3"])
def test_rows_of_a_gguf_in_their_place(name: str, kind: str, tmp_path: Path) -> None:
    """Grouped sources too: q and k rows of a Llama are stored in the order of rotated pairs."""
    config = write_gguf(name, tmp_path / "tiny.gguf", kind=kind)
    checkpoint = opened(tmp_path / "tiny.gguf")
    for key, values in make_tensors(config).items():
        if values.ndim == 1:
            np.testing.assert_array_equal(checkpoint.vector(key), values)
            continue
        source = checkpoint.source(key)
        assert isinstance(source, GroupedSource) == kind.startswith("Q")
        held = dequantise_source(source)
        near = {"F16": 1e-3, "Q4_1": 0.06, "Q8_0": 0.006}[kind] * (values.max() - values.min())
        np.testing.assert_allclose(held, values, rtol=0, atol=near)


def test_gguf_config(tmp_path: Path) -> None:
    write_gguf("llama_tied", tmp_path / "tiny.gguf", kind="Q4_1")
    config = opened(tmp_path / "tiny.gguf").config
    assert config.tied
    assert config.stored_dtype == "Q4_1"
    assert (config.vocab, config.head_dim, config.rope.theta, config.max_position) == (320, 32, 1e5, 512)


def test_gguf_lists_required_keys(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "bare.gguf", "qwen2")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"qwen2\.context_length, qwen2\.attention\.layer_norm_rms_epsilon"):
        opened(tmp_path / "bare.gguf")


def test_gguf_of_unknown_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "bare.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported: llama, qwen2"):
        opened(tmp_path / "bare.gguf")


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_exactly_the_weights_it_needs(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    model = build(tmp_path, dtype="f32")
    floats = sum(values.size for values in load_file(tmp_path / "model.safetensors").values())
    # A tied table is held once, to gather from and to multiply by; besides there are the rope tables.
    assert 0 <= model.weight_bytes - 4 * floats <= 2 * 2 * 64 * 16 * 4
    assert model.schemes == "f32"


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    change(tmp_path, remove=("model.layers.1.mlp.up_proj.weight", "lm_head.weight"))
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight, model\.layers\.1\.mlp\.up_proj\.weight"):
        build(tmp_path)


def test_superfluous_weights_are_named_and_known_leftovers_are_not(tmp_path: Path) -> None:
    write_checkpoint("llama_tied", tmp_path)
    leftovers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
        "lm_head.weight": np.zeros((320, 96), np.float32),
    }
    change(tmp_path, **leftovers)
    build(tmp_path)
    change(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": np.zeros(192, np.float32)})
    with pytest.raises(WeightsError, match=r"superfluous: model\.layers\.0\.self_attn\.q_proj\.bias$"):
        build(tmp_path)


def test_wrong_shapes_are_named_before_anything_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("llama", tmp_path)
    change(tmp_path, **{"model.layers.2.mlp.down_proj.weight": np.zeros((96, 161), np.float32)})
    monkeypatch.setattr("noria.backends.reference.backend.ReferenceBackend.pack", lambda *_: pytest.fail("packed"))
    with pytest.raises(WeightsError, match=r"down_proj\.weight is \[96, 161\], must be \[96, 160\]"):
        build(tmp_path)


def test_sizes_of_a_config_are_not_believed(tmp_path: Path) -> None:
    """Neither its widths nor its context are allocated before the weights have shown that they are true."""
    config = write_checkpoint("llama_biases", tmp_path)
    lies = {"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1, "max_position_embeddings": 2**31 - 1}
    (tmp_path / "config.json").write_text(json.dumps(config | lies | {"head_dim": 16}))
    with pytest.raises(WeightsError, match="wrong shape"):
        build_model(opened(tmp_path), get_backend("reference"), ModelOptions(model="x"), 2**31 - 1)


def test_many_faults_are_counted(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.3\.input_layernorm\.weight, .* and 10 more$"):
        build(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    change(tmp_path, **{"model.layers.0.mlp.up_proj.weight": np.zeros((160, 96), np.int32)})
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight is stored as I32"):
        build(tmp_path)


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    config = write_checkpoint("llama", tmp_path)
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UnsupportedModelError, match="'gptq'"):
        opened(tmp_path)


def test_multimodal_prefixes_are_taken_off(tmp_path: Path) -> None:
    config = write_checkpoint("gemma3", tmp_path)
    plain = prompt_logits(str(tmp_path), PROMPT, "reference", dtype="f32")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {"language_model." + name: values for name, values in tensors.items()}
    renamed["vision_tower.embeddings.weight"] = np.zeros((2, 2), np.float32)
    save_file(renamed, tmp_path / "model.safetensors")
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    np.testing.assert_array_equal(prompt_logits(str(tmp_path), PROMPT, "reference", dtype="f32"), plain)


def test_quantised_gguf_keeps_its_schemes(tmp_path: Path) -> None:
    write_gguf("phi3", tmp_path / "tiny.gguf", kind="Q4_1")
    assert build(tmp_path / "tiny.gguf").schemes == "int4/32"
    assert build(tmp_path / "tiny.gguf", dtype="f32").schemes == "f32"
    assert build(tmp_path / "tiny.gguf", quantization="none").schemes == "bf16"
