"""Damaged model files, in ways that nobody would think of: each is read, or refused by an error of `errors`, without
asking for more memory than a small file can need."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.tiny_gguf import write_gguf
from helpers.tiny_models import write_checkpoint
from noria.errors import ModelError
from noria.files.generation import load_generation_defaults
from noria.files.gguf import GGUFFile
from noria.files.resolve import resolve
from noria.files.safetensors import SafetensorsCheckpoint
from noria.frontend.template import load_template
from noria.frontend.tokenizer import load_tokenizer
from noria.models.loaders import open_checkpoint

MOST = 64 << 20  # bytes that reading one of these files (under 1 MB) may ask for
NUMBERS = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**61, 2**63 - 1, 2**63, 2**64 - 1)
FEW = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@contextmanager
def bounded() -> Iterator[None]:
    """Passes errors of models; fails if more memory was asked for than MOST."""
    said = None
    tracemalloc.start()
    try:
        yield
    except ModelError as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST
    assert said is None or 0 < len(said) < 2000


def use(path: Path) -> None:
    """All that a server reads of a model before it serves."""
    files = resolve(str(path))
    checkpoint = open_checkpoint(files)
    assert checkpoint.config.layers > 0
    for name in sorted(checkpoint.names):
        if len(checkpoint.shape(name)) == 1:
            checkpoint.vector(name)
    load_generation_defaults(files)
    tokenizer = load_tokenizer(files)
    template = load_template(files, tokenizer)
    ids = tokenizer.encode("a wheel – größer", add_bos=True)
    assert isinstance(tokenizer.decode(ids, skip_special=True), str)
    if template is not None:
        tokenizer.encode_rendered(template.render([{"role": "user", "content": "a"}]))


# ---------------------------------------------------------------------------------------------------- GGUF


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write_gguf("llama", path, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    use(path)
    return path.read_bytes()


def head_of(data: bytes, path: Path) -> int:
    """Bytes before the tensors' data."""
    path.write_bytes(data)
    return min(tensor.offset for tensor in GGUFFile(path).tensors.values())


edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(NUMBERS).map(lambda number: struct.pack("<Q", number))
        | st.sampled_from(NUMBERS[:10]).map(lambda number: struct.pack("<I", number & 0xFFFFFFFF))
        | st.binary(min_size=1, max_size=4),
        st.sampled_from(["over", "insert", "cut", "end"]),
    ),
    min_size=1,
    max_size=3,
)


def edited(data: bytes, head: int, changes: list[tuple[float, bytes, str]]) -> bytes:
    made = bytearray(data)
    for where, value, how in changes:
        at = int(where * min(head, len(made)))
        if how == "over":
            made[at : at + len(value)] = value
        elif how == "insert":
            made[at:at] = value
        elif how == "cut":
            del made[at : at + len(value)]
        else:
            del made[at:]
    return bytes(made)


@settings(max_examples=100, **FEW)
@given(edits)
def test_gguf(gguf: bytes, tmp_path: Path, changes: list[tuple[float, bytes, str]]) -> None:
    path = tmp_path / "odd.gguf"
    head = head_of(gguf, path)
    path.write_bytes(edited(gguf, head, changes))
    with bounded():
        use(path)


# ---------------------------------------------------------------------------------------------------- safetensors

counts = st.sampled_from([-1, 0, 1, 2, 3, 6, 24, 25, 2**31, 2**32, 2**40, 2**63, 2**64, 10**30])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", "f32"]),
        "shape": st.lists(counts, max_size=4),
        "data_offsets": st.lists(counts, min_size=1, max_size=3),
    }
) | st.recursive(st.none() | counts | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@settings(max_examples=100, **FEW)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "", "__metadata__", "ö"]), entries, max_size=3),
    st.integers(0, 30),
    st.none() | st.sampled_from(NUMBERS),
    st.integers(0, 8),
)
def test_safetensors(tmp_path: Path, header: dict[str, Any], size: int, length: int | None, cut: int) -> None:
    """A header of any entries, of a wrong length or cut off, before `size` bytes of data."""
    path = tmp_path / "odd.safetensors"
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text) if length is None else length) + text + bytes(size)
    path.write_bytes(data[: len(data) - cut])
    with bounded():
        checkpoint = SafetensorsCheckpoint(path)
        for name in checkpoint.names:
            assert checkpoint.array(name).shape == checkpoint.shape(name)


# ---------------------------------------------------------------------------------------------------- JSON beside them

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 700)
    | st.sampled_from([2**31, 2**63, 10**30, -1, 0, 0.5, 1e308, float("nan"), float("inf")])
    | st.sampled_from(["", "llama", "qwen3", "silu", "linear", "F32", "</s>", "<0x0A>", "{{ messages }}", "{% if %}"])
    | st.text(st.characters(exclude_categories=()), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "rope_type", "factor", "content", "special", "id"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hf") / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    write_checkpoint("llama_llama3", made, **sizes)
    use(made)
    return made


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """(container, key) of every value within, to the third level."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    inner = [place for _, one in pairs[:40] for place in places(one, depth + 1)] if depth < 2 else []
    return [*((value, key) for key, _ in pairs[:40]), *inner]


@pytest.mark.parametrize("file", FILES)
@settings(max_examples=25, **FEW)
@given(data=st.data())
def test_json_files(folder: Path, file: str, data: st.DataObject) -> None:
    """One or two values of a file replaced by others, or taken out."""
    path = folder / file
    good = path.read_text(encoding="utf-8")
    changed = json.loads(good)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(changed)))
        if data.draw(st.integers(0, 4)) == 0:
            del container[key]
        else:
            container[key] = data.draw(values)
    path.write_text(json.dumps(changed), encoding="utf-8")
    try:
        with bounded():
            use(folder)
    finally:
        path.write_text(good, encoding="utf-8")
