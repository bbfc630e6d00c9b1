"""Checkpoints with random weights in the shapes of known models: speed depends on the shape, not on the values.

python benchmarks/random_model.py qwen2.5-1.5b --type Q4_0 --output build/models/qwen2.5-1.5b-Q4_0.gguf
python benchmarks/random_model.py qwen2.5-0.5b --type BF16 --output build/models/qwen2.5-0.5b        # safetensors

A name that ends in .gguf gets a GGUF file in Q4_0, Q8_0 or BF16, any other a directory of safetensors in bf16 as
Hugging Face lays it out. The tokeniser is the demo model's, filled up to the shape's vocabulary with tokens that
nothing encodes to. Written piece by piece, within some 200 MB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray
from tokenizers import AddedToken

from noria.errors import NoriaError
from noria.files.gguf import open_gguf
from noria.files.resolve import resolve
from noria.frontend.tokenizer import load_tokenizer

PIECE = 32 << 20  # weights that are made at a time
BLOCK = 32  # weights that share a scale in Q4_0 and Q8_0
# Per block: bytes, and the standard deviation of evenly drawn codes in units of the scale.
_TYPES: dict[str, tuple[int, float]] = {"Q4_0": (18, 4.61), "Q8_0": (34, 73.9), "BF16": (64, 1.0)}
_TOKENIZER_KEYS = ("model", "pre", "merges", "bos_token_id", "eos_token_id", "add_bos_token", "unknown_token_id")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Qwen2 family: biases at queries, keys and values, head tied to the embedding."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int = 151_936
    context: int = 32_768

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name in GGUF, name as Hugging Face has it, shape)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", "model.embed_tokens.weight", (self.vocab, self.width)
        for i in range(self.layers):
            for ours, theirs, shape in (
                ("attn_norm.weight", "input_layernorm.weight", (self.width,)),
                ("attn_q.weight", "self_attn.q_proj.weight", (q, self.width)),
                ("attn_q.bias", "self_attn.q_proj.bias", (q,)),
                ("attn_k.weight", "self_attn.k_proj.weight", (kv, self.width)),
                ("attn_k.bias", "self_attn.k_proj.bias", (kv,)),
                ("attn_v.weight", "self_attn.v_proj.weight", (kv, self.width)),
                ("attn_v.bias", "self_attn.v_proj.bias", (kv,)),
                ("attn_output.weight", "self_attn.o_proj.weight", (self.width, q)),
                ("ffn_norm.weight", "post_attention_layernorm.weight", (self.width,)),
                ("ffn_gate.weight", "mlp.gate_proj.weight", (self.mlp, self.width)),
                ("ffn_up.weight", "mlp.up_proj.weight", (self.mlp, self.width)),
                ("ffn_down.weight", "mlp.down_proj.weight", (self.width, self.mlp)),
            ):
                yield f"blk.{i}.{ours}", f"model.layers.{i}.{theirs}", shape
        yield "output_norm.weight", "model.norm.weight", (self.width,)


SHAPES = {
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 128, 8960),
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 64, 4864),
    "tiny": Shape(2, 128, 4, 2, 32, 256, 49_280, 512),
}


def write_model(shape: Shape, kind: str, target: Path, donor: str = "smollm2") -> None:
    """Writes it; the file or directory is there when everything is in it.

    Args:
        kind: Q4_0, Q8_0 or BF16. donor: a GGUF model whose tokeniser is taken.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if target.suffix == ".gguf":
        _write_gguf(shape, kind, part, donor)
    else:
        part.mkdir(exist_ok=True)
        _write_safetensors(shape, part, donor)
    os.replace(part, target)


# ------------------------------------------------------------------------------------------------ GGUF


