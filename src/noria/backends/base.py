"""The op protocol: what a model is made of, and what a backend must be able to do with it.

A model does not call kernels. It *describes* its forward pass once, as a `Graph` of the ops below over values whose row
count (tokens of the step, or rows that need logits) is only known at each step. A backend compiles the graph into a
`Program` and may fuse neighbouring ops (norm + quantise, product + residual …) as it likes. At each step the program
runs over a `Batch` without any Python per op, token or row. One-op graphs are also how ops are tested, backend against
reference.

All values are float32 [rows, width] in meaning. A backend may hold them otherwise between ops where no op reads them in
between. A row's result never depends on other rows, on their number, on threads or on chunking (DESIGN §1.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from noria.params import SamplingParams
from noria.plan import Float32, Int32, TokenLogProbs, UInt32

Rows = Literal["tokens", "outputs"]
SchemeName = Literal["f32", "bf16", "int8", "int4"]
CacheType = Literal["f32", "bf16", "int8"]
Activation = Literal["silu", "gelu_tanh"]


# ---------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class DenseSource:
    """An unpacked weight, before a backend packs it. `values`: float32, float16 or bfloat16 [n, k] (n outputs)."""

    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return (int(self.values.shape[0]), int(self.values.shape[1]))


@dataclass(frozen=True, slots=True)
class GroupedSource:
    """An unpacked quantised weight: w[n, k] = scales[n, k // group] * codes[n, k] + minimums[n, k // group].

    bits 4: uint8 codes 0…15 (narrower types fit); bits 8: int8 codes -127…127, no minimums. `group` divides k, or the
    last group is short: there are ceil(k / group) groups.
    """

    bits: Literal[4, 8]
    codes: NDArray[Any]  # [n, k]
    scales: Float32  # [n, groups]
    minimums: Float32 | None  # [n, groups]
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return (int(self.codes.shape[0]), int(self.codes.shape[1]))


WeightSource = DenseSource | GroupedSource


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight is held and multiplied. `group`: products per scale along K, for int8 and int4.

    int8: symmetric codes -127…127, one scale per output row and group; activations quantised per token and group the
    same way; scale = max|x| / 127; exact int32 sums within a group; groups added in float32 in ascending order.
    int8, wide: one scale per output row; activations of 16 bits, codes -32384…32384 with one scale per token,
    scale = max|x| / 32384, multiplied as two bytes: exact sums over the whole row.
    int4: codes 0…15 with float scale and minimum per output row and group; activations as for int8 in groups of the
    same size.
    bf16: weights and activations rounded to bfloat16 (nearest even), sums in float32.
    """

    name: SchemeName
    group: int = 0
    wide: bool = False

    def __str__(self) -> str:
        if self.wide:
            return f"{self.name}/a16"
        return f"{self.name}/{self.group}" if self.group else self.name


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that a backend has packed. `data` belongs to the backend."""

    scheme: Scheme
    n: int
    k: int
    nbytes: int
    data: Any


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table [vocab, width], float32 or bfloat16, gathered by row. `data` belongs to the backend."""

    vocab: int
    width: int
    nbytes: int
    data: Any


# ---------------------------------------------------------------------------------------------------- graph


@dataclass(frozen=True, slots=True)
class Value:
    """A result within a graph: float32 [rows, width]."""

    index: int
    width: int
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = table[input_ids[t]] * scale."""

    table: Table
    scale: float
    out: Value


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm: out = x / sqrt(mean(x²) + eps) * weight (+ residual)."""

    x: Value
    weight: Float32  # [width]
    eps: float
    residual: Value | None
    out: Value


@dataclass(frozen=True, slots=True)
class Linear:
    """out = concat(x @ part.T for part in parts) (+ bias) (+ residual). Parts may differ in scheme."""

    x: Value
    parts: tuple[Weight, ...]
    bias: Float32 | None  # [sum of n]
    residual: Value | None
    out: Value


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias). Either both biases are given or none."""

    x: Value
    gate: Weight
    up: Weight
    activation: Activation
    out: Value
    gate_bias: Float32 | None = None  # [n]
    up_bias: Float32 | None = None  # [n]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotations by position, fixed once from the longest context. cos, sin: [max_model_len, rotary_dim // 2]; any
    attention factor (yarn, longrope) is multiplied in. Pairs are (i, i + rotary_dim // 2); further dims are kept."""

    cos: Float32
    sin: Float32

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.cos.shape[1])


