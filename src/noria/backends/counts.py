"""Operations and bytes that a step cannot do without, op by op, from a model's graph and a batch.

Counted are the products (a multiply-add is two operations) and the bytes that must move at least once. Not counted:
exponentials, norms, rotations, sorting; so an op that does much of these cannot reach its limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from noria.backends.base import (
    Attention,
    Batch,
    CacheLayout,
    Embed,
    GatedLinear,
    Graph,
    Linear,
    Norm,
    Op,
    RopeCache,
    Scheme,
    Select,
    Value,
    Weight,
)

Arithmetic = Literal["f32", "bf16", "int8"]
Key = tuple[str, int | None]  # as CpuProgram.times() names an entry: name, index of the op (None: the head)
# Bytes of one key or value of one head with a dim of d: (per dim, beside them).
_CACHE_BYTES = {"f32": (4, 0), "bf16": (2, 0), "int8": (1, 4)}
_CACHE_ARITHMETIC: dict[str, Arithmetic] = {"f32": "f32", "bf16": "bf16", "int8": "int8"}
_ARITHMETIC: dict[str, Arithmetic] = {"f32": "f32", "bf16": "bf16", "int8": "int8", "int4": "int8"}


@dataclass(frozen=True, slots=True)
class Work:
    """The least that one run of an op does.

    Attributes:
        label: op and shape, for people; equal for the same op of all layers.
        operations: by arithmetic.
        stored: bytes of weights, tables, keys and values: they lie in memory between steps.
        passing: bytes of activations that come in and go out.
    """

    label: str
    operations: dict[Arithmetic, int] = field(default_factory=dict)
    stored: int = 0
    passing: int = 0

    @property
    def all_operations(self) -> int:
        return sum(self.operations.values())


def count_step(graph: Graph, batch: Batch, cache: CacheLayout) -> dict[Key, Work]:
    """Work of every op that runs, of the conversions of results for the products that read them, and of the head.

    Args:
        batch: of the step. cache: layout of the cache.
    """
    counter = _Counter(graph, batch, cache)
    return dict(counter.works())


def product_work(parts: tuple[Weight, ...], rows: int) -> Work:
    """x @ concat(parts).T with so many rows."""
    n = sum(part.n for part in parts)
    return Work(
        f"{parts[0].k}→{n} {_schemes(parts)}",
        _products(parts, rows),
        sum(part.nbytes for part in parts),
        rows * (_operand_bytes(parts) + 4 * n),
    )


@dataclass(slots=True)
class _Readers:
    """What is read of a value: its floats, and forms (format, group) that products take it in."""

    floats: bool = False
    forms: set[tuple[str, int]] = field(default_factory=set)


class _Counter:
    def __init__(self, graph: Graph, batch: Batch, cache: CacheLayout) -> None:
        self._graph = graph
        self._batch = batch
        self._cache = cache
        self._rows = {"tokens": len(batch.input_ids), "outputs": len(batch.output_rows)}
        self._readers = _find_readers(graph)

    def works(self) -> Iterator[tuple[Key, Work]]:
        for index, op in enumerate(self._graph.ops):
            rows = self._rows[op.out.rows]
            if not rows:
                continue
            yield (op_name(op), index), self._work(op, rows)
            converted = 0 if isinstance(op, Norm) else self._form_bytes(op.out, made=True)
            if converted:
                width = op.out.width
                yield ("convert", index), Work(f"convert {width}", passing=rows * (4 * width + converted))
        if self._graph.head is not None and self._graph.hidden is not None and self._rows["outputs"]:
            yield ("head", None), self._head(self._graph.head)

    def _work(self, op: Op, rows: int) -> Work:
        match op:
            case Embed():
                stored = rows * op.table.nbytes // op.table.vocab
                return Work(op_shape(op), stored=stored, passing=4 * rows * op.out.width)
            case Norm():
                return self._norm(op, rows)
            case Linear():
                return self._linear(op, rows)
            case GatedLinear():
                both = (op.gate, op.up)
                label = f"{op_shape(op)} {_schemes(both)}"
                biases = 0 if op.gate_bias is None else 8 * op.gate.n
                return Work(
                    label,
                    _products(both, rows),
                    sum(part.nbytes for part in both) + biases,
                    rows * (_operand_bytes(both) + 4 * op.out.width),
                )
            case RopeCache():
                written = 2 * rows * op.kv_heads * self._entry_bytes(op.head_dim)
                return Work(
                    op_shape(op),
                    stored=written,
                    passing=4 * rows * (op.qkv.width + op.out.width),
                )
            case Attention():
                return self._attention(op, rows)
            case Select():
                return Work(op_shape(op), passing=8 * rows * op.out.width)

    def _norm(self, op: Norm, rows: int) -> Work:
        width = op.out.width
        read = 4 * width * (1 if op.residual is None else 2)
        written = self._form_bytes(op.out, made=True) + (4 * width if self._readers[op.out.index].floats else 0)
        return Work(op_shape(op), stored=op.weight.nbytes, passing=rows * (read + written))

    def _linear(self, op: Linear, rows: int) -> Work:
        stored = sum(part.nbytes for part in op.parts) + (0 if op.bias is None else op.bias.nbytes)
        written = 4 * op.out.width * (1 if op.residual is None else 2)
        return Work(
            f"{op_shape(op)} {_schemes(op.parts)}",
            _products(op.parts, rows),
            stored,
            rows * (_operand_bytes(op.parts) + written),
        )

    def _head(self, head: Weight) -> Work:
        # Of each row only the largest logit leaves the head.
        rows = self._rows["outputs"]
        label = f"head {head.k}→{head.n} {head.scheme}"
        return Work(label, _products((head,), rows), head.nbytes, rows * (_operand_bytes((head,)) + 4))

    def _attention(self, op: Attention, rows: int) -> Work:
        seen, held = visible_keys(self._batch, op.window)
        window = f", window {op.window}" if op.window else ""
        return Work(
            f"{op_shape(op)} {self._cache.dtype}{window}",
            {_CACHE_ARITHMETIC[self._cache.dtype]: 4 * seen * op.heads * op.head_dim},
            2 * held * op.kv_heads * self._entry_bytes(op.head_dim),
            4 * rows * (op.q.width + op.out.width),
        )

    def _entry_bytes(self, head_dim: int) -> int:
        each, beside = _CACHE_BYTES[self._cache.dtype]
        return each * head_dim + beside

    def _form_bytes(self, value: Value, made: bool) -> int:
        """Bytes per row of the forms of a value that are apart from its floats."""
        forms = self._readers[value.index].forms
        return sum(_bytes_of_form(form, value.width) for form in forms if not _floats_serve(form, value.width))


def visible_keys(batch: Batch, window: int) -> tuple[int, int]:
    """Key positions that the batch's tokens see, summed over tokens; and distinct ones, summed over sequences."""
    positions = batch.positions.astype(np.int64)
    seen = np.minimum(positions + 1, window) if window else positions + 1
    firsts = positions[batch.query_starts[:-1]]
    lasts = positions[batch.query_starts[1:] - 1]
    low = np.maximum(0, firsts - window + 1) if window else 0
    return int(seen.sum()), int((lasts + 1 - low).sum())


