// The micro-kernel of all schemes: R rows × V vectors of outputs, whose accumulators stay in registers over all steps.
// A scheme says what a step looks like: how many phases it has (which units to multiply with which activations), and
// how one unit is multiplied.
#pragma once
#include "kernels/linear.h"
#include "kernels/linear_dot.h"

namespace noria::NORIA_ISA {

constexpr int kAheadOfRow = 8192;  // bytes

// Steps of several rows that are written out one after the other: what does not multiply comes between them only once.
#if defined(__AVX512F__)
constexpr int kBlockPhases = 8;
#else
constexpr int kBlockPhases = 2;
#endif
// Where a panel is fetched during so few tiles, they wait for it.
constexpr int kFewTiles = 6;
template <class Step> constexpr int block_steps = kBlockPhases / Step::phases;

// The four bytes at p in every lane. Assembly keeps the vector in a register; otherwise the broadcast is folded into
// every product as a load of its own, and loads become the limit.
static inline Vi broadcast_unit(const char* p) {
#if defined(__AVX512F__)
  Vi v;
  asm volatile("vpbroadcastd %1, %0" : "=v"(v) : "m"(*reinterpret_cast<const char(*)[4]>(p)));
  return v;
#else
  int32_t unit;
  std::memcpy(&unit, p, 4);
  return set1_int(unit);
#endif
}

// Weights are asked for a good while before their use, into the second-level cache; the processor itself does not look
// beyond a page. A single row asks for its own panel's, taller tiles for a share of the next panel's.
struct Ahead {
  const char* at;
  int64_t half, step;  // two streams, `half` bytes apart; bytes per step of each
  bool by_block;       // a little, for tiles that have more to do than to wait: as one stream, `lines` at the start of a block
  int64_t lines;
  template <class Step> static Ahead of(const ProductTile& tile) {
    const int64_t bytes = 2 * tile.ahead_step * block_steps<Step>;  // of a block: whole lines of it, or it would ask for much twice
    const bool by_block = tile.ahead_step < kStepBytes / 2 / kFewTiles && (bytes == 0 || bytes >= 64);
    return {tile.ahead, tile.ahead_half, tile.ahead_step, by_block, (bytes + 63) / 64};
  }
  inline __attribute__((always_inline)) void block() {
    for (const char* const end = at + lines * 64; at != end; at += 64) __builtin_prefetch(at, 0, 2);
  }
  inline __attribute__((always_inline)) void one_step() {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + half, 0, 2);
    if (step == kStepBytes) {  // whole steps: neighbouring lines do not come by themselves where memory is the limit
      __builtin_prefetch(at + 64, 0, 2);
      __builtin_prefetch(at + half + 64, 0, 2);
    }
    at += step;
  }
};

// apart: from one line of a step to the next.
template <int apart> static inline void prefetch_row(const char* w) {
#pragma GCC unroll 4
  for (int line = 0; line < kStepBytes / 64; ++line) __builtin_prefetch(w + kAheadOfRow + line * apart, 0, 2);
}

struct StepF32 {
  using Accumulator = Vf;
  static constexpr bool tiled = false;
  static constexpr int phases = 1, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return unit; }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x); }
  static void dot(Vf& acc, Vi w, Vi x) { dot_f32(acc, w, x); }
};

#ifdef NORIA_DOT_BF16
struct StepBf16 {
  using Accumulator = Vf;
  static constexpr bool tiled = true;
  static constexpr int phases = 1, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return unit; }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x); }
  static void dot(Vf& acc, Vi w, Vi x) { dot_bf16(acc, w, x); }
};
#else
struct StepBf16 {  // widened to float32: first the lower index of each pair, then the higher
  using Accumulator = Vf;
  static constexpr bool tiled = true;
  static constexpr int phases = 2, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return phase ? high_halves(unit) : low_halves(unit); }
  template <int phase> static Vi activation(const char* x) {
    return phase ? high_halves(broadcast_unit(x)) : low_halves(broadcast_unit(x));
  }
  static void dot(Vf& acc, Vi w, Vi x) { dot_f32(acc, w, x); }
};
#endif

