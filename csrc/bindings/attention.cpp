// KvCache, rope_cache() and attention() on NumPy arrays. Indices are checked here, once, so that kernels need not.
#include <optional>
#include <stdexcept>
#include <string>

#include <nanobind/stl/optional.h>

#include "bindings/module.h"
#include "core/pool.h"
#include "ops/attention.h"

namespace noria {

namespace {

using Ints = Array<const int32_t>;
using Floats = Array<const float>;

CacheType cache_type(const std::string& name) {
  if (name == "f32") return CacheType::f32;
  if (name == "bf16") return CacheType::bf16;
  if (name == "int8") return CacheType::int8;
  throw std::invalid_argument("cache type '" + name + "' is not one of f32, bf16, int8");
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

nb::ndarray<nb::numpy, float> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t n : shape) count *= n;
  float* data = new float[count ? count : 1];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::ndarray<nb::numpy, float>(data, shape, owner);
}

void check_layer(const KvCache& cache, int layer) {
  require(layer >= 0 && layer < cache.layers(), "layer is outside the cache");
}

void copy_blocks(KvCache& cache, Array<const int32_t> pairs) {
  require(pairs.ndim() == 2 && pairs.shape(1) == 2, "pairs must be int32 [copies, 2]");
  for (size_t i = 0; i < pairs.size(); ++i)
    require(pairs.data()[i] >= 0 && pairs.data()[i] < cache.shape().num_blocks, "a block is outside the cache");
  nb::gil_scoped_release release;
  cache.copy_blocks(pairs.data(), static_cast<int64_t>(pairs.shape(0)));
}

nb::tuple read(const KvCache& cache, int layer, Ints kv_positions) {
  check_layer(cache, layer);
  const size_t count = kv_positions.size(), heads = cache.shape().kv_heads, dim = cache.shape().head_dim;
  auto keys = new_array({count, heads, dim}), values = new_array({count, heads, dim});
  for (size_t i = 0; i < count; ++i) {
    const int64_t at = kv_positions.data()[i];
    require(at >= 0 && at < cache.shape().num_blocks * cache.shape().block_size, "a kv_position is outside the cache");
    for (size_t h = 0; h < heads; ++h)
      cache.read(layer, static_cast<int>(h), at, keys.data() + (i * heads + h) * dim, values.data() + (i * heads + h) * dim);
  }
  return nb::make_tuple(keys, values);
}

struct Rope {
  std::optional<Floats> cos, sin, q_norm, k_norm;
  float eps;
};

void check_rope(const Rope& rope, const KvCache& cache, Ints positions, Ints kv_positions) {
  const CacheShape& shape = cache.shape();
  require(rope.cos.has_value() == rope.sin.has_value(), "cos and sin come together");
  for (const auto& norm : {rope.q_norm, rope.k_norm})
    require(!norm || norm->size() == static_cast<size_t>(shape.head_dim), "a head norm must be float32 [head_dim]");
  require(positions.size() == kv_positions.size(), "positions and kv_positions differ in length");
  int64_t rows = int64_t{1} << 31;
  if (rope.cos) {
    require(rope.cos->ndim() == 2 && rope.sin->ndim() == 2 && rope.cos->size() == rope.sin->size() &&
                rope.cos->shape(0) == rope.sin->shape(0),
            "cos and sin must be float32 [positions, rotary_dim / 2]");
    require(2 * rope.cos->shape(1) <= static_cast<size_t>(shape.head_dim), "rotary_dim is larger than head_dim");
    rows = static_cast<int64_t>(rope.cos->shape(0));
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    require(positions.data()[i] >= 0 && positions.data()[i] < rows, "a position is outside the rotation table");
    require(kv_positions.data()[i] >= 0 && kv_positions.data()[i] < shape.num_blocks * shape.block_size,
            "a kv_position is outside the cache");
  }
}

nb::ndarray<nb::numpy, float> rope_cache_array(Pool& pool, Floats qkv, Ints positions, Ints kv_positions, KvCache& cache,
                                               int layer, int heads, std::optional<Floats> cos, std::optional<Floats> sin,
                                               std::optional<Floats> q_norm, std::optional<Floats> k_norm, float eps) {
  check_layer(cache, layer);
  const size_t dim = cache.shape().head_dim, tokens = positions.size();
  require(heads > 0 && qkv.ndim() == 2 && qkv.shape(0) == tokens &&
              qkv.shape(1) == (heads + 2 * size_t(cache.shape().kv_heads)) * dim,
          "qkv must be float32 [tokens, (heads + 2 * kv_heads) * head_dim]");
  check_rope({cos, sin, q_norm, k_norm, eps}, cache, positions, kv_positions);
  auto q = new_array({tokens, heads * dim});
  RopeCacheArgs args;
  args.qkv = qkv.data();
  args.q = q.data();
  args.heads = heads;
  args.rotary_dim = cos ? static_cast<int>(2 * cos->shape(1)) : 0;
  args.cos = cos ? cos->data() : nullptr;
  args.sin = sin ? sin->data() : nullptr;
  args.q_norm = q_norm ? q_norm->data() : nullptr;
  args.k_norm = k_norm ? k_norm->data() : nullptr;
  args.eps = eps;
  BatchView batch;
  batch.tokens = static_cast<int64_t>(tokens);
  batch.positions = positions.data();
  batch.kv_positions = kv_positions.data();
  nb::gil_scoped_release release;
  rope_cache(pool, args, batch, cache, layer);
  return q;
}

// Every block that a sequence's positions need must be in the cache; its tokens end at kv_length - 1.
void check_batch(const BatchView& batch, const KvCache& cache, int64_t table_rows) {
  const CacheShape& shape = cache.shape();
  require(batch.query_starts[0] == 0 && batch.query_starts[batch.seqs] == batch.tokens, "query_starts must cover the tokens");
  for (int64_t s = 0; s < batch.seqs; ++s) {
    const int first = batch.query_starts[s], last = batch.query_starts[s + 1];
    require(first <= last && last <= batch.tokens, "query_starts must ascend");
    require(batch.slots[s] >= 0 && batch.slots[s] < table_rows, "a slot is outside block_tables");
    const int64_t blocks = (int64_t{batch.kv_lengths[s]} + shape.block_size - 1) / shape.block_size;
    require(batch.kv_lengths[s] >= last - first && blocks <= batch.block_table_stride, "a kv_length is outside block_tables");
    for (int i = first; i < last; ++i)
      require(batch.positions[i] == batch.kv_lengths[s] - (last - i), "positions must end at kv_length - 1");
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t block = batch.block_tables[batch.slots[s] * batch.block_table_stride + b];
      require(block >= 0 && block < shape.num_blocks, "a block is outside the cache");
    }
  }
}

