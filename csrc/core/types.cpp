#include "core/types.h"

#include <mutex>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace noria {

namespace {

constexpr size_t kLine = 64;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void* allocate_small(size_t bytes) {
  const size_t rounded = round_up(bytes, kLine);
  void* data = std::aligned_alloc(kLine, rounded);
  if (!data) throw std::bad_alloc();
  std::memset(data, 0, rounded);
  return data;
}

#if defined(__linux__)

// Weights are read from end to end at every step. In pages of 4 kB that is a translation miss every 64 lines, so all but
// small buffers are cut from mappings in pages of 2 MB where the system grants them. Pages come zeroed on first touch:
// what is never used costs no memory.
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmall = size_t{64} << 10;    // below this: the ordinary heap
constexpr size_t kChunk = size_t{32} << 20;
constexpr size_t kLarge = kChunk / 4;          // from here on: a mapping of its own

char* map_pages(size_t bytes) {
  void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(raw);
  char* aligned = start + (round_up(reinterpret_cast<size_t>(start), kHugePage) - reinterpret_cast<size_t>(start));
  if (aligned != start) munmap(start, static_cast<size_t>(aligned - start));
  munmap(aligned + bytes, static_cast<size_t>(start + kHugePage - aligned));
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return aligned;
}

// A mapping that buffers are cut from in turn; unmapped when the last of them goes.
struct Chunk {
  char* base = nullptr;
  size_t used = 0;
  size_t live = 0;
};

std::mutex chunk_mutex;
Chunk* open_chunk = nullptr;

void drop(Chunk* chunk) {
  if (--chunk->live > 0) return;
  if (chunk == open_chunk) open_chunk = nullptr;
  munmap(chunk->base, kChunk);
  delete chunk;
}

void* allocate_in_chunk(size_t bytes, void*& owner) {
  std::lock_guard<std::mutex> lock(chunk_mutex);
  if (!open_chunk || open_chunk->used + bytes > kChunk) {
    auto* fresh = new Chunk;
    try {
      fresh->base = map_pages(kChunk);
    } catch (...) {
      delete fresh;
      throw;
    }
    open_chunk = fresh;
  }
  void* data = open_chunk->base + open_chunk->used;
  open_chunk->used += round_up(bytes, kLine);
  ++open_chunk->live;
  owner = open_chunk;
  return data;
}

#endif

}  // namespace

#if defined(__linux__)

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (bytes < kSmall) data_ = allocate_small(bytes);
  else if (bytes < kLarge) data_ = allocate_in_chunk(bytes, owner_);
  else data_ = map_pages(round_up(bytes, kHugePage));
}

Buffer::~Buffer() {
  if (!data_) return;
  if (bytes_ < kSmall) {
    std::free(data_);
    return;
  }
  if (bytes_ >= kLarge) {
    munmap(data_, round_up(bytes_, kHugePage));
    return;
  }
  std::lock_guard<std::mutex> lock(chunk_mutex);
  drop(static_cast<Chunk*>(owner_));
}

#else

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes > 0) data_ = allocate_small(bytes);
}

Buffer::~Buffer() { std::free(data_); }

#endif

}  // namespace noria