struct StepInt8 {
  using Accumulator = Vi;
  static constexpr bool tiled = true, in_pairs = false;
  static constexpr int phases = 1, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return int8_weight(unit); }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x); }
  static void dot(Vi& acc, Vi w, Vi x) { dot_int8(acc, w, x); }
};

struct StepInt4 {
  using Accumulator = Vi;
  static constexpr bool tiled = false;
  static constexpr bool in_pairs = true;  // where the level has NORIA_PAIR_SUMS
  static constexpr int phases = 2, x_bytes = 8;
  template <int phase> static Vi weight(Vi unit) { return phase ? high_nibbles(unit) : low_nibbles(unit); }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x + 4 * phase); }
  static void dot(Vi& acc, Vi w, Vi x) { dot_int4(acc, w, x); }
};

// Keeps what one phase loaded from being held in registers for the next.
static inline void forget_loads() { asm volatile("" ::: "memory"); }

// Where a step's units are: those of the panel's first and second half, as far as a tile of V vectors takes them.
struct Units {
  const char *first, *second;
};

template <class Step> static inline Vi unit_vector(const Units& w, int v) {
  const int column = v * kLanes;
  if (!Step::tiled) return load_units(w.first + column * 4);
  return load_units((column < 32 ? w.first : w.second) + column / 16 % 2 * kChunkTileBytes + column % 16 * 4);
}

template <class Step, int phase, int R, int V>
static inline __attribute__((always_inline)) void phase_of_step(typename Step::Accumulator (&acc)[R][V], const Units& w,
                                                                const char* const (&x)[R], int64_t offset) {
  if (R == 1) {
    const Vi activation = Step::template activation<phase>(x[0] + offset);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) Step::dot(acc[0][v], Step::template weight<phase>(unit_vector<Step>(w, v)), activation);
    return;
  }
  Vi units[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) units[v] = Step::template weight<phase>(unit_vector<Step>(w, v));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vi activation = Step::template activation<phase>(x[r] + offset);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) Step::dot(acc[r][v], units[v], activation);
  }
  if (Step::phases == 2) forget_loads();
}

// Where the units of step `first` are.
template <class Step> static inline Units units_at(const char* panel, int column, uint64_t first) {
  if (!Step::tiled) {
    const char* w = panel + first * kStepBytes + column * 4;
    return {w, w};
  }
  const uint64_t chunk = first / kChunkSteps;
  const char* w = panel + chunk * kChunkBytes + first % kChunkSteps * 64;
  return {w + tile_offset(chunk, column / 16) + column % 16 * 4, w + tile_offset(chunk, 2)};
}

// One step, whose activations are `offset` bytes into the rows; moves on to the units of the next in its chunk.
template <class Step, int R, int V>
static inline __attribute__((always_inline)) void add_step(typename Step::Accumulator (&acc)[R][V], Units& w,
                                                           const char* const (&x)[R], int64_t offset) {
  phase_of_step<Step, 0>(acc, w, x, offset);
  if (Step::phases == 2) phase_of_step<Step, Step::phases - 1>(acc, w, x, offset);
  w.first += Step::tiled ? 64 : kStepBytes;
  w.second += Step::tiled ? 64 : kStepBytes;
}

// Steps `first` … `first + count - 1`, all in one chunk.
template <class Step, int R, int V, int count>
static inline __attribute__((always_inline)) void add_block(typename Step::Accumulator (&acc)[R][V], const char* panel,
                                                            int column, const char* const (&x)[R], int64_t first) {
  Units w = units_at<Step>(panel, column, first);
#pragma GCC unroll 8
  for (int step = 0; step < count; ++step) add_step<Step, R, V>(acc, w, x, (first + step) * Step::x_bytes);
}

