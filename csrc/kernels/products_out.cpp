// What becomes of a tile of products whose float rows nobody wants: it goes into the next product's form, or only its
// largest logits are kept.
#include "kernels/products_out.h"

#include <cfloat>

#include "kernels/quantise.h"
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

template <Vf (*kFunction)(Vf), bool kBias> struct GatedLoad {
  const GatedTile& tile;
  inline Vf operator()(int row, int column) const {
    Vf gate = load(tile.gate + row * kCodeRow + column), up = load(tile.up + row * kCodeRow + column);
    if (kBias) {
      gate = add(gate, load(tile.gate_bias + column));
      up = add(up, load(tile.up_bias + column));
    }
    return mul(kFunction(gate), up);
  }
};

template <class Load> static void store_tile(int rows, const RowTarget& target, Load load) {
  if (target.spec.format == Format::bf16) {
    for (int r = 0; r < rows; ++r) {
      auto* out = reinterpret_cast<uint16_t*>(static_cast<char*>(target.data) + r * target.row_bytes);
      for (int c = 0; c < kCodeRow; c += kLanes) store_bf16(out + c, load(r, c));
    }
    return;
  }
  CodeRows out;
  out.codes = static_cast<uint8_t*>(target.data);
  out.stride = target.row_bytes;
  out.scales = target.scales;
  out.sums = target.sums;
  out.group_stride = target.spec.groups();
  if (target.spec.group == 32) quantise_rows<32>(rows, out, load);
  else quantise_rows<64>(rows, out, load);
}

template <Vf (*kFunction)(Vf)> static void gated_into(const GatedTile& tile) {
  if (tile.gate_bias) store_tile(tile.rows, tile.target, GatedLoad<kFunction, true>{tile});
  else store_tile(tile.rows, tile.target, GatedLoad<kFunction, false>{tile});
}

void gated_tile(const GatedTile& tile) {
  if (tile.function == Function::silu) gated_into<&silu>(tile);
  else gated_into<&gelu_tanh>(tile);
}

// max(), but with a NaN in x counting for nothing at every level.
static inline Vf larger(Vf x, Vf largest) {
#if defined(__x86_64__)
  return max(x, largest);
#else
  return select_less(largest, x, x, largest);
#endif
}

// Whether any lane is at least so large.
static inline bool reaches(Vf v, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, set1(least), _CMP_GE_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(v, set1(least), _CMP_GE_OQ)) != 0;
#else
  return reduce_max(v) >= least;
#endif
}

static inline Vf logits_at(const LargestTile& tile, const float* product) {
  const Vf y = mul(load(product), set1(tile.scale));
  if (tile.softcap == 0.0f) return y;
  const Vf cap = set1(tile.softcap);
  return mul(cap, tanh(div(y, cap)));
}

// The few times that a row's largest logit may change.
static void search_row(const LargestTile& tile, int row, const float* logits) {
  float largest = tile.largest[row];
  int32_t id = tile.ids[row];
  for (int c = 0; c < tile.columns; ++c) {
    const float logit = logits[c] > FLT_MAX ? FLT_MAX : logits[c];
    const int32_t at = tile.first + c;
    if (logit > largest || (logit == largest && at < id)) {
      largest = logit;
      id = at;
    }
  }
  tile.largest[row] = largest;
  tile.ids[row] = id;
}

void largest_tile(const LargestTile& tile) {
  for (int r = 0; r < tile.rows; ++r) {
    alignas(64) float logits[kCodeRow];
    Vf most = set1(kNoLogit);
#pragma GCC unroll 16
    for (int c = 0; c < kCodeRow; c += kLanes) {
      const Vf y = logits_at(tile, tile.product + r * kCodeRow + c);
      store(logits + c, y);
      most = larger(y, most);
    }
    // Columns beyond the last are searched in vain at worst.
    if (reaches(most, tile.largest[r])) search_row(tile, r, logits);
  }
}

}  // namespace noria::NORIA_ISA
