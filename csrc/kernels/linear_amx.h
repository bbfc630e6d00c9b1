// Products by AMX tiles: rows of bytes or bfloat16 times a panel, straight from the packed layout, in which 16 steps of 16
// outputs are a B tile.
//
// Four tiles of sums stay in registers over all steps: two of 16 rows by two of 16 outputs, twice, or one by four. An
// output's sum takes its steps 16 at a time in ascending order in both. Within those the instruction itself says how: int32
// sums are exact; tdpbf16ps adds the products of even and of odd index apart, fused, then both to the sum, and takes
// subnormal numbers as zero. So a row's result does not depend on the rows beside it.
#pragma once
#include <initializer_list>

#include "kernels/linear_tile.h"
#include "kernels/tiles.h"

#if defined(__AMX_TILE__)

namespace noria::NORIA_ISA {

static constexpr int kAmxRows = 2 * kTileRows;

// Sums of 0–3 in tiles 0–3, rows in 4 and 5, weights in 6 and 7.
struct DotBf16Tiles {
  template <int c, int a, int b> static void dot() { tile_dot_bf16<c, a, b>(); }
};
struct DotByteTiles {  // weights are stored as code + 128
  template <int c, int a, int b> static void dot() { tile_dot_su<c, a, b>(); }
};

// Registers are shaped for a number of rows and of bytes that a product takes of each; shaping them anew costs as much as
// twenty products.
static thread_local int amx_shaped_for = 0;

static inline void amx_shape(int rows, int row_bytes = 64) {
  const int wanted = rows + row_bytes * 256;
  if (wanted == amx_shaped_for) return;
  TileShapes shapes;
  const int first = rows < kTileRows ? rows : kTileRows, second = rows > first ? rows - first : first;
  for (int t : {0, 1}) shapes.set(t, first);
  for (int t : {2, 3}) shapes.set(t, second);
  shapes.set(4, first, row_bytes);
  shapes.set(5, second, row_bytes);
  for (int t : {6, 7}) shapes.set(t, row_bytes / 4);
  tiles_configure(shapes);
  amx_shaped_for = wanted;
}

static void amx_done() {
  if (amx_shaped_for == 0) return;
  tiles_release();
  amx_shaped_for = 0;
}

// What is asked for meanwhile, from `at` to `end`: the next panel by several passes, or, where there is one pass only, the panel
// itself a little ahead of its use.
struct AmxAhead {
  const char *at, *due, *end;
  int64_t apart = 0, step;  // bytes to a second panel, if not zero; bytes per chunk