def op_name(op: Op) -> str:
    """As the native program names it."""
    names: dict[type, str] = {
        Embed: "embed",
        Norm: "norm",
        Linear: "linear",
        GatedLinear: "gated_linear",
        RopeCache: "rope_cache",
        Attention: "attention",
        Select: "select",
    }
    return names[type(op)]


def op_shape(op: Op) -> str:
    """Op and shape, for people."""
    match op:
        case Linear():
            return f"linear {op.x.width}→{op.out.width}"
        case GatedLinear():
            return f"gated linear {op.x.width}→2×{op.out.width}"
        case RopeCache():
            return f"rope, cache {op.heads}+{op.kv_heads}×{op.head_dim}"
        case Attention():
            return f"attention {op.heads}/{op.kv_heads}×{op.head_dim}"
        case _:
            return f"{op_name(op)} {op.out.width}"


def _find_readers(graph: Graph) -> dict[int, _Readers]:
    readers = {value.index: _Readers() for value in graph.values}

    def product(x: Value, parts: tuple[Weight, ...]) -> None:
        for form in _forms(parts):
            readers[x.index].forms.add(form)
            if _floats_serve(form, x.width):
                readers[x.index].floats = True

    def plain(*values: Value | None) -> None:
        for value in values:
            if value is not None:
                readers[value.index].floats = True

    for op in graph.ops:
        match op:
            case Norm():
                plain(op.x, op.residual)
            case Linear():
                product(op.x, op.parts)
                plain(op.residual)
            case GatedLinear():
                product(op.x, (op.gate, op.up))
            case RopeCache():
                plain(op.qkv)
            case Attention():
                plain(op.q)
            case Select():
                plain(op.x)
    if graph.hidden is not None:
        plain(graph.hidden)
        if graph.head is not None:
            product(graph.hidden, (graph.head,))
    return readers


def _forms(parts: tuple[Weight, ...]) -> set[tuple[str, int]]:
    """int8 and int4 of one group take their operand in one form: int8 codes, a scale and a sum per group; wide int8
    takes 16 bits a value."""
    return {("wide" if part.scheme.wide else _ARITHMETIC[part.scheme.name], part.scheme.group) for part in parts}


def _floats_serve(form: tuple[str, int], width: int) -> bool:
    return form[0] == "f32" and width % 64 == 0  # rows are padded to 64


def _bytes_of_form(form: tuple[str, int], width: int) -> int:
    name, group = form
    if name == "int8":
        return width + 8 * -(-width // group)
    return width * (4 if name == "f32" else 2)


def _operand_bytes(parts: tuple[Weight, ...]) -> int:
    return sum(_bytes_of_form(form, parts[0].k) for form in _forms(parts))


def _products(parts: tuple[Weight, ...], rows: int) -> dict[Arithmetic, int]:
    operations: dict[Arithmetic, int] = {}
    for part in parts:
        kind = _ARITHMETIC[part.scheme.name]
        bytes_of_activation = 2 if part.scheme.wide else 1  # each byte is a product of its own
        operations[kind] = operations.get(kind, 0) + 2 * rows * part.n * part.k * bytes_of_activation
    return operations


def _schemes(parts: tuple[Weight, ...]) -> str:
    schemes: list[Scheme] = []
    for part in parts:
        if part.scheme not in schemes:
            schemes.append(part.scheme)
    return "+".join(map(str, schemes))