@dataclass(frozen=True, slots=True)
class RopeCache:
    """Splits qkv into heads, norms each query and key head (if weights are given), rotates both by position, writes
    keys and values of `layer` to the cache at `kv_positions`, and yields the queries [tokens, heads * head_dim]."""

    qkv: Value  # width (heads + 2 * kv_heads) * head_dim, in the order q, k, v
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeTable | None
    q_norm: Float32 | None  # [head_dim]
    k_norm: Float32 | None  # [head_dim]
    eps: float
    out: Value


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of `layer` over the cache: position p sees p - window + 1 … p (window 0: 0 … p).

    scores = softcap * tanh(q·k * scale / softcap) if softcap else q·k * scale.
    """

    q: Value
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    out: Value  # width heads * head_dim


@dataclass(frozen=True, slots=True)
class Select:
    """out[i] = x[output_rows[i]]: from here on only rows that need logits."""

    x: Value
    out: Value


Op = Embed | Norm | Linear | GatedLinear | RopeCache | Attention | Select


@dataclass(slots=True)
class Graph:
    """A forward pass as a list of ops in execution order, built once through the methods below.

    `hidden` is the value whose selected rows feed the head (already normed); `head` turns it into logits:
    logits = softcap(hidden @ head.T * logit_scale).
    """

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    hidden: Value | None = None
    head: Weight | None = None
    logit_softcap: float = 0.0
    logit_scale: float = 1.0

    def value(self, width: int, rows: Rows = "tokens") -> Value:
        made = Value(len(self.values), width, rows)
        self.values.append(made)
        return made

    def embed(self, table: Table, scale: float = 1.0) -> Value:
        out = self.value(table.width)
        self.ops.append(Embed(table, scale, out))
        return out

    def norm(self, x: Value, weight: Float32, eps: float, residual: Value | None = None) -> Value:
        out = self.value(x.width, x.rows)
        self.ops.append(Norm(x, weight, eps, residual, out))
        return out

    def linear(
        self, x: Value, parts: Sequence[Weight], bias: Float32 | None = None, residual: Value | None = None
    ) -> Value:
        out = self.value(sum(part.n for part in parts), x.rows)
        self.ops.append(Linear(x, tuple(parts), bias, residual, out))
        return out

    def gated_linear(
        self,
        x: Value,
        gate: Weight,
        up: Weight,
        activation: Activation,
        gate_bias: Float32 | None = None,
        up_bias: Float32 | None = None,
    ) -> Value:
        out = self.value(gate.n, x.rows)
        self.ops.append(GatedLinear(x, gate, up, activation, out, gate_bias, up_bias))
        return out

    def rope_cache(
        self,
        qkv: Value,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: RopeTable | None,
        q_norm: Float32 | None = None,
        k_norm: Float32 | None = None,
        eps: float = 1e-6,
    ) -> Value:
        out = self.value(heads * head_dim)
        self.ops.append(RopeCache(qkv, layer, heads, kv_heads, head_dim, rope, q_norm, k_norm, eps, out))
        return out

    def attention(
        self,
        q: Value,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Value:
        out = self.value(heads * head_dim)
        self.ops.append(Attention(q, layer, heads, kv_heads, head_dim, scale, window, softcap, out))
        return out

    def select(self, x: Value) -> Value:
        out = self.value(x.width, "outputs")
        self.ops.append(Select(x, out))
        return out


# ---------------------------------------------------------------------------------------------------- step


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shape of the paged KV cache. Its arrays belong to the backend."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens
    num_blocks: int
    dtype: CacheType

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values (int8: with a float32 scale per token and head)."""
        per_token = {"f32": 4 * self.head_dim, "bf16": 2 * self.head_dim, "int8": self.head_dim + 4}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.block_size * per_token


@dataclass(slots=True)
class Batch:
    """Arrays of one step, ready for the kernels. Tokens of a sequence are neighbours, in ascending position."""

    input_ids: Int32  # [tokens]
    positions: Int32  # [tokens]
    kv_positions: Int32  # [tokens] block_id * block_size + offset: where keys and values are written
    query_starts: Int32  # [seqs + 1] first token of each sequence
    kv_lengths: Int32  # [seqs] valid cache tokens once this step has written
    slots: Int32  # [seqs] row in block_tables
    block_tables: Int32  # [slots of the worker, most blocks of a sequence], C-contiguous, permanent
    output_rows: Int32  # [outputs] tokens whose hidden state feeds the head