def _write_gguf(shape: Shape, kind: str, path: Path, donor: str) -> None:
    writer = GGUFWriter(path, "qwen2")
    writer.add_name("random weights")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, shape.vocab, donor)
    type_ = GGMLQuantizationType[kind]
    named = [(name, dims) for name, _, dims in shape.tensors()]
    for name, dims in named:
        if len(dims) == 1:
            writer.add_tensor_info(name, dims, np.dtype(np.float32), 4 * dims[0])
        else:
            row = dims[1] // BLOCK * _TYPES[kind][0]
            writer.add_tensor_info(name, (dims[0], row), np.dtype(np.uint8), dims[0] * row, type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    assert writer.fout is not None
    file: BinaryIO = writer.fout[0]
    file.write(bytes(-file.tell() % writer.data_alignment))
    for name, dims in named:
        written = 0
        for piece in _vector(name, dims[0]) if len(dims) == 1 else _matrix(dims, kind, rng):
            file.write(piece)
            written += piece.nbytes
        file.write(bytes(-written % writer.data_alignment))
    writer.close()


def _add_tokenizer(writer: GGUFWriter, vocab: int, donor: str) -> None:
    metadata = open_gguf(resolve(donor).path).metadata
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    spare = vocab - len(tokens)
    if spare < 0:
        raise ValueError(f"the donor has {len(tokens)} tokens, the shape only {vocab}")
    writer.add_token_list(tokens + [f"<|spare{i}|>" for i in range(spare)])
    writer.add_token_types([int(kind) for kind in types] + [int(TokenType.UNUSED)] * spare)
    add: dict[str, Any] = {
        "model": writer.add_tokenizer_model,
        "pre": writer.add_tokenizer_pre,
        "merges": writer.add_token_merges,
        "bos_token_id": writer.add_bos_token_id,
        "eos_token_id": writer.add_eos_token_id,
        "add_bos_token": writer.add_add_bos_token,
        "unknown_token_id": writer.add_unk_token_id,
    }
    for key in _TOKENIZER_KEYS:
        if (value := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            add[key](list(value) if key == "merges" else value)


# ------------------------------------------------------------------------------------------------ safetensors


def _write_safetensors(shape: Shape, folder: Path, donor: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for _, name, dims in shape.tensors():
        nbytes = 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, name, dims in shape.tensors():
            if len(dims) == 1:
                for values in _vector(name, dims[0]):
                    file.write((values.view(np.uint32) >> 16).astype(np.uint16))
            else:
                for piece in _matrix(dims, "BF16", rng):
                    file.write(piece)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1), encoding="utf-8")
    tokenizer = load_tokenizer(resolve(donor)).raw
    spare = shape.vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|spare{i}|>", special=True) for i in range(spare)])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


# ------------------------------------------------------------------------------------------------ values


def _vector(name: str, length: int) -> Iterator[NDArray[np.float32]]:
    yield np.zeros(length, np.float32) if name.endswith("bias") else np.ones(length, np.float32)


def _matrix(dims: tuple[int, ...], kind: str, rng: np.random.Generator) -> Iterator[NDArray[Any]]:
    """Rows of a matrix as they are stored, some at a time; values of variance 1 / columns, so that nothing grows."""
    size, spread = _TYPES[kind]
    rows = max(1, PIECE // dims[1])
    for start in range(0, dims[0], rows):
        blocks = min(rows, dims[0] - start) * dims[1] // BLOCK
        if kind == "BF16":
            values = rng.standard_normal(blocks * BLOCK, np.float32) / np.float32(dims[1] ** 0.5)
            yield (values.view(np.uint32) >> 16).astype(np.uint16)
            continue
        scale = np.float16(1.0 / (spread * dims[1] ** 0.5))
        made = np.empty((blocks, size), np.uint8)
        made[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        made[:, 2:] = rng.integers(0, 256, (blocks, size - 2), np.uint8)
        yield made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("--type", default="Q4_0", choices=tuple(_TYPES))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", default="smollm2", help="a GGUF model whose tokeniser is taken")
    args = parser.parse_args()
    if args.output.suffix != ".gguf" and args.type != "BF16":
        parser.error("safetensors are written in BF16 only; for the others the name must end in .gguf")
    try:
        write_model(SHAPES[args.shape], args.type, args.output, args.tokenizer)
    except (NoriaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
