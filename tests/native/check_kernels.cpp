// Runs products, norm and attention on every ISA level of the machine (or of its emulator) against plain loops in double,
// without Python: what a cross-compiled build is judged by. Exit 1 names the first result that is out of bounds.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/isa.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/linear.h"

using namespace noria;

namespace {

std::mt19937 generator(1);
float normal() { return std::normal_distribution<float>()(generator); }
std::vector<float> normals(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal();
  return values;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
double from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void expect(const std::string& what, double found, double exact, double bound) {
  if (std::fabs(found - exact) <= bound) return;
  std::printf("%s: %g, should be %g within %g\n", what.c_str(), found, exact, bound);
  std::exit(1);
}

// A weight and the values that it stands for.
struct Sample {
  PackedWeight packed;
  std::vector<double> values;  // [n][k]
};

Sample make_weight(Scheme scheme, int64_t n, int64_t k, int group) {
  const int64_t groups = (k + group - 1) / group;
  std::vector<float> floats = normals(n * k), scales = normals(n * groups), minimums = normals(n * groups);
  std::vector<int8_t> bytes;
  std::vector<uint8_t> nibbles;
  Sample sample;
  for (int64_t i = 0; i < n * k; ++i) {
    const auto at = static_cast<size_t>(i), g = static_cast<size_t>(i / k * groups + i % k / group);
    bytes.push_back(static_cast<int8_t>(static_cast<int>(generator() % 255) - 127));
    nibbles.push_back(static_cast<uint8_t>(generator() % 16));
    switch (scheme) {
      case Scheme::f32: sample.values.push_back(floats[at]); break;
      case Scheme::bf16: sample.values.push_back(from_bf16(to_bf16(floats[at]))); break;
      case Scheme::int8: sample.values.push_back(double{scales[g]} * bytes[at]); break;
      case Scheme::int4: sample.values.push_back(double{scales[g]} * nibbles[at] + minimums[g]); break;
    }
  }
  switch (scheme) {
    case Scheme::f32: sample.packed = pack_f32(floats.data(), n, k); break;
    case Scheme::bf16: sample.packed = pack_bf16(floats.data(), n, k); break;
    case Scheme::int8: sample.packed = pack_int8(bytes.data(), scales.data(), n, k, group); break;
    case Scheme::int4: sample.packed = pack_int4(nibbles.data(), scales.data(), minimums.data(), n, k, group); break;
  }
  return sample;
}

// What a product sees of x[row][column].
double seen(const Activations& x, int64_t row, int64_t column) {
  const int64_t at = row * x.spec.stride() + column;
  if (x.spec.format == Format::f32) return static_cast<const float*>(x.data)[at];
  if (x.spec.format == Format::bf16) return from_bf16(static_cast<const uint16_t*>(x.data)[at]);
  const double code = x.spec.format == Format::s8 ? static_cast<const int8_t*>(x.data)[at]
                                                  : static_cast<const uint8_t*>(x.data)[at] - 128;
  return code * x.scales[row * x.spec.groups() + column / x.spec.group];
}

void check_product(Pool& pool, Scheme scheme, int64_t rows, int64_t n, int64_t k) {
  const Sample weight = make_weight(scheme, n, k, 32);
  const std::vector<float> x = normals(rows * k);
  const ActivationSpec spec = wanted(weight.packed);
  ActivationBuffer buffer(spec, rows);
  ActivationBuffer* target = &buffer;
  convert(pool, x.data(), rows, k, &spec, &target, 1);
  const Activations view = buffer.view(spec, rows);
  std::vector<float> out(static_cast<size_t>(rows * n));
  const PackedWeight* part = &weight.packed;
  const int of_part = 0;
  LinearArgs args;
  args.x = &view;
  args.x_of_part = &of_part;
  args.parts = &part;
  args.part_count = 1;
  args.out = out.data();
  args.out_stride = n;
  linear(pool, args);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t o = 0; o < n; ++o) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < k; ++j) {
        const double term = seen(view, row, j) * weight.values[static_cast<size_t>(o * k + j)];
        sum += term;
        size += std::fabs(term);
      }
      expect("scheme " + std::to_string(static_cast<int>(scheme)) + ", " + std::to_string(rows) + " rows",
             out[static_cast<size_t>(row * n + o)], sum, 2e-6 * size + 1e-30);
    }
  }
}

