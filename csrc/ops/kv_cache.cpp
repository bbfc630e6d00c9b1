// Memory of the paged KV cache.
#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "kernels/attention.h"
#include "ops/attention.h"

namespace noria {

static constexpr size_t kHugePage = size_t{2} << 20;
static constexpr size_t kSlack = 1024;  // kernels load whole vectors and tiles at the end of the last unit

static int element_bytes(CacheType type) { return type == CacheType::f32 ? 4 : type == CacheType::bf16 ? 2 : 1; }

static void check(int layers, const CacheShape& shape) {
  const int b = shape.block_size;
  if (b != 8 && b != 16 && b != 32 && b != 64 && b != 128)
    throw std::invalid_argument("block_size must be 8, 16, 32, 64 or 128");
  if (shape.head_dim < 8 || shape.head_dim > kMaxHeadDim || shape.head_dim % 8)
    throw std::invalid_argument("head_dim must be a multiple of 8, at most 256");
  if (layers < 1 || shape.kv_heads < 1 || shape.num_blocks < 1)
    throw std::invalid_argument("layers, kv_heads and num_blocks must be at least 1");
}

KvCache::KvCache(int layers, const CacheShape& shape) : layers_(layers), shape_(shape) {
  check(layers, shape);
  const int64_t tokens = shape.block_size;
  unit_bytes_ = 2 * tokens * shape.head_dim * element_bytes(shape.type);
  if (shape.type == CacheType::int8) unit_bytes_ += 2 * tokens * 4;
  block_bytes_ = unit_bytes_ * shape.kv_heads * layers;
  if (shape.num_blocks > (int64_t{1} << 46) / block_bytes_) throw std::bad_alloc();
  mapped_ = static_cast<size_t>(shape.num_blocks * block_bytes_) + kSlack + kHugePage;
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  // Fewer page faults and TLB misses. A refusal changes nothing but speed.
  if (mapped_ > 8 * kHugePage) madvise(memory_, mapped_, MADV_HUGEPAGE);
}

KvCache::~KvCache() { munmap(memory_, mapped_); }

CacheUnits KvCache::units(int layer, int kv_head) const {
  const int64_t half = int64_t{shape_.block_size} * shape_.head_dim * element_bytes(shape_.type);
  CacheUnits units;
  units.type = shape_.type;
  units.head_dim = shape_.head_dim;
  while ((1 << units.block_shift) < shape_.block_size) ++units.block_shift;
  units.base = memory_ + (int64_t{layer} * shape_.kv_heads + kv_head) * unit_bytes_;
  units.block_stride = block_bytes_;
  units.values = half;
  units.key_scales = 2 * half;
  units.value_scales = 2 * half + int64_t{shape_.block_size} * 4;
  return units;
}

void KvCache::copy_blocks(const int32_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (pairs[2 * i] == pairs[2 * i + 1]) continue;
    std::memcpy(memory_ + pairs[2 * i + 1] * block_bytes_, memory_ + pairs[2 * i] * block_bytes_,
                static_cast<size_t>(block_bytes_));
  }
}

static float element(const char* at, CacheType type, int bias) {
  if (type == CacheType::int8) return static_cast<float>(static_cast<int>(static_cast<uint8_t>(*at)) - bias);
  uint32_t bits = 0;
  if (type == CacheType::f32) {
    std::memcpy(&bits, at, 4);
  } else {
    uint16_t half;
    std::memcpy(&half, at, 2);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void KvCache::read(int layer, int kv_head, int64_t kv_position, float* key, float* value) const {
  const CacheUnits units = this->units(layer, kv_head);
  const int size = element_bytes(shape_.type), pack = 4 / size, dim = shape_.head_dim;
  const int lanes = shape_.block_size == 8 ? 8 : 16;
  const int64_t offset = kv_position % shape_.block_size;
  const char* unit = units.base + kv_position / shape_.block_size * units.block_stride;
  const char* keys = unit + offset / lanes * lanes * dim * size + offset % lanes * 4;
  const char* values = unit + units.values + offset / pack * pack * dim * size + offset % pack * size;
  float key_scale = 1, value_scale = 1;
  if (shape_.type == CacheType::int8) {
    std::memcpy(&key_scale, unit + units.key_scales + offset * 4, 4);
    std::memcpy(&value_scale, unit + units.value_scales + offset * 4, 4);
  }
  for (int i = 0; i < dim; ++i) {
    key[i] = element(keys + int64_t{i / pack} * lanes * 4 + i % pack * size, shape_.type, 128) * key_scale;
    if (shape_.type == CacheType::int8) {
      int8_t code;
      std::memcpy(&code, values + i * 4, 1);
      value[i] = static_cast<float>(code) * value_scale;
    } else {
      value[i] = element(values + int64_t{i} * 4, shape_.type, 0) * value_scale;
    }
  }
}

}  // namespace noria