  AmxAhead(const ProductTile& tile, int64_t passes) : at(tile.ahead), due(at) {
    const bool shared = tile.ahead_half >= kChunkSteps * tile.ahead_step;
    const int64_t bytes = shared ? 2 * tile.ahead_half : tile.panel_bytes, chunks = tile.panel_bytes / kChunkBytes;
    end = at + bytes;
    step = shared ? (bytes / (passes * chunks) + 63) / 64 * 64 : kChunkBytes;
  }
  inline __attribute__((always_inline)) void chunk() { ask(step); }
  // A fourth of it: many lines at once would keep a tile's own loads waiting.
  inline __attribute__((always_inline)) void quarter() { ask(step / 4); }
  inline __attribute__((always_inline)) void ask(int64_t bytes) {
    due += bytes;
    const char* stop = due < end ? due : end;
    for (; at < stop; at += 64) {
      __builtin_prefetch(at, 0, 2);
      if (apart) __builtin_prefetch(at + apart, 0, 2);
    }
  }
};

// What rows are multiplied with: units of two B tiles per chunk. Those of one weight are the halves of its panel; those of two
// weights are tiles of the same outputs.
struct AmxUnits {
  const char *left, *right;  // a unit's tiles lie at tile_offset(chunk, unit * tiles) of each
  int64_t chunks;
  int count, tiles;
  int64_t offset(int64_t chunk, int unit) const { return chunk * kChunkBytes + tile_offset(chunk, unit * tiles); }
};

// 17–32 rows times a unit, which stays in the nearest cache (if it is not too long) from one block of rows to the next: the rows,
// which come once, go past it.
template <class Dot, class Sink>
static void amx_tall(const char* x, int64_t x_stride, const AmxUnits& units, int unit, AmxAhead& ahead, Sink& sink, char* out) {
  const char* second = x + kTileRows * x_stride;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  sink.begin(units.chunks);
  for (int64_t i = 0; i < units.chunks; ++i, x += 64, second += 64) {
    const int64_t at = units.offset(i, unit);
    ahead.chunk();
    tile_stream<4>(x, x_stride);
    tile_load<6>(units.left + at, 64);
    Dot::template dot<0, 4, 6>();
    tile_stream<5>(second, x_stride);
    Dot::template dot<2, 5, 6>();
    tile_load<7>(units.right + at, 64);
    Dot::template dot<3, 5, 7>();
    Dot::template dot<1, 4, 7>();
    sink.meanwhile();
  }
  const int64_t stride = sink.stride();
  tile_store<0>(out, stride);
  tile_store<1>(out + 64, stride);
  tile_store<2>(out + kTileRows * stride, stride);
  tile_store<3>(out + kTileRows * stride + 64, stride);
}

// 1–16 rows times two units.
template <class Dot, class Sink>
static void amx_flat(const char* x, int64_t x_stride, const AmxUnits& units, int unit, AmxAhead& ahead, Sink& sink, char* out) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  sink.begin(units.chunks);
  for (int64_t i = 0; i < units.chunks; ++i, x += 64) {
    const int64_t at = units.offset(i, unit), next = units.offset(i, unit + 1);
    tile_load<4>(x, x_stride);
    ahead.quarter();
    tile_load<6>(units.left + at, 64);
    Dot::template dot<0, 4, 6>();
    ahead.quarter();
    tile_load<7>(units.right + at, 64);
    Dot::template dot<1, 4, 7>();
    ahead.quarter();
    tile_load<6>(units.left + next, 64);
    Dot::template dot<2, 4, 6>();
    ahead.quarter();
    tile_load<7>(units.right + next, 64);
    Dot::template dot<3, 4, 7>();
    sink.meanwhile();
  }
  const int64_t stride = sink.stride();
  tile_store<0>(out, stride);
  tile_store<1>(out + 64, stride);
  tile_store<2>(out + 128, stride);
  tile_store<3>(out + 192, stride);
}

// rows: of 64 bytes per chunk. Sink: tall(row, unit) and flat(row, unit) say where sums of a unit, or two, go; done(…) that they
// are there; between begin(chunks) and that, meanwhile() is called for each chunk.
template <class Dot, class Sink>
static void amx_product(const char* x, int64_t x_stride, int rows, const AmxUnits& units, AmxAhead ahead, Sink& sink) {
  const int whole = rows / kAmxRows * kAmxRows, rest = rows - whole;
  if (whole) {
    amx_shape(kAmxRows);
    for (int unit = 0; unit < units.count; ++unit)
      for (int row = 0; row < whole; row += kAmxRows) {
        amx_tall<Dot>(x + row * x_stride, x_stride, units, unit, ahead, sink, sink.tall(row, unit));
        sink.done(row, kAmxRows, unit, false);
      }
  }
  if (rest == 0) return;
  amx_shape(rest);
  const bool flat = rest <= kTileRows;
  x += whole * x_stride;
  for (int unit = 0; unit < units.count; unit += flat ? 2 : 1) {
    if (flat) amx_flat<Dot>(x, x_stride, units, unit, ahead, sink, sink.flat(whole, unit));
    else amx_tall<Dot>(x, x_stride, units, unit, ahead, sink, sink.tall(whole, unit));
    sink.done(whole, rest, unit, flat);
  }
}

// Sums that are results.
struct AmxFloats {
  float* out;
  int64_t out_stride;
  int64_t stride() const { return out_stride * 4; }
  char* tall(int row, int unit) const { return reinterpret_cast<char*>(out + row * out_stride + unit * kPanel / 2); }
  char* flat(int row, int unit) const { return tall(row, unit); }
  void begin(int64_t) const {}
  void meanwhile() const {}
  void done(int, int, int, bool) const {}
};