void check_norm(Pool& pool, int64_t rows, int64_t width) {
  const std::vector<float> x = normals(rows * width), weight = normals(width);
  std::vector<float> out(x.size());
  norm(pool, x.data(), weight.data(), 1e-5f, nullptr, rows, width, out.data(), nullptr, nullptr, 0);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += std::pow(x[static_cast<size_t>(row * width + i)], 2.0);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5f);
    for (int64_t i = 0; i < width; ++i) {
      const auto at = static_cast<size_t>(row * width + i);
      const double exact = x[at] * factor * weight[static_cast<size_t>(i)];
      expect("norm", out[at], exact, 1e-6 * std::fabs(exact) + 1e-30);
    }
  }
}

// One sequence of 37 tokens over scattered blocks, 4 query heads on 2 KV heads of 32.
void check_attention(Pool& pool, CacheType type) {
  constexpr int kTokens = 37, kHeads = 4, kKvHeads = 2, kDim = 32;
  KvCache cache(1, CacheShape{type, kKvHeads, kDim, 16, 8});
  const std::vector<int32_t> table = {5, 2, 7, 0};
  const std::vector<float> qkv = normals(int64_t{kTokens} * (kHeads + 2 * kKvHeads) * kDim);
  std::vector<int32_t> positions, kv_positions;
  for (int i = 0; i < kTokens; ++i) {
    positions.push_back(i);
    kv_positions.push_back(table[static_cast<size_t>(i / 16)] * 16 + i % 16);
  }
  const int32_t starts[] = {0, kTokens}, length = kTokens, slot = 0;
  BatchView batch;
  batch.tokens = kTokens;
  batch.seqs = 1;
  batch.positions = positions.data();
  batch.kv_positions = kv_positions.data();
  batch.query_starts = starts;
  batch.kv_lengths = &length;
  batch.slots = &slot;
  batch.block_tables = table.data();
  batch.block_table_stride = 4;
  std::vector<float> q(size_t{kTokens} * kHeads * kDim), out(q.size());
  RopeCacheArgs rope;
  rope.qkv = qkv.data();
  rope.q = q.data();
  rope.heads = kHeads;
  rope_cache(pool, rope, batch, cache, 0);
  AttentionArgs args;
  args.q = q.data();
  args.out = out.data();
  args.heads = kHeads;
  args.scale = 0.17f;
  AttentionScratch scratch;
  attention(pool, args, batch, cache, 0, scratch);

  for (int i = 0; i < kTokens; ++i) {
    for (int head = 0; head < kHeads; ++head) {
      const float* query = q.data() + (i * kHeads + head) * kDim;
      std::vector<double> mixed(kDim, 0.0);
      double total = 0;
      for (int j = 0; j <= i; ++j) {
        float key[kDim], value[kDim];
        cache.read(0, head / (kHeads / kKvHeads), kv_positions[static_cast<size_t>(j)], key, value);
        double score = 0;
        for (int d = 0; d < kDim; ++d) score += double{query[d]} * key[d];
        const double weight = std::exp(score * args.scale);
        total += weight;
        for (int d = 0; d < kDim; ++d) mixed[static_cast<size_t>(d)] += weight * value[d];
      }
      for (int d = 0; d < kDim; ++d)
        expect("attention, cache type " + std::to_string(static_cast<int>(type)),
               out[static_cast<size_t>((i * kHeads + head) * kDim + d)], mixed[static_cast<size_t>(d)] / total, 1e-5);
    }
  }
}

}  // namespace

int main() {
  for (const std::string& isa : available_isas()) {
    select_isa(isa);
    Pool pool(2);
    for (Scheme scheme : {Scheme::f32, Scheme::bf16, Scheme::int8, Scheme::int4})
      for (int64_t rows : {1, 3, 7, 20})
        for (auto [n, k] : {std::pair<int64_t, int64_t>{64, 64}, {70, 96}, {200, 160}, {33, 576}})
          check_product(pool, scheme, rows, n, k);
    for (int64_t width : {1, 7, 64, 577}) check_norm(pool, 3, width);
    for (CacheType type : {CacheType::f32, CacheType::bf16, CacheType::int8}) check_attention(pool, type);
    std::printf("%s: good\n", isa.c_str());
  }
}
