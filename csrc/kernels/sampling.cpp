// Passes over a row of logits or probabilities (sampling.h).
#include "kernels/sampling.h"

#include "kernels/power_of_two.h"
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

static constexpr float kInfinity = __builtin_inff();

#if defined(__AVX512VNNI__)
#define NORIA_AVX512 1
#endif

// Lane-wise sums in double.
struct DoubleSum {
#if defined(NORIA_AVX512)
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  inline void add(Vf v) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
  }
  inline void lanes(double* out) const {
    _mm512_storeu_pd(out, low);
    _mm512_storeu_pd(out + 8, high);
  }
#elif defined(NORIA_ISA_avx2)
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  inline void add(Vf v) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  }
  inline void lanes(double* out) const {
    _mm256_storeu_pd(out, low);
    _mm256_storeu_pd(out + 4, high);
  }
#else
  double sums[kLanes] = {};
  inline void add(Vf v) {
    float x[kLanes];
    store(x, v);
    for (int i = 0; i < kLanes; ++i) sums[i] += static_cast<double>(x[i]);
  }
  inline void lanes(double* out) const {
    for (int i = 0; i < kLanes; ++i) out[i] = sums[i];
  }
#endif
  inline double total() const {
    double x[kLanes];
    lanes(x);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
  }
};

// The next kLanes of n numbers; beyond them, `pad`.
static inline Vf load_padded(const float* p, int64_t n, float pad) {
  if (n >= kLanes) return load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : pad;
  return load(lanes);
}

static inline int64_t chunk_end(int64_t start, int64_t n) {
  return start + kSamplingChunk < n ? start + kSamplingChunk : n;
}

// max(), but with a NaN in x counting for nothing at every level.
static inline Vf larger(Vf x, Vf most) {
#if defined(__x86_64__)
  return max(x, most);
#else
  return select_less(most, x, x, most);
#endif
}

static float chunk_maximum(const float* x, int64_t n) {
  Vf most = set1(-kInfinity), other = most;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    most = larger(load(x + i), most);
    other = larger(load(x + i + kLanes), other);
  }
  for (; i < n; i += kLanes) most = larger(load_padded(x + i, n - i, -kInfinity), most);
  return reduce_max(max(most, other));
}

constexpr int64_t kAhead = 4 * kSamplingChunk;
// Asks for what comes a few chunks later: logits come from beyond the near caches. Inlined in any case: GCC drops calls of
// functions that do nothing but prefetch.
__attribute__((always_inline)) static inline void fetch_ahead(const float* x, int64_t start, int64_t n) {
  if (start + kAhead + kSamplingChunk > n) return;
  for (int64_t i = 0; i < kSamplingChunk; i += 16) __builtin_prefetch(x + start + kAhead + i, 0, 3);
}

static float maxima(const float* x, int64_t n, float* out) {
  float largest = -kInfinity;
  for (int64_t start = 0; start < n; start += kSamplingChunk) {
    fetch_ahead(x, start, n);
    const float chunk = chunk_maximum(x + start, chunk_end(start, n) - start);
    out[start / kSamplingChunk] = chunk;
    if (chunk > largest) largest = chunk;
  }
  return largest;
}

static void columns(const float* x, int64_t n, float* out) {
  for (int64_t start = 0; start < n; start += kSamplingChunk, out += kColumns) {
    const int64_t end = chunk_end(start, n);
    for (int64_t column = 0; column < kColumns; column += kLanes) {
      Vf most = set1(-kInfinity);
      for (int64_t i = start + column; i < end; i += kColumns) {
        const Vf v = load_padded(x + i, end - i, -kInfinity);
        most = select_less(most, v, v, most);
      }
      store(out + column, most);
    }
  }
}

// Sum of exp((x[i] - largest) * factor) over one chunk, `by` being factor * log2(e). In float: a lane adds 16 or 32 numbers.
static float chunk_sum(const float* x, int64_t n, float largest, float by) {
  const Vf top = set1(largest), scale = set1(by);
  Vf sum = zero(), other = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    sum = add(sum, power_of_two(mul(sub(load(x + i), top), scale)));
    other = add(other, power_of_two(mul(sub(load(x + i + kLanes), top), scale)));
  }
  for (; i < n; i += kLanes) sum = add(sum, power_of_two(mul(sub(load_padded(x + i, n - i, -kInfinity), top), scale)));
  return reduce_add(add(sum, other));
}

// Each chunk is summed against its own maximum while it lies in the nearest cache; the sums are scaled at the end, when the
// row's is known.
static RowScan scan(const float* x, int64_t n, float factor, float* maxima, double* sums) {
  const float by = factor * kLog2E;
  RowScan row{-kInfinity, 0};
  for (int64_t start = 0, c = 0; start < n; start += kSamplingChunk, ++c) {
    const int64_t size = chunk_end(start, n) - start;
    fetch_ahead(x, start, n);
    maxima[c] = chunk_maximum(x + start, size);
    sums[c] = static_cast<double>(chunk_sum(x + start, size, maxima[c], by));
    if (maxima[c] > row.largest) row.largest = maxima[c];
  }
  const int64_t chunks = sampling_chunks(n);
  for (int64_t c = 0; c < chunks; c += kLanes) {
    float scales[kLanes];
    store(scales, power_of_two(mul(sub(load_padded(maxima + c, chunks - c, -kInfinity), set1(row.largest)), set1(by))));
    for (int64_t i = c; i < c + kLanes && i < chunks; ++i) row.total += sums[i] *= static_cast<double>(scales[i - c]);
  }
  return row;
}

