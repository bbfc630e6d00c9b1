// Epilogues: what happens to a tile of products on its way to memory.
#include "kernels/linear.h"

#include "kernels/simd.h"

namespace noria::NORIA_ISA {

static inline int lanes_left(int columns, int column) { return columns - column < kLanes ? columns - column : kLanes; }

template <bool kLogits> static void epilogue_rows(const LinearEpilogue& args) {
  const Vf scale = set1(args.scale), cap = set1(args.softcap);
  for (int r = 0; r < args.rows; ++r) {
    const float* product = args.product + r * kPanel;
    const float* residual = args.residual ? args.residual + r * args.stride : nullptr;
    float* out = args.out + r * args.stride;
    for (int c = 0; c < args.columns; c += kLanes) {
      const int lanes = lanes_left(args.columns, c);
      Vf y = load(product + c);
      if (args.bias) y = add(y, load_partial(args.bias + c, lanes));
      if (kLogits) {
        y = mul(y, scale);
        if (args.softcap != 0.0f) y = mul(cap, tanh(div(y, cap)));
      }
      if (residual) y = add(y, load_partial(residual + c, lanes));
      store_partial(out + c, y, lanes);
    }
  }
}

#if defined(__AVX512F__)
static inline void stream_store(float* p, Vf v) { _mm512_stream_ps(p, v); }
#elif defined(__AVX2__)
static inline void stream_store(float* p, Vf v) { _mm256_stream_ps(p, v); }
#elif defined(__SSE4_1__)
static inline void stream_store(float* p, Vf v) { _mm_stream_ps(p, v); }
#else
static inline void stream_store(float* p, Vf v) { store(p, v); }
#endif

// The common case, free of masks: a whole panel that nothing but a residual is added to.
template <bool kResidual, bool kStream> static void whole_panel(const LinearEpilogue& args) {
  for (int r = 0; r < args.rows; ++r) {
    const float* product = args.product + r * kPanel;
    float* out = args.out + r * args.stride;
#pragma GCC unroll 4
    for (int c = 0; c < kPanel; c += kLanes) {
      Vf y = load(product + c);
      if (kResidual) y = add(y, load(args.residual + r * args.stride + c));
      if (kStream) stream_store(out + c, y);
      else store(out + c, y);
    }
  }
}

static void epilogue(const LinearEpilogue& args) {
  if (args.scale != 1.0f || args.softcap != 0.0f) epilogue_rows<true>(args);
  else if (args.bias || args.columns < kPanel) epilogue_rows<false>(args);
  else if (args.residual) whole_panel<true, false>(args);
  else if (args.stream) whole_panel<false, true>(args);
  else whole_panel<false, false>(args);
}

template <Vf (*kActivation)(Vf)> static void gated_rows(const GatedEpilogue& args) {
  for (int r = 0; r < args.rows; ++r) {
    const float* gate = args.gate + r * kPanel;
    const float* up = args.up + r * kPanel;
    float* out = args.out + r * args.stride;
    for (int c = 0; c < args.columns; c += kLanes) {
      const int lanes = lanes_left(args.columns, c);
      Vf g = load(gate + c), u = load(up + c);
      if (args.gate_bias) g = add(g, load_partial(args.gate_bias + c, lanes));
      if (args.up_bias) u = add(u, load_partial(args.up_bias + c, lanes));
      store_partial(out + c, mul(kActivation(g), u), lanes);
    }
  }
}

extern const LinearProducts linear_products;  // linear_products.cpp
extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {&linear_products, &epilogue, &gated_rows<&silu>, &gated_rows<&gelu_tanh>};

}  // namespace noria::NORIA_ISA
