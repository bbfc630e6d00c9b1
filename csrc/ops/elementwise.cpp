#include "ops/elementwise.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/isa.h"
#include "kernels/elementwise.h"
#include "ops/linear.h"
#include "ops/owners.h"

namespace noria {

namespace {

constexpr int kMostTargets = 8;
// Fewer floats are not worth a task of their own (some tenths of a microsecond).
constexpr int64_t kLeastFloats = 4096;
// Tasks per thread: enough that the last ones end nearly together, and that others do what a descheduled thread leaves.
constexpr int64_t kTasksPerThread = 4;

size_t bytes_of(int64_t rows, const ActivationSpec& spec) { return static_cast<size_t>(rows * spec.row_bytes()); }

// Calls body(first, count) for runs of rows, shared among the threads.
template <class F> void for_runs(Pool& pool, int64_t rows, int64_t width, F body) {
  run_rows(pool, rows, (rows * width + kLeastFloats - 1) / kLeastFloats, kTasksPerThread, body);
}

void check_targets(int64_t rows, int64_t width, const ActivationSpec* specs, ActivationBuffer* const* out, int count) {
  if (count > kMostTargets) throw std::invalid_argument("too many formats for one value");
  for (int t = 0; t < count; ++t) {
    const ActivationSpec& spec = specs[t];
    const bool grouped = spec.format == Format::s8 || spec.format == Format::s16;
    if (spec.k != width) throw std::invalid_argument("a format's width differs from the value's");
    if (grouped && spec.group < 1) throw std::invalid_argument("an integer format needs a group size");
    if (spec.format == Format::s16 && spec.group < width) throw std::invalid_argument("s16 has one group per row");
    if (out[t]->data.bytes() < bytes_of(rows, spec)) throw std::invalid_argument("an activation buffer is too small");
  }
}

// The targets from a row on.
void locate(int64_t row, const ActivationSpec* specs, ActivationBuffer* const* out, int count, RowTarget* targets) {
  for (int t = 0; t < count; ++t) targets[t] = target_at(specs[t], *out[t], row, 0);
}

// Floats of a thread, kept for the next call.
float* scratch(int64_t count) {
  static thread_local std::vector<float> floats;
  if (floats.size() < static_cast<size_t>(count)) floats.resize(static_cast<size_t>(count));
  return floats.data();
}

}  // namespace

ActivationBuffer::ActivationBuffer(const ActivationSpec& spec, int64_t rows)
    : data(bytes_of(rows, spec)),
      scales(static_cast<size_t>(rows * spec.groups()) * sizeof(float)),
      sums(static_cast<size_t>(rows * spec.sums()) * sizeof(int32_t)) {}

Activations ActivationBuffer::view(const ActivationSpec& spec, int64_t rows) const {
  return view(spec, 0, rows);
}

Activations ActivationBuffer::view(const ActivationSpec& spec, int64_t first, int64_t rows) const {
  Activations x;
  x.spec = spec;
  x.rows = rows;
  x.data = data.as<char>() + bytes_of(first, spec);
  if (spec.group == 0) return x;
  x.scales = scales.as<float>() + first * spec.groups();
  x.sums = sums.as<int32_t>() + first * spec.sums();
  return x;
}

RowTarget target_at(const ActivationSpec& spec, ActivationBuffer& buffer, int64_t row, int64_t column) {
  RowTarget target;
  target.spec = spec;
  target.row_bytes = spec.row_bytes();
  target.data = buffer.data.as<char>() + row * target.row_bytes + column * target.row_bytes / spec.stride();
  if (spec.group == 0) return target;
  target.scales = buffer.scales.as<float>() + row * spec.groups() + column / spec.group;
  target.sums = buffer.sums.as<int32_t>() + row * spec.sums() + column / spec.group;
  return target;
}

bool fits_tiles(const ActivationSpec& spec) {
  if (spec.k % 64) return false;
  return spec.format == Format::bf16 || (spec.format == Format::s8 && (spec.group == 32 || spec.group == 64));
}

void convert(Pool& pool, const float* x, int64_t rows, int64_t width, const ActivationSpec* specs, ActivationBuffer* const* out,
             int count) {
  check_targets(rows, width, specs, out, count);
  const auto* k = kernels().elementwise;
  for_runs(pool, rows, width, [&](int64_t first, int64_t run) {
    RowTarget targets[kMostTargets];
    locate(first, specs, out, count, targets);
    k->convert_rows(x + first * width, run, width, targets, count);
  });
}

void norm(Pool& pool, const float* x, const float* weight, float eps, const float* residual, int64_t rows, int64_t width,
          float* out, const ActivationSpec* specs, ActivationBuffer* const* converted, int count) {
  check_targets(rows, width, specs, converted, count);
  const auto* k = kernels().elementwise;
  for_runs(pool, rows, width, [&](int64_t first, int64_t run) {
    NormArgs args;
    args.x = x + first * width;
    args.weight = weight;
    args.residual = residual ? residual + first * width : nullptr;
    args.out = out ? out + first * width : nullptr;
    args.scratch = out ? nullptr : scratch(kNormRows * width);
    args.width = width;
    args.eps = eps;
    RowTarget targets[kMostTargets];
    locate(first, specs, converted, count, targets);
    k->norm_rows(args, run, targets, count);
  });
}

EmbeddingTable make_table(const void* values, bool bf16, int64_t vocab, int64_t width) {
  EmbeddingTable table;
  table.bf16 = bf16;
  table.vocab = vocab;
  table.width = width;
  table.data = Buffer(static_cast<size_t>(vocab * width) * (bf16 ? sizeof(uint16_t) : sizeof(float)));
  std::memcpy(table.data.as<char>(), values, table.data.bytes());
  return table;
}

EmbeddingTable make_table(const PackedWeight& weight) {
  if (weight.scheme != Scheme::f32 && weight.scheme != Scheme::bf16)
    throw std::invalid_argument("only an f32 or bf16 weight holds its values as they are");
  EmbeddingTable table;
  table.bf16 = weight.scheme == Scheme::bf16;
  table.vocab = weight.n;
  table.width = weight.k;
  table.packed = &weight;
  return table;
}

void embed(Pool& pool, const EmbeddingTable& table, const int32_t* ids, int64_t rows, float scale, float* out) {
  const auto* k = kernels().elementwise;
  const int64_t width = table.width, bytes = width * (table.bf16 ? 2 : 4);
  for_runs(pool, rows, width, [&](int64_t first, int64_t run) {
    for (int64_t row = first; row < first + run; ++row) {
      const char* from = table.data.as<char>() + ids[row] * bytes;
      if (table.packed) {
        auto* held = reinterpret_cast<uint32_t*>(scratch(width + 1));
        unpack_row(*table.packed, ids[row], held);
        from = reinterpret_cast<const char*>(held);
      }
      if (table.bf16) k->embed_row_bf16(reinterpret_cast<const uint16_t*>(from), scale, width, out + row * width);
      else k->embed_row_f32(reinterpret_cast<const float*>(from), scale, width, out + row * width);
    }
  });
}

void select(Pool& pool, const float* x, const int32_t* rows, int64_t count, int64_t width, float* out) {
  for_runs(pool, count, width, [&](int64_t first, int64_t run) {
    for (int64_t row = first; row < first + run; ++row)
      std::memcpy(out + row * width, x + rows[row] * width, static_cast<size_t>(width) * sizeof(float));
  });
}

}  // namespace noria