static double exponentials(const float* x, int64_t n, float largest, float factor, float* e, double* sums) {
  const Vf top = set1(largest), by = set1(factor * kLog2E);
  double total = 0;
  for (int64_t start = 0; start < n; start += kSamplingChunk) {
    const int64_t end = chunk_end(start, n);
    DoubleSum sum;
    for (int64_t i = start; i < end; i += kLanes) {
      const Vf y = mul(sub(load_padded(x + i, end - i, -kInfinity), top), by);
      const Vf p = power_of_two(y);
      sum.add(p);
      if (!e) continue;
      if (end - i >= kLanes) store(e + i, p);
      else store_partial(e + i, p, static_cast<int>(end - i));
    }
    const double chunk = sum.total();
    if (sums) sums[start / kSamplingChunk] = chunk;
    total += chunk;
  }
  return total;
}

static double kept_sums(const float* e, int64_t n, float threshold, double* sums) {
  const Vf least = set1(threshold);
  double total = 0;
  for (int64_t start = 0; start < n; start += kSamplingChunk) {
    const int64_t end = chunk_end(start, n);
    DoubleSum sum;
    for (int64_t i = start; i < end; i += kLanes) {
      const Vf p = load_padded(e + i, end - i, 0);
      sum.add(select_less(p, least, zero(), p));
    }
    total += sums[start / kSamplingChunk] = sum.total();
  }
  return total;
}

static void masses(const float* e, int64_t n, const float* thresholds, double* out) {
  DoubleSum sums[kThresholds];
  Vf least[kThresholds];
  for (int j = 0; j < kThresholds; ++j) least[j] = set1(thresholds[j]);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vf p = load_padded(e + i, n - i, 0);
#if defined(NORIA_AVX512)
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(p)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(p, 1));
#pragma GCC unroll 7
    for (int j = 0; j < kThresholds; ++j) {
      const __mmask16 in = _mm512_cmp_ps_mask(p, least[j], _CMP_GE_OQ);
      sums[j].low = _mm512_mask_add_pd(sums[j].low, static_cast<__mmask8>(in), sums[j].low, low);
      sums[j].high = _mm512_mask_add_pd(sums[j].high, static_cast<__mmask8>(in >> 8), sums[j].high, high);
    }
#else
    for (int j = 0; j < kThresholds; ++j) sums[j].add(select_less(p, least[j], zero(), p));
#endif
  }
  for (int j = 0; j < kThresholds; ++j) out[j] = sums[j].total();
}

static int64_t collect(const float* x, int64_t n, float low, float high, float* values, int32_t* indices) {
  int64_t count = 0, i = 0;
#if defined(NORIA_AVX512)
  const Vf least = set1(low), most = set1(high);
  const Vi lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (; i + kLanes <= n; i += kLanes) {
    const Vf v = load(x + i);
    const __mmask16 in =
        _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, least, _CMP_GE_OQ), v, most, _CMP_LT_OQ);
    if (!in) continue;
    // Compressed in a register: the form that stores straight to memory is slow on some processors.
    if (values) store(values + count, _mm512_maskz_compress_ps(in, v));
    if (indices)
      _mm512_storeu_si512(indices + count,
                          _mm512_maskz_compress_epi32(in, add_int(lanes, set1_int(static_cast<int>(i)))));
    count += __builtin_popcount(in);
  }
#endif
  for (; i < n; ++i) {
    if (!(x[i] >= low && x[i] < high)) continue;
    if (values) values[count] = x[i];
    if (indices) indices[count] = static_cast<int32_t>(i);
    ++count;
  }
  return count;
}

static int64_t count_above(const float* x, int64_t n, float value) {
  const Vf least = set1(value);
  int64_t count = 0;
  for (int64_t start = 0; start < n; start += 4096) {
    const int64_t end = start + 4096 < n ? start + 4096 : n;
    Vf ones = zero();
    for (int64_t i = start; i < end; i += kLanes)
      ones = add(ones, select_less(least, load_padded(x + i, end - i, -kInfinity), set1(1.0f), zero()));
    count += static_cast<int64_t>(reduce_add(ones));
  }
  return count;
}

// Most words of a grammar's mask are all 0 or all 1.
static void forbid(float* x, int64_t n, const uint32_t* bits) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32, ++bits) {
    const uint32_t allowed = *bits;
    if (allowed == 0xffffffffu) continue;
#if defined(NORIA_AVX512)
    const Vf none = set1(-kInfinity);
    _mm512_mask_storeu_ps(x + i, static_cast<__mmask16>(~allowed), none);
    _mm512_mask_storeu_ps(x + i + 16, static_cast<__mmask16>(~allowed >> 16), none);
#else
    if (allowed == 0) {
      for (int j = 0; j < 32; ++j) x[i + j] = -kInfinity;
    } else {
      for (int j = 0; j < 32; ++j) x[i + j] = (allowed >> j & 1u) ? x[i + j] : -kInfinity;
    }
#endif
  }
  for (int j = 0; i + j < n; ++j)
    if (!(*bits >> j & 1u)) x[i + j] = -kInfinity;
}

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels = {scan, maxima, columns, exponentials, kept_sums, masses, collect, count_above, forbid};

}  // namespace noria::NORIA_ISA