// Sums that are converted when the tiles are at the next ones: what a tile has just stored is not there yet, and where a load's
// address has the lower 12 bits of such a store, it would wait too. So blocks take turns at the left and the right half of the
// same rows. Convert: convert(sums, row, unit, count) makes results of `kRows` rows of sums, 256 bytes apart.
template <class Convert> struct AmxSums {
  const Convert convert;
  int turn = 0, row = 0, unit = 0, left = 0, each = 0;  // left: still to be converted of those before, in kRows rows each
  bool is_flat = false, waits = false;
  alignas(64) int32_t talls[kAmxRows][kPanel];
  alignas(64) int32_t flats[2][kTileRows][kPanel];

  explicit AmxSums(const Convert& convert) : convert(convert) {}
  int64_t stride() const { return kStepBytes; }
  char* tall(int, int) { return reinterpret_cast<char*>(talls[0] + turn * kPanel / 2); }
  char* flat(int, int) { return reinterpret_cast<char*>(flats[turn]); }
  void begin(int64_t chunks) {
    waits = chunks > 1;  // one chunk: the last sums are hardly there
    chunks -= waits;
    each = static_cast<int>((left + chunks - 1) / chunks);
  }
  inline __attribute__((always_inline)) void meanwhile() {
    if (waits) {
      waits = false;
      return;
    }
    for (int i = 0; i < each && left > 0; ++i) next();
  }
  void done(int new_row, int new_rows, int new_unit, bool new_flat) {
    turn = 1 - turn;
    row = new_row / Convert::kRows;
    left = new_rows / Convert::kRows;
    unit = new_unit;
    is_flat = new_flat;
  }
  inline __attribute__((always_inline)) void next() {
    const int at = --left;
    if (is_flat) convert(flats[1 - turn][at * Convert::kRows], row + at, unit, 2);
    else convert(talls[at * Convert::kRows] + (1 - turn) * kPanel / 2, row + at, unit, 1);
  }
  void finish() {
    while (left > 0) next();
  }
};

// One vector of a row's results: two rows of bytes' sums for 16-bit activations, or floats.
struct AmxWideValue {
  static constexpr int kRows = 2;
  const ProductTile& tile;
  const float* scales;
  inline __attribute__((always_inline)) Vf operator()(const int32_t* sums, int row, int column) const {
    const Vi high = add_int(load_units(sums), set1_int(-128 * tile.x_sums[2 * row]));
    const Vi low = add_int(load_units(sums + kPanel), set1_int(-128 * tile.x_sums[2 * row + 1]));
    return wide_value(high, low, tile.x_scales[row], load(scales + column));
  }
};
struct AmxFloatValue {
  static constexpr int kRows = 1;
  inline __attribute__((always_inline)) Vf operator()(const int32_t* sums, int, int) const { return as_float(load_units(sums)); }
};

// Product (+ bias) (+ residual).
template <class Value> struct AmxFinish {
  static constexpr int kRows = Value::kRows;
  const Value value;
  const ProductTile& tile;
  inline __attribute__((always_inline)) void operator()(const int32_t* sums, int row, int unit, int count) const {
    for (int c = 0; c < count * kPanel / 2; c += kLanes) {
      const int column = unit * kPanel / 2 + c;
      const int64_t at = row * tile.out_stride + column;
      Vf y = value(sums + c, row, column);
      if (tile.bias) y = add(y, load(tile.bias + column));
      if (tile.residual) y = add(y, load(tile.residual + at));
      store(tile.out + at, y);
    }
  }
};

static AmxUnits amx_halves(const ProductTile& tile) {
  return {tile.panel, tile.panel + kChunkTileBytes, tile.panel_bytes / kChunkBytes, 2, 2};
}

static int64_t amx_passes(int64_t rows, const AmxUnits& units) { return (rows + kAmxRows - 1) / kAmxRows * units.count; }

static void amx_bf16(const ProductTile& tile) {
  const AmxUnits units = amx_halves(tile);
  const AmxAhead ahead(tile, amx_passes(tile.rows, units));
  if (!tile.bias && !tile.residual) {
    AmxFloats sink = {tile.out, tile.out_stride};
    return amx_product<DotBf16Tiles>(tile.x, tile.x_stride, tile.rows, units, ahead, sink);
  }
  AmxSums<AmxFinish<AmxFloatValue>> sink({{}, tile});
  amx_product<DotBf16Tiles>(tile.x, tile.x_stride, tile.rows, units, ahead, sink);
  sink.finish();
}