@dataclass(frozen=True, slots=True)
class Limits:
    """Most rows that a program must hold: tokens of a step, rows of the head's product at once."""

    max_tokens: int
    max_outputs: int
    max_seqs: int


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """What a sampler must know of a request. Token ids outside the vocabulary have been refused before."""

    params: SamplingParams  # seed is set
    choice: int
    stop_ids: tuple[int, ...]  # impossible before params.min_tokens
    token_ids: Int32  # prompt, then output so far
    prompt_length: int


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some of the rows of a call may yield, at least one each."""

    rows: Int32  # [masked] indices of the rows
    bits: UInt32  # [masked, ceil(vocab / 32)], C-contiguous; bit t % 32 of word t // 32 stands for token t


class Sampler(Protocol):
    """Turns logits into tokens, with a state per slot (parameters, penalties), so that a step needs no Python per row.

    The random number of a token depends on (seed, choice, output position) only: Philox4x32-10 (Salmon et al.,
    SC 2011), key = seed, counter = (output position, choice, 0, 0), u = (first word >> 8) * 2**-24 in [0, 1).
    A token is drawn by walking the kept probabilities in ascending token id until their sum exceeds u * total.
    Order of operations: mask, logit bias, repetition, frequency and presence penalties, end tokens before min_tokens
    (unless a mask allows nothing else), temperature, top-k, top-p, min-p (ties at a threshold are kept). Greedy takes
    the lowest id of the largest logit. Log-probabilities are those of the model: of the logits as they are given.
    """

    def admit(self, slot: int, sampling: SlotSampling) -> None: ...

    def release(self, slot: int) -> None: ...

    def sample(
        self, logits: Float32, slots: Int32, output_positions: Int32, masks: TokenMasks | None = None
    ) -> tuple[Int32, TokenLogProbs | None]:
        """logits [rows, vocab] (may be overwritten), slots [rows], output_positions [rows]: index in the output of the
        token to be drawn. Records the drawn tokens in the slots' penalty state. Log-probabilities if any row asked."""
        ...

    def score(self, logits: Float32, targets: Int32, k: int) -> TokenLogProbs:
        """Log-probabilities of given targets [rows] and the k most likely tokens."""
        ...


class Cache(Protocol):
    """Keys and values of all layers, owned by a backend."""

    @property
    def layout(self) -> CacheLayout: ...

    def copy_blocks(self, pairs: Int32) -> None:
        """Copies whole blocks: pairs [copies, 2] of source and destination, over all layers."""
        ...


class Program(Protocol):
    """A compiled graph with its work space."""

    def run(self, batch: Batch, cache: Cache) -> int:
        """Computes the batch, writes the cache and keeps the selected hidden rows; returns their number."""
        ...

    def logits(self, start: int, stop: int) -> Float32:
        """Logits [stop - start, vocab] of hidden rows of the last run: a view, valid until the next call.
        At most `limits.max_outputs` rows at once."""
        ...

    def largest(self, start: int, stop: int) -> Int32:
        """Of each of these rows the lowest id of the largest logit: what a `Sampler` takes where nothing else is
        asked. A backend need not make the logits for it."""
        ...


class Backend(Protocol):
    """A device with its ops."""

    @property
    def name(self) -> str: ...

    @property
    def isa(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def wide_int8(self) -> bool:
        """Whether int8 weights are best multiplied by activations of 16 bits (`Scheme`)."""
        ...

    def pack(self, source: WeightSource, scheme: Scheme) -> Weight:
        """Packs for the kernels; quantises a dense source, keeps a grouped one exactly if bits and group agree.
        Called from several threads at once."""
        ...

    def table(self, values: NDArray[Any], dtype: Literal["f32", "bf16"]) -> Table:
        """Holds an embedding table [vocab, width] given as any float type. Called from several threads at once."""
        ...

    def table_of(self, weight: Weight) -> Table:
        """An f32 or bf16 weight's rows as an embedding table, of no memory of its own."""
        ...

    def new_cache(self, layout: CacheLayout) -> Cache: ...

    def compile(self, graph: Graph, limits: Limits) -> Program: ...

    def new_sampler(self, slots: int, vocab: int) -> Sampler: ...

    def rest(self) -> None:
        """Nothing will be asked for a while: no thread of the backend need wait awake."""
        ...
