// Shared plain types of the native side: weights, activations, cache and batch as the ops see them.
// Owns nothing but aligned buffers; knows neither Python nor instruction sets.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace noria {

// 64-byte aligned, zero-filled, move-only memory.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept { swap(other); return *this; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  template <class T> T* as() { return static_cast<T*>(data_); }
  template <class T> const T* as() const { return static_cast<const T*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(owner_, other.owner_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  void* owner_ = nullptr;  // what the memory was cut from, if it was
  size_t bytes_ = 0;
};

enum class Scheme : uint8_t { f32, bf16, int8, int4 };

// A weight [n, k] packed for the products. The layout behind `data` is the business of ops/linear.*: panels of 64
// outputs. n is padded to whole panels, k to what the kernel consumes at once.
struct PackedWeight {
  Scheme scheme = Scheme::f32;
  int64_t n = 0, k = 0;
  int group = 0;       // products per scale along k (int8, int4); the last group may be short
  int64_t groups = 0;  // ceil(k / group)
  bool half_scales = false;  // scales and minimums are float16, which holds them exactly; else float32
  bool wide = false;         // int8 of one group per row, times activations of 16 bits (Format::s16)
  Buffer data, scales, minimums;  // minimums: int4 only; none where all are -8 scales (Q4_0)
  size_t bytes() const { return data.bytes() + scales.bytes() + minimums.bytes(); }
};

// How a product wants its left operand.
// s8: codes -127…127. s16: codes -32384…32384 = 254 * high + low, as a row of bytes `high` and a row of bytes `low`, all of
// them -127…127, so that products with int8 weights are products of bytes: twice the products, for which one scale per
// row is fine enough.
enum class Format : uint8_t { f32, bf16, s8, s16 };
constexpr int kDigit = 254;       // of s16
constexpr int kMostWide = 32384;  // 254 * 127 + 126; one more and `high` might be rounded to 128
struct ActivationSpec {
  Format format = Format::f32;
  int group = 0;       // s8 and s16: products per scale along k; s16: k
  int64_t k = 0;       // true width
  bool operator==(const ActivationSpec& o) const { return format == o.format && group == o.group && k == o.k; }
  int64_t element_bytes() const { return format == Format::f32 ? 4 : format == Format::bf16 ? 2 : 1; }
  int64_t padded() const { return (k + 63) / 64 * 64; }  // elements per row (s16: bytes `high`); those from k on are zero
  // Elements from one row (s16: from `high` to `low`) to the next. An odd number of cache lines, except in f32, so that
  // neighbouring rows do not compete for the same places of the caches; what lies beyond padded() is never read.
  int64_t stride() const {
    const bool even = format != Format::f32 && padded() * element_bytes() / 64 % 2 == 0;
    return padded() + (even ? 64 / element_bytes() : 0);
  }
  int64_t row_bytes() const { return stride() * (format == Format::s16 ? 2 : element_bytes()); }
  int64_t groups() const { return group ? (k + group - 1) / group : 0; }
  int64_t sums() const { return format == Format::s16 ? 2 : groups(); }
};

// Rows in the format of `spec`. scales[row][group]: code * scale is the value; scale = max|x| / 127 or 32384 (0 for a zero
// group). sums[row][group]: exact sum of the s8 codes of the group; s16: of the row's bytes `high` and of those `low`.
struct Activations {
  ActivationSpec spec;
  int64_t rows = 0;
  const void* data = nullptr;      // [rows][spec.stride()]
  const float* scales = nullptr;   // [rows][spec.groups()]
  const int32_t* sums = nullptr;   // [rows][spec.sums()]
};

enum class CacheType : uint8_t { f32, bf16, int8 };

// Of the paged cache. How a block is laid out inside is the business of kernels/attention.h.
struct CacheShape {
  CacheType type = CacheType::f32;
  int kv_heads = 0, head_dim = 0, block_size = 0;
  int64_t num_blocks = 0;
};

// The batch of a step; see noria.backends.base.Batch.
struct BatchView {
  int64_t tokens = 0, seqs = 0, outputs = 0;
  const int32_t* input_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* kv_positions = nullptr;
  const int32_t* query_starts = nullptr;
  const int32_t* kv_lengths = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* block_tables = nullptr;
  int64_t block_table_stride = 0;
  const int32_t* output_rows = nullptr;
};

}  // namespace noria