// Adds steps `first` … `last - 1` of the outputs from `column` on, one after the other.
template <class Step, int R, int V>
static inline __attribute__((always_inline)) void add_singly(typename Step::Accumulator (&acc)[R][V], const char* panel,
                                                             int column, const char* const (&x)[R], int64_t first,
                                                             int64_t last, Ahead& ahead) {
  for (int64_t stop; first < last; first = stop) {
    const int64_t next = Step::tiled ? (first / kChunkSteps + 1) * kChunkSteps : last;
    stop = next < last ? next : last;
    Units w = units_at<Step>(panel, column, first);
    // Where the halves lie does not matter here: all of a step's lines are asked for.
    const char* line = Step::tiled ? panel + first / kChunkSteps * kChunkBytes + first % kChunkSteps * 64 : w.first;
    for (int64_t offset = first * Step::x_bytes; offset < stop * Step::x_bytes; offset += Step::x_bytes) {
      if (R == 1) prefetch_row<Step::tiled ? kChunkTileBytes : 64>(line);
      else ahead.one_step();
      add_step<Step, R, V>(acc, w, x, offset);
      line += Step::tiled ? 64 : kStepBytes;
    }
  }
}

// The same, in blocks where there are several rows. A chunk is some blocks: none reaches into the next if it begins in its place.
template <class Step, int R, int V>
static inline __attribute__((always_inline)) void add_steps(typename Step::Accumulator (&acc)[R][V], const char* panel,
                                                            int column, const char* const (&x)[R], int64_t first,
                                                            int64_t last, Ahead& ahead) {
  constexpr int block = block_steps<Step>;
  const bool blocks = R > 1 && ahead.by_block && first % block == 0;
  for (; blocks && first + block <= last; first += block) {
    ahead.block();
    add_block<Step, R, V, block>(acc, panel, column, x, first);
  }
  add_singly<Step, R, V>(acc, panel, column, x, first, last, ahead);
}

// The same, where sums of products with 4-bit weights stay in 16 bits for four steps.
template <class Step, int R, int V>
static inline __attribute__((always_inline)) void add_whole_steps(Vi (&acc)[R][V], const char* panel,
                                                                  int column, const char* const (&x)[R], int64_t first,
                                                                  int64_t last, Ahead& ahead) {
#ifdef NORIA_PAIR_SUMS
  if (Step::in_pairs) {
    for (int64_t stop; first < last; first = stop) {
      stop = first + 4 < last ? first + 4 : last;
      Vi pairs[R][V];
#pragma GCC unroll 128
      for (int i = 0; i < R * V; ++i) pairs[i / V][i % V] = set1_int(0);
      add_steps<Step, R, V>(pairs, panel, column, x, first, stop, ahead);
#pragma GCC unroll 128
      for (int i = 0; i < R * V; ++i) acc[i / V][i % V] = add_pairs(acc[i / V][i % V], pairs[i / V][i % V]);
    }
    return;
  }
#endif
  add_steps<Step, R, V>(acc, panel, column, x, first, last, ahead);
}

// Scales or minimums of a group's outputs from `column` on, as float32; `wide` is room for V vectors of them.
template <int V>
static inline const float* group_floats(const ProductTile& tile, const char* packed, int64_t index, float* wide) {
  if (!tile.half_scales) return reinterpret_cast<const float*>(packed) + index;
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v)
    store(wide + v * kLanes, load_half(reinterpret_cast<const uint16_t*>(packed) + index + v * kLanes));
  return wide;
}

// The same in registers.
template <int V>
static inline void group_vectors(const ProductTile& tile, const char* packed, int64_t index, Vf (&vectors)[V]) {
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v)
    vectors[v] = tile.half_scales ? load_half(reinterpret_cast<const uint16_t*>(packed) + index + v * kLanes)
                                  : load(reinterpret_cast<const float*>(packed) + index + v * kLanes);
}

// Sums of a row's bytes `high` and `low` → their product's value.
static inline Vf wide_value(Vi high, Vi low, float x_scale, Vf scale) {
  return mul(fma(set1(kDigit), to_float(high), to_float(low)), mul(set1(x_scale), scale));
}

}  // namespace noria::NORIA_ISA
