// The loops behind `noria bench roofline`. Empty assembly statements keep the compiler from seeing that every turn computes
// the same: they cost no instruction.
#include "kernels/limits.h"

#include "kernels/linear_dot.h"
#include "kernels/tiles.h"

namespace noria::NORIA_ISA {
namespace {

// Enough independent sums to hide the latency of a product, few enough to stay in registers beside two operands and what
// a product needs in between.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;
#else
constexpr int kSums = 10;
#endif

// The value of v is unknown from here on.
template <class V> inline __attribute__((always_inline)) void forget(V& v) {
#if defined(__SSE4_1__)
  asm volatile("" : "+v"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#else
  asm volatile("" : "+m"(v));
#endif
}

struct DotInt8 {
  using Sum = Vi;
  static constexpr int products = 4 * kLanes, unit = 0x01010101;
  static Sum none() { return set1_int(0); }
  static void add(Sum& sum, Vi w, Vi x) { dot_int8(sum, w, x); }
};

struct DotF32 {
  using Sum = Vf;
  static constexpr int products = kLanes, unit = 0x3f800000;  // 1.0
  static Sum none() { return zero(); }
  static void add(Sum& sum, Vi w, Vi x) { dot_f32(sum, w, x); }
};

#ifdef NORIA_DOT_BF16
struct DotBf16 {
  using Sum = Vf;
  static constexpr int products = 2 * kLanes, unit = 0x3f803f80;  // twice 1.0
  static Sum none() { return zero(); }
  static void add(Sum& sum, Vi w, Vi x) { dot_bf16(sum, w, x); }
};
#else
using DotBf16 = DotF32;  // widened to float32, once per tile
#endif

template <class Dot> int64_t products(int64_t turns) {
  typename Dot::Sum sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sums[i] = Dot::none();
  Vi w = set1_int(Dot::unit), x = set1_int(Dot::unit);
  for (int64_t turn = 0; turn < turns; ++turn) {
    forget(w);  // what depends on the weight alone is made once per turn, as in a tile
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) {
      forget(x);
      Dot::add(sums[i], w, x);
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) forget(sums[i]);
  return turns * kSums * Dot::products * 2;
}

#if defined(__AMX_TILE__)
// Four sums in tiles 0–3, two rows' tiles and two weights' in 4–7: each product's operands are another's too, as in a block.
template <class Dot> int64_t tile_products(int64_t turns) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kTileRows);
  tiles_configure(shapes);  // empties the tiles
  for (int64_t turn = 0; turn < turns; ++turn) {
    Dot::template add<0, 4, 6>();
    Dot::template add<1, 4, 7>();
    Dot::template add<2, 5, 6>();
    Dot::template add<3, 5, 7>();
  }
  tiles_release();
  return turns * 4 * Dot::products * 2;
}
struct TileInt8 {
  static constexpr int64_t products = 16 * 16 * 64;
  template <int c, int a, int b> static void add() { tile_dot_su<c, a, b>(); }
};
struct TileBf16 {
  static constexpr int64_t products = 16 * 16 * 32;
  template <int c, int a, int b> static void add() { tile_dot_bf16<c, a, b>(); }
};
#endif

template <bool kAhead> void read_lines(const char* p, int64_t bytes, int64_t ahead) {
  constexpr int kVector = kLanes * 4;
  Vi sums[4] = {set1_int(0), set1_int(0), set1_int(0), set1_int(0)};
  for (const char* end = p + bytes; p < end; p += kReadBytes) {
    if constexpr (kAhead)
#pragma GCC unroll 8
      for (int line = 0; line < kReadBytes; line += 64) __builtin_prefetch(p + ahead + line, 0, 2);
#pragma GCC unroll 32
    for (int i = 0; i < kReadBytes / kVector; ++i) sums[i % 4] = add_int(sums[i % 4], load_units(p + i * kVector));
  }
  for (Vi& sum : sums) forget(sum);
}

void read(const char* data, int64_t bytes, int64_t ahead) {
  if (ahead) read_lines<true>(data, bytes, ahead);
  else read_lines<false>(data, bytes, ahead);
}

#if defined(__AMX_TILE__)
constexpr const char* kInt8Name = "tdpbsud (AMX)";
constexpr const char* kF32Name = "vfmadd231ps zmm";
#elif defined(__AVX512VNNI__)
constexpr const char* kInt8Name = "vpdpbusd zmm";
constexpr const char* kF32Name = "vfmadd231ps zmm";
#elif defined(__AVX2__)
constexpr const char* kInt8Name = "vpmaddubsw + vpmaddwd ymm";
constexpr const char* kF32Name = "vfmadd231ps ymm";
#elif defined(__SSE4_1__)
constexpr const char* kInt8Name = "pmaddubsw + pmaddwd xmm";
constexpr const char* kF32Name = "mulps + addps xmm";
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr const char* kInt8Name = "usdot";
constexpr const char* kF32Name = "fmla";
#elif defined(__aarch64__)
constexpr const char* kInt8Name = "sdot";
constexpr const char* kF32Name = "fmla";
#else
constexpr const char* kInt8Name = "plain C++";
constexpr const char* kF32Name = "plain C++";
#endif
#if defined(__AMX_TILE__)
constexpr const char* kBf16Name = "tdpbf16ps (AMX)";
#elif defined(NORIA_DOT_BF16)
constexpr const char* kBf16Name = kLanes == 16 ? "vdpbf16ps zmm" : "bfdot";
#else
constexpr const char* kBf16Name = "widened to f32";
#endif

}  // namespace

#if defined(__AMX_TILE__)
constexpr auto kInt8Products = tile_products<TileInt8>, kBf16Products = tile_products<TileBf16>;
#else
constexpr auto kInt8Products = products<DotInt8>, kBf16Products = products<DotBf16>;
#endif

extern const LimitKernels limit_kernels;
const LimitKernels limit_kernels = {kInt8Products, kBf16Products, products<DotF32>, kInt8Name, kBf16Name, kF32Name, read};

}  // namespace noria::NORIA_ISA