nb::ndarray<nb::numpy, float> attention_array(Pool& pool, Floats q, Ints positions, Ints query_starts, Ints kv_lengths,
                                              Ints slots, Ints block_tables, KvCache& cache, int layer, int heads,
                                              float scale, int window, float softcap) {
  check_layer(cache, layer);
  const size_t dim = cache.shape().head_dim, tokens = positions.size();
  require(heads > 0 && heads % cache.shape().kv_heads == 0, "heads must be a multiple of kv_heads");
  require(q.ndim() == 2 && q.shape(0) == tokens && q.shape(1) == heads * dim, "q must be float32 [tokens, heads * head_dim]");
  require(block_tables.ndim() == 2 && query_starts.size() == kv_lengths.size() + 1 && slots.size() == kv_lengths.size(),
          "query_starts [seqs + 1], kv_lengths [seqs], slots [seqs] and block_tables [slots, blocks] do not agree");
  BatchView batch;
  batch.tokens = static_cast<int64_t>(tokens);
  batch.seqs = static_cast<int64_t>(kv_lengths.size());
  batch.positions = positions.data();
  batch.query_starts = query_starts.data();
  batch.kv_lengths = kv_lengths.data();
  batch.slots = slots.data();
  batch.block_tables = block_tables.data();
  batch.block_table_stride = static_cast<int64_t>(block_tables.shape(1));
  check_batch(batch, cache, static_cast<int64_t>(block_tables.shape(0)));
  auto out = new_array({tokens, heads * dim});
  AttentionArgs args;
  args.q = q.data();
  args.out = out.data();
  args.heads = heads;
  args.scale = scale;
  args.window = window;
  args.softcap = softcap;
  AttentionScratch scratch;
  nb::gil_scoped_release release;
  attention(pool, args, batch, cache, layer, scratch);
  return out;
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<KvCache>(m, "KvCache", "Paged keys and values of all layers.")
      .def(
          "__init__",
          [](KvCache* self, int layers, const std::string& type, int kv_heads, int head_dim, int block_size, int64_t num_blocks) {
            new (self) KvCache(layers, CacheShape{cache_type(type), kv_heads, head_dim, block_size, num_blocks});
          },
          nb::arg("layers"), nb::arg("type"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("block_size"),
          nb::arg("num_blocks"))
      .def_prop_ro("block_bytes", &KvCache::block_bytes, "Bytes of one block over all layers.")
      .def_prop_ro("num_blocks", [](const KvCache& cache) { return cache.shape().num_blocks; })
      .def("copy_blocks", &copy_blocks, nb::arg("pairs"), "Copies whole blocks: int32 [copies, 2] of source, destination.")
      .def("read", &read, nb::arg("layer"), nb::arg("kv_positions"),
           "Keys and values as float32 [positions, kv_heads, head_dim] each. For tests and inspection: slow.");
  m.def("rope_cache", &rope_cache_array, nb::arg("pool"), nb::arg("qkv"), nb::arg("positions"), nb::arg("kv_positions"),
        nb::arg("cache"), nb::arg("layer"), nb::arg("heads"), nb::arg("cos").none(), nb::arg("sin").none(),
        nb::arg("q_norm").none() = nb::none(), nb::arg("k_norm").none() = nb::none(), nb::arg("eps") = 1e-6f,
        "The RopeCache op: writes keys and values, returns queries float32 [tokens, heads * head_dim].");
  m.def("attention", &attention_array, nb::arg("pool"), nb::arg("q"), nb::arg("positions"), nb::arg("query_starts"),
        nb::arg("kv_lengths"), nb::arg("slots"), nb::arg("block_tables"), nb::arg("cache"), nb::arg("layer"),
        nb::arg("heads"), nb::arg("scale"), nb::arg("window") = 0, nb::arg("softcap") = 0.0f,
        "The Attention op over the cache: float32 [tokens, heads * head_dim].");
}

}  // namespace noria
