"""Finding models on this machine, and the defaults that come with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from noria.errors import PullError, WeightsError
from noria.files.catalog import KNOWN
from noria.files.generation import GenerationDefaults, load_generation_defaults
from noria.files.resolve import models_dir, resolve


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NORIA_HOME", str(tmp_path / "noria"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def weights(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gguf_file(path: Path, **values: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.add_token_list(["<|endoftext|>", "a", "<|im_end|>", "<|end|>"])
    writer.add_token_types([3, 1, 3, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def snapshot(tmp_path: Path, repo: str, commit: str = "0123abcd", ref: str | None = "0123abcd") -> Path:
    folder = tmp_path / "hf" / "hub" / f"models--{repo.replace('/', '--')}"
    if ref:
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(ref)
    return folder / "snapshots" / commit


def test_directory_and_files(tmp_path: Path) -> None:
    folder = weights(tmp_path / "my-model")
    found = resolve(str(folder))
    assert (found.name, found.kind, found.path) == ("my-model", "safetensors", folder)
    assert found.weight_files == (folder / "model.safetensors",)
    lone = resolve(str(folder / "model.safetensors"))
    assert (lone.kind, lone.folder) == ("safetensors", folder)
    file = gguf_file(tmp_path / "small.Q4_0.gguf")
    found = resolve(str(file))
    assert (found.name, found.kind, found.path, found.folder) == ("small.Q4_0", "gguf", file, tmp_path)


def test_gguf_is_known_by_its_content_too(tmp_path: Path) -> None:
    blob = gguf_file(tmp_path / "x.gguf").rename(tmp_path / "sha256-1234")
    assert resolve(str(blob)).kind == "gguf"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(WeightsError, match=r"neither a \.gguf nor a \.safetensors"):
        resolve(str(tmp_path / "notes.txt"))


def test_several_gguf_files_need_a_choice(tmp_path: Path) -> None:
    for kind in ("Q4_K_M", "Q4_K", "Q8_0"):
        gguf_file(tmp_path / "m" / f"m-{kind}.gguf")
    with pytest.raises(WeightsError, match="several GGUF files; append :NAME to choose one of m-Q4_K"):
        resolve(str(tmp_path / "m"))
    assert resolve(f"{tmp_path / 'm'}:q8").path.name == "m-Q8_0.gguf"
    assert resolve(f"{tmp_path / 'm'}:Q4_K").path.name == "m-Q4_K.gguf"
    with pytest.raises(WeightsError, match="fits 0 of the GGUF files"):
        resolve(f"{tmp_path / 'm'}:Q6")


def test_split_gguf_is_one_model(tmp_path: Path) -> None:
    for i in (1, 2):
        gguf_file(tmp_path / f"m-0000{i}-of-00002.gguf")
    assert [p.name for p in resolve(str(tmp_path)).weight_files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(WeightsError, match=r"m-00002-of-00002\.gguf is missing"):
        resolve(str(tmp_path))


def test_repository_in_the_hub_cache(tmp_path: Path) -> None:
    weights(snapshot(tmp_path, "owner/name"))
    weights(snapshot(tmp_path, "owner/name", "ffff", None))
    found = resolve("owner/name")
    assert (found.name, found.kind, found.path.name) == ("owner/name", "safetensors", "0123abcd")


def test_repository_without_a_ref_is_found(tmp_path: Path) -> None:
    weights(snapshot(tmp_path, "owner/name", "ffff", None))
    assert resolve("owner/name").path.name == "ffff"


def test_a_hostile_ref_does_not_leave_the_cache(tmp_path: Path) -> None:
    weights(tmp_path / "elsewhere")
    snapshot(tmp_path, "owner/name", ref="../../../../elsewhere")
    with pytest.raises(PullError, match="noria pull owner/name"):
        resolve("owner/name")


def test_short_name() -> None:
    with pytest.raises(PullError, match="run `noria pull smollm2`"):
        resolve("smollm2")
    file = gguf_file(models_dir() / "smollm2" / KNOWN["smollm2"].file)
    found = resolve("smollm2")
    assert (found.name, found.kind, found.path) == ("smollm2", "gguf", file)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2", "did you mean smollm2"),
        ("zzz", "known names are smollm2, gemma3-270m"),
        ("owner/none", "run `noria pull owner/none`"),
        ("./none/here", "no such file or directory"),
        ("none.gguf", "no such file or directory"),
        ("  ", "no model was named"),
    ],
)
def test_what_is_not_here_is_said_in_one_line(model: str, message: str) -> None:
    with pytest.raises(PullError) as caught:
        resolve(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ defaults


def test_generation_config_and_all_end_tokens(tmp_path: Path) -> None:
    folder = weights(tmp_path / "m", eos_token_id=5, text_config={"eos_token_id": [6, 5]})
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    added = {"7": {"content": "<eos>"}, "8": {"content": "<bos>"}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<eos>"}, "added_tokens_decoder": added})
    )
    assert load_generation_defaults(resolve(str(folder))) == GenerationDefaults(
        0.6, 0.9, 20, None, 1.1, (1, 2, 5, 6, 7)
    )


def test_without_generation_config_nothing_is_advised(tmp_path: Path) -> None:
    assert load_generation_defaults(resolve(str(weights(tmp_path / "m")))) == GenerationDefaults()


def test_gguf_end_tokens(tmp_path: Path) -> None:
    file = gguf_file(tmp_path / "m.gguf", eos_token_id=9, eot_token_id=2)
    # <|end|> is an ordinary token there: text, not the end.
    assert load_generation_defaults(resolve(str(file))).end_token_ids == (9, 2, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("top_p", 0), ("top_k", 1.5), ("min_p", float("nan")),
     ("repetition_penalty", 0), ("eos_token_id", "</s>"), ("eos_token_id", [True])],
)  # fmt: skip
def test_senseless_defaults_are_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = weights(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(WeightsError, match=rf"generation_config\.json: {key}"):
        load_generation_defaults(resolve(str(folder)))
