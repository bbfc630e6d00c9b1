// simd.h for processors without a header of their own: 4 lanes in plain C++. Include simd.h, not this.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace noria::NORIA_ISA {

static constexpr int kLanes = 4;
struct Vf {
  float lane[kLanes];
};
struct Vi {
  int32_t lane[kLanes];
};

template <class V, class F> static inline V make(F value) {
  V out;
  for (int i = 0; i < kLanes; ++i) out.lane[i] = value(i);
  return out;
}

static inline Vf load_partial(const float* p, int n) {
  return make<Vf>([&](int i) { return i < n ? p[i] : 0.0f; });
}
static inline Vf load(const float* p) { return load_partial(p, kLanes); }
static inline void store_partial(float* p, Vf v, int n) { std::memcpy(p, v.lane, sizeof(float) * static_cast<size_t>(n)); }
static inline void store(float* p, Vf v) { store_partial(p, v, kLanes); }
static inline Vf set1(float x) {
  return make<Vf>([&](int) { return x; });
}
static inline Vf zero() { return set1(0.0f); }
static inline Vi set1_int(int x) {
  return make<Vi>([&](int) { return x; });
}

#define NORIA_LANES(name, expression)        \
  static inline Vf name(Vf a, Vf b) {        \
    return make<Vf>([&](int i) {             \
      const float x = a.lane[i], y = b.lane[i]; \
      return expression;                     \
    });                                      \
  }
NORIA_LANES(add, x + y)
NORIA_LANES(sub, x - y)
NORIA_LANES(mul, x * y)
NORIA_LANES(div, x / y)
NORIA_LANES(max, x > y ? x : y)
NORIA_LANES(min, x < y ? x : y)
#undef NORIA_LANES
static inline Vf sqrt(Vf v) {
  return make<Vf>([&](int i) { return std::sqrt(v.lane[i]); });
}
static inline Vf abs(Vf v) {
  return make<Vf>([&](int i) { return std::fabs(v.lane[i]); });
}
static inline Vf neg(Vf v) {
  return make<Vf>([&](int i) { return -v.lane[i]; });
}
static inline Vf fma(Vf a, Vf b, Vf c) { return add(mul(a, b), c); }
static inline Vf round_even(Vf v) {
  return make<Vf>([&](int i) { return std::nearbyint(v.lane[i]); });
}
static inline Vi to_int(Vf v) {
  return make<Vi>([&](int i) { return static_cast<int32_t>(std::nearbyint(v.lane[i])); });
}
static inline Vf to_float(Vi v) {
  return make<Vf>([&](int i) { return static_cast<float>(v.lane[i]); });
}
static inline Vf select_less(Vf a, Vf b, Vf x, Vf y) {
  return make<Vf>([&](int i) { return a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]; });
}

static inline float reduce_add(Vf v) { return (v.lane[0] + v.lane[2]) + (v.lane[1] + v.lane[3]); }
static inline float reduce_max(Vf v) {
  float most = v.lane[0];
  for (int i = 1; i < kLanes; ++i) most = v.lane[i] > most ? v.lane[i] : most;
  return most;
}
static inline int32_t reduce_add_int(Vi v) { return v.lane[0] + v.lane[1] + v.lane[2] + v.lane[3]; }

static inline Vi as_int(Vf v) {
  Vi out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}
static inline Vf as_float(Vi v) {
  Vf out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}
static inline int32_t wrap(uint32_t bits) { return static_cast<int32_t>(bits); }
static inline Vi add_int(Vi a, Vi b) {
  return make<Vi>([&](int i) { return wrap(static_cast<uint32_t>(a.lane[i]) + static_cast<uint32_t>(b.lane[i])); });
}
static inline Vi and_int(Vi a, Vi b) {
  return make<Vi>([&](int i) { return a.lane[i] & b.lane[i]; });
}
template <int n> static inline Vi shift_left(Vi v) {
  return make<Vi>([&](int i) { return wrap(static_cast<uint32_t>(v.lane[i]) << n); });
}
template <int n> static inline Vi shift_right(Vi v) {
  return make<Vi>([&](int i) { return wrap(static_cast<uint32_t>(v.lane[i]) >> n); });
}

static inline void store_low8_partial(void* p, Vi v, int n) {
  for (int i = 0; i < n; ++i) static_cast<int8_t*>(p)[i] = static_cast<int8_t>(v.lane[i]);
}
static inline void store_low8(void* p, Vi v) { store_low8_partial(p, v, kLanes); }
static inline void store_low16_partial(void* p, Vi v, int n) {
  for (int i = 0; i < n; ++i) static_cast<int16_t*>(p)[i] = static_cast<int16_t>(v.lane[i]);
}
static inline void store_low16(void* p, Vi v) { store_low16_partial(p, v, kLanes); }
static inline Vi load_s8_partial(const int8_t* p, int n) {
  return make<Vi>([&](int i) { return i < n ? static_cast<int32_t>(p[i]) : 0; });
}
static inline Vi load_s8(const int8_t* p) { return load_s8_partial(p, kLanes); }
static inline Vi load_u16_partial(const uint16_t* p, int n) {
  return make<Vi>([&](int i) { return i < n ? static_cast<int32_t>(p[i]) : 0; });
}
static inline Vi load_u16(const uint16_t* p) { return load_u16_partial(p, kLanes); }

}  // namespace noria::NORIA_ISA
