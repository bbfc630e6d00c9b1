// What the threads will read of a product's weights.
#include <algorithm>

#include "kernels/linear.h"
#include "ops/linear.h"

namespace noria {
namespace {

int64_t panels_of(const PackedWeight& weight) { return (weight.n + kPanel - 1) / kPanel; }

// Adds a panel's codes, scales and minimums; returns their bytes.
int64_t add_panel(const PackedWeight& weight, int64_t panel, std::vector<Span>& spans) {
  int64_t bytes = 0;
  for (const Buffer* buffer : {&weight.data, &weight.scales, &weight.minimums}) {
    const int64_t each = static_cast<int64_t>(buffer->bytes()) / panels_of(weight);
    if (each) spans.push_back({buffer->as<char>() + panel * each, each});
    bytes += each;
  }
  return bytes;
}

int64_t add_from_all(const PackedWeight* const* parts, int count, int64_t panel, std::vector<Span>& spans) {
  int64_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += add_panel(*parts[i], panel, spans);
  return bytes;
}

int64_t add_from_one(const PackedWeight* const* parts, int64_t panel, std::vector<Span>& spans) {
  for (; panel >= panels_of(**parts); ++parts) panel -= panels_of(**parts);
  return add_panel(**parts, panel, spans);
}

}  // namespace

std::vector<std::vector<Span>> first_reads(const PackedWeight* const* parts, int count, bool gated, int threads, int64_t bytes) {
  int64_t panels = panels_of(*parts[0]);
  for (int i = 1; i < count && !gated; ++i) panels += panels_of(*parts[i]);
  std::vector<std::vector<Span>> reads(static_cast<size_t>(threads));
  for (int thread = 0; thread < threads; ++thread) {
    std::vector<Span>& spans = reads[static_cast<size_t>(thread)];
    const int64_t end = first_panel(panels, thread + 1, threads);
    int64_t sum = 0;
    for (int64_t panel = first_panel(panels, thread, threads); panel < end && sum < bytes; ++panel)
      sum += gated ? add_from_all(parts, count, panel, spans) : add_from_one(parts, panel, spans);
  }
  return reads;
}

}  // namespace noria
