// AMX tiles: eight registers of up to 16 rows × 64 bytes, and products of two of them added to a third (Intel 64 and
// IA-32 Architectures Software Developer's Manual, volume 1, chapter 18). Inline assembly, because GCC 12's intrinsics do
// not say that they read and write memory: stores to what a tile is loaded from would be moved or removed.
//
// A product takes A [rows][64 bytes] and B [up to 16 rows][16 outputs × 4 bytes], row i of B holding units 4 i … of
// every output, and adds to C [rows][16 outputs]. It takes as many cycles as A has rows.
#pragma once
#include <cstdint>

#if defined(__AMX_TILE__)

namespace noria::NORIA_ISA {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 1024;

// Shapes of the eight registers, as ldtilecfg reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int tile_rows, int tile_row_bytes = 64) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(tile_row_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

// Empties all registers.
static inline void tiles_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
// To be called when a task ends: a thread without tiles in use has less state to save when it is switched.
static inline void tiles_release() { asm volatile("tilerelease" : : : "memory"); }

template <int t> static inline void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(t) : "memory"); }
// stride: bytes from a row to the next.
template <int t> static inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(t), "r"(p), "r"(stride) : "memory");
}
// The same, past the nearest cache: for what is read once while other operands stay there.
template <int t> static inline void tile_stream(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(t), "r"(p), "r"(stride) : "memory");
}
template <int t> static inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(t), "r"(p), "r"(stride) : "memory");
}

// C += A · B: s8 · s8, s8 · u8, u8 · s8 in exact int32 sums; pairs of bfloat16 in float32.
template <int c, int a, int b> static inline void tile_dot_ss() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b) : "memory");
}
template <int c, int a, int b> static inline void tile_dot_su() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b) : "memory");
}
template <int c, int a, int b> static inline void tile_dot_us() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b) : "memory");
}
template <int c, int a, int b> static inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b) : "memory");
}

}  // namespace noria::NORIA_ISA

#endif