// A row of 16-bit activations is two rows of bytes.
static void amx_wide(const ProductTile& tile) {
  const AmxUnits units = amx_halves(tile);
  alignas(64) float wide[kPanel];
  AmxSums<AmxFinish<AmxWideValue>> sink({{tile, group_floats<4>(tile, tile.scales, 0, wide)}, tile});
  amx_product<DotByteTiles>(tile.x, tile.x_stride / 2, 2 * tile.rows, units, AmxAhead(tile, amx_passes(2 * tile.rows, units)), sink);
  sink.finish();
}

// activation(gate) * up. A unit's sums are 16 outputs of the one, then the same ones of the other.
template <class Value, Vf (*kActivation)(Vf), bool kBf16> struct AmxGate {
  static constexpr int kRows = Value::kRows;
  const Value gate, up;
  const GatedProductTile& tile;
  inline __attribute__((always_inline)) void operator()(const int32_t* sums, int row, int unit, int count) const {
    for (int i = 0; i < count; ++i, sums += 2 * kLanes) {
      const int column = (unit + i) * kLanes;
      Vf g = gate(sums, row, column), u = up(sums + kLanes, row, column);
      if (tile.gate.bias) g = add(g, load(tile.gate.bias + column));
      if (tile.up.bias) u = add(u, load(tile.up.bias + column));
      const Vf y = mul(kActivation(g), u);
      char* out = tile.out + row * tile.out_bytes;
      // The line that the next block of rows writes here; rows lie too far apart for the processor to see it coming.
      __builtin_prefetch(out + kAmxRows / kRows * tile.out_bytes + column * (kBf16 ? 2 : 4), 1);
      if (kBf16) store_bf16(reinterpret_cast<uint16_t*>(out) + column, y);
      else store(reinterpret_cast<float*>(out) + column, y);
    }
  }
};

template <class Dot, class Convert>
static void amx_gated(const GatedProductTile& tile, int64_t x_stride, int rows, const Convert& convert) {
  const ProductTile& gate = tile.gate;
  const AmxUnits units = {gate.panel, tile.up.panel, gate.panel_bytes / kChunkBytes, kPanel / kLanes, 1};
  AmxAhead ahead(gate, amx_passes(rows, units));
  ahead.apart = tile.up.ahead - gate.ahead;
  AmxSums<Convert> sink(convert);
  amx_product<Dot>(gate.x, x_stride, rows, units, ahead, sink);
  sink.finish();
}

template <Vf (*kActivation)(Vf)> static void amx_gated_bf16(const GatedProductTile& tile) {
  const ProductTile& gate = tile.gate;
  if (tile.out_bf16)
    amx_gated<DotBf16Tiles>(tile, gate.x_stride, gate.rows, AmxGate<AmxFloatValue, kActivation, true>{{}, {}, tile});
  else
    amx_gated<DotBf16Tiles>(tile, gate.x_stride, gate.rows, AmxGate<AmxFloatValue, kActivation, false>{{}, {}, tile});
}

template <Vf (*kActivation)(Vf)> static void amx_gated_wide(const GatedProductTile& tile) {
  const ProductTile& gate = tile.gate;
  alignas(64) float wide[2][kPanel];
  const AmxWideValue gate_value = {gate, group_floats<4>(gate, gate.scales, 0, wide[0])};
  const AmxWideValue up_value = {tile.up, group_floats<4>(tile.up, tile.up.scales, 0, wide[1])};
  if (tile.out_bf16)
    amx_gated<DotByteTiles>(tile, gate.x_stride / 2, 2 * gate.rows, AmxGate<AmxWideValue, kActivation, true>{gate_value, up_value, tile});
  else
    amx_gated<DotByteTiles>(tile, gate.x_stride / 2, 2 * gate.rows, AmxGate<AmxWideValue, kActivation, false>{gate_value, up_value, tile});
}

}  // namespace noria::NORIA_ISA

#endif
