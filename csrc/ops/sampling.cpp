// Sampling without sorting the vocabulary. Thresholds are found on values (ties are kept by nature): top-k through the
// largest logit of each chunk of tokens, top-p by narrowing the range of probabilities in which the mass is reached.
#include "ops/sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "core/isa.h"
#include "kernels/sampling.h"
#include "ops/philox.h"

namespace noria {

static constexpr float kInfinity = std::numeric_limits<float>::infinity();
static constexpr int64_t kSlack = 16;  // room that `collect` may write beyond its results

struct Sampler::Work {
  explicit Work(int64_t vocab)
      : e(vocab + kSlack), values(vocab + kSlack), spare(vocab + kSlack), ids(vocab + kSlack), maxima(sampling_chunks(vocab)),
        ranked(sampling_chunks(vocab) * kColumns), sums(sampling_chunks(vocab)) {}
  std::vector<float> e;                            // probabilities of candidates, the largest being 1
  std::vector<float> values, spare;                // candidates
  std::vector<int32_t> ids;
  std::vector<float> maxima;                       // largest logit per chunk
  std::vector<float> ranked;
  std::vector<double> sums;                        // per chunk
  std::vector<std::pair<int32_t, float>> changed;  // logits before `adjust`, in order
  std::vector<std::pair<float, int32_t>> best;
  std::vector<float> raw;                          // logits before a mask, where log-probabilities are asked for
};

Sampler::Sampler(int64_t slots, int64_t vocab) : vocab_(vocab), states_(static_cast<size_t>(slots)) {}
Sampler::~Sampler() = default;

void Sampler::Slot::note(int32_t token, int outputs) {
  const auto [at, fresh] = index.try_emplace(token, seen.size());
  if (fresh) seen.push_back({token, outputs});
  else seen[at->second].outputs += outputs;
}

void Sampler::admit(int64_t slot, const SamplingParams& params, std::vector<std::pair<int32_t, float>> bias,
                    std::vector<int32_t> stop_ids, const int32_t* tokens, int64_t count, int64_t prompt_length) {
  Slot state;
  state.used = true;
  state.params = params;
  state.penalised = params.repetition != 1.0f || params.frequency != 0.0f || params.presence != 0.0f;
  state.bias = std::move(bias);
  std::sort(stop_ids.begin(), stop_ids.end());
  stop_ids.erase(std::unique(stop_ids.begin(), stop_ids.end()), stop_ids.end());
  state.stop_ids = std::move(stop_ids);
  if (state.penalised) {
    const int64_t first = params.repetition != 1.0f ? 0 : prompt_length;
    for (int64_t i = first; i < count; ++i) state.note(tokens[i], i >= prompt_length);
  }
  states_[static_cast<size_t>(slot)] = std::move(state);
}

void Sampler::release(int64_t slot) { states_[static_cast<size_t>(slot)] = Slot(); }

// Whether a mask leaves anything but end tokens.
bool Sampler::allows_others(const Slot& slot, const uint32_t* mask) const {
  int64_t allowed = 0, ends = 0;
  for (int64_t i = 0; i < vocab_; i += 32) {
    uint32_t word = mask[i / 32];
    if (vocab_ - i < 32) word &= (1u << (vocab_ - i)) - 1u;
    allowed += __builtin_popcount(word);
  }
  for (const int32_t token : slot.stop_ids) ends += mask[token / 32] >> (token % 32) & 1u;
  return allowed > ends;
}

// Bias, penalties and the ban on end tokens, in place; remembers what it changed. `mask` or null.
void Sampler::adjust(const Slot& slot, int32_t position, const uint32_t* mask, float* x, Work& work) const {
  work.changed.clear();
  const auto change = [&](int32_t token, float value) {
    work.changed.emplace_back(token, x[token]);
    x[token] = value;
  };
  for (const auto& [token, bias] : slot.bias) change(token, x[token] + bias);
  if (slot.penalised) {
    const SamplingParams& p = slot.params;
    constexpr size_t kAhead = 16;  // the row lies in no near cache yet
    for (size_t i = 0; i < slot.seen.size(); ++i) {
      if (i + kAhead < slot.seen.size()) __builtin_prefetch(x + slot.seen[i + kAhead].token, 1, 3);
      const Seen& seen = slot.seen[i];
      float value = x[seen.token];
      if (p.repetition != 1.0f) value = value > 0 ? value / p.repetition : value * p.repetition;
      if (seen.outputs > 0) value = value - p.frequency * static_cast<float>(seen.outputs) - p.presence;
      change(seen.token, value);
    }
  }
  if (position < slot.params.min_tokens && (!mask || allows_others(slot, mask)))
    for (int32_t token : slot.stop_ids) change(token, -kInfinity);
}

namespace {

// Infinite logits would make differences undefined; they become the largest finite number.
void bound(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (x[i] == kInfinity) x[i] = FLT_MAX;
}
void bounded_maxima(const SamplingKernels& kernels, float* x, int64_t n, float* maxima) {
  if (kernels.maxima(x, n, maxima) < kInfinity) return;
  bound(x, n);
  kernels.maxima(x, n, maxima);
}
RowScan bounded_scan(const SamplingKernels& kernels, float* x, int64_t n, float factor, float* maxima, double* sums) {
  const RowScan row = kernels.scan(x, n, factor, maxima, sums);
  if (row.largest < kInfinity) return row;
  bound(x, n);
  return kernels.scan(x, n, factor, maxima, sums);
}

// A value that at least k of the row's numbers reach, and few more: the k-th largest of maxima over parts of the row.
float lower_bound_of_top(const SamplingKernels& kernels, const float* x, int64_t n, const std::vector<float>& maxima,
                         std::vector<float>& ranked, int64_t k) {
  const int64_t chunks = static_cast<int64_t>(maxima.size());
  if (k <= chunks) {
    ranked.assign(maxima.begin(), maxima.end());
  } else if (k <= chunks * kColumns * 3 / 4) {
    ranked.resize(static_cast<size_t>(chunks * kColumns));
    kernels.columns(x, n, ranked.data());
  } else {
    return -kInfinity;
  }
  std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), std::greater<float>());
  return ranked[static_cast<size_t>(k - 1)];
}

// Indices and values of x >= low in ascending index, passing over chunks that hold none.
int64_t collect_from(const SamplingKernels& kernels, const float* x, int64_t n, const std::vector<float>& maxima, float low,
                     float* values, int32_t* ids) {
  int64_t count = 0;
  for (int64_t start = 0; start < n; start += kSamplingChunk) {
    if (!(maxima[static_cast<size_t>(start / kSamplingChunk)] >= low)) continue;
    const int64_t size = std::min(kSamplingChunk, n - start);
    const int64_t found = kernels.collect(x + start, size, low, kInfinity, values + count, ids + count);
    for (int64_t i = 0; i < found; ++i) ids[count + i] += static_cast<int32_t>(start);
    count += found;
  }
  return count;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Range [low, high) of probabilities in which the mass reaches the target; `above`: mass of those >= high.
struct Bracket {
  float low = 0, high = from_bits(to_bits(1.0f) + 1);
  double above = 0;
};

// Thresholds descend.
void narrow(const SamplingKernels& kernels, const float* e, int64_t n, const float* thresholds, double target, Bracket& in) {
  double masses[kThresholds];
  kernels.masses(e, n, thresholds, masses);
  const double before = in.above;
  for (int j = 0; j < kThresholds; ++j) {
    if (before + masses[j] >= target) {
      in.low = thresholds[j];
      return;
    }
    in.high = thresholds[j];
    in.above = before + masses[j];
  }
}

// The largest value v of e such that the e >= v sum up to target (or the smallest one). e may lie in neither buffer.
float nucleus(const SamplingKernels& kernels, const float* e, int64_t n, double target, std::vector<float>& values,
              std::vector<float>& spare) {
  static const float first[kThresholds] = {0.5f, 0.125f, 0x1p-5f, 0x1p-8f, 0x1p-11f, 0x1p-15f, 0x1p-20f};
  Bracket in;
  narrow(kernels, e, n, first, target, in);
  int64_t count = kernels.collect(e, n, in.low, in.high, values.data(), nullptr);
  while (count > 128 && to_bits(in.high) - to_bits(in.low) > kThresholds + 1) {
    const uint32_t low = to_bits(in.low), step = (to_bits(in.high) - low) / (kThresholds + 1);
    float thresholds[kThresholds];
    for (int j = 0; j < kThresholds; ++j) thresholds[j] = from_bits(low + step * static_cast<uint32_t>(kThresholds - j));
    narrow(kernels, values.data(), count, thresholds, target, in);
    count = kernels.collect(values.data(), count, in.low, in.high, spare.data(), nullptr);
    values.swap(spare);
  }
  std::sort(values.begin(), values.begin() + count, std::greater<float>());
  double mass = in.above;
  for (int64_t i = 0; i < count; ++i) {
    mass += static_cast<double>(values[static_cast<size_t>(i)]);
    if (mass >= target) return values[static_cast<size_t>(i)];
  }
  return count ? values[static_cast<size_t>(count - 1)] : in.low;
}

// Index at which the running sum of the e >= threshold exceeds the target. sums: of the kept ones per chunk; chunk(start)
// yields the e of one chunk.
template <class Chunk>
int64_t walk(Chunk chunk, int64_t n, float threshold, const std::vector<double>& sums, double target) {
  double sum = 0;
  int64_t last = 0;  // last kept one seen, or the first of the chunk that holds it
  bool exact = false;
  const auto scan = [&](int64_t start) {
    const float* e = chunk(start);
    for (int64_t i = 0; i < std::min(kSamplingChunk, n - start); ++i) {
      if (e[i] < threshold || e[i] <= 0) continue;
      last = start + i;
      exact = true;
      sum += static_cast<double>(e[i]);
      if (sum > target) return true;
    }
    return false;
  };
  for (int64_t start = 0; start < n; start += kSamplingChunk) {
    const double mass = sums[static_cast<size_t>(start / kSamplingChunk)];
    if (mass <= 0) continue;
    if (sum + mass > target) {
      if (scan(start)) return last;
    } else {
      sum += mass;
      last = start;
      exact = false;
    }
  }
  // Rounding kept the sum from exceeding the target: the last kept one.
  if (!exact) scan(last);
  return last;
}

int32_t first_equal(const float* x, int64_t n, const std::vector<float>& maxima, float value) {
  for (size_t chunk = 0; chunk < maxima.size(); ++chunk) {
    if (maxima[chunk] != value) continue;
    for (int64_t i = static_cast<int64_t>(chunk) * kSamplingChunk; i < n; ++i)
      if (x[i] == value) return static_cast<int32_t>(i);
  }
  return 0;
}

}  // namespace

// The k most likely tokens and their ties, as candidates; returns their number. work.maxima: of x.
int64_t Sampler::keep_top_k(const float* x, int64_t k, Work& work) const {
  const SamplingKernels& kernels = *noria::kernels().sampling;
  const float low = lower_bound_of_top(kernels, x, vocab_, work.maxima, work.ranked, k);
  const int64_t n = collect_from(kernels, x, vocab_, work.maxima, low, work.values.data(), work.ids.data());
  if (n <= k) return n;
  std::copy_n(work.values.begin(), n, work.spare.begin());
  std::nth_element(work.spare.begin(), work.spare.begin() + (k - 1), work.spare.begin() + n, std::greater<float>());
  const float threshold = work.spare[static_cast<size_t>(k - 1)];
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (work.values[static_cast<size_t>(i)] < threshold) continue;
    work.values[static_cast<size_t>(kept)] = work.values[static_cast<size_t>(i)];
    work.ids[static_cast<size_t>(kept++)] = work.ids[static_cast<size_t>(i)];
  }
  return kept;
}

// Candidates that min-p may keep: with a margin for the roundings on the way to the probability.
int64_t Sampler::keep_likely(const SamplingParams& p, const float* x, float largest, Work& work) const {
  const float low = largest + p.temperature * (std::log(p.min_p) - 1e-3f) - 1e-5f * std::fabs(largest);
  return collect_from(*noria::kernels().sampling, x, vocab_, work.maxima, low, work.values.data(), work.ids.data());
}

// Tokens whose probabilities reach `target` together, as candidates, with those probabilities in work.e; returns their
// number, or 0 if they are so many that nothing is saved.
int64_t Sampler::keep_mass(const float* x, float largest, float factor, double target, Work& work) const {
  const SamplingKernels& kernels = *noria::kernels().sampling;
  for (const float least : {0x1p-8f, 0x1p-14f, 0x1p-22f}) {  // of the largest probability
    const float low = largest + std::log(least) / factor;
    const int64_t n = collect_from(kernels, x, vocab_, work.maxima, low, work.values.data(), work.ids.data());
    if (kernels.exponentials(work.values.data(), n, largest, factor, work.e.data(), nullptr) >= target) return n;
    if (n > vocab_ / 8) return 0;
  }
  return 0;
}

// Of all tokens, or of those that reach top_p. work.maxima and work.sums are of a scan of x.
int32_t Sampler::draw_from_all(const SamplingParams& p, const float* x, const RowScan& row, float factor, double u,
                               Work& work) const {
  const SamplingKernels& kernels = *noria::kernels().sampling;
  float* e = work.e.data();
  if (p.top_p >= 1.0f) {
    const auto chunk = [&](int64_t start) {
      kernels.exponentials(x + start, std::min(kSamplingChunk, vocab_ - start), row.largest, factor, e, nullptr);
      return e;
    };
    return static_cast<int32_t>(walk(chunk, vocab_, 0.0f, work.sums, u * row.total));
  }
  const double target = static_cast<double>(p.top_p) * row.total;
  const int64_t kept = keep_mass(x, row.largest, factor, target, work), n = kept ? kept : vocab_;
  if (!kept) kernels.exponentials(x, n, row.largest, factor, e, nullptr);
  // The candidates' logits, which lie in `values`, are not needed any more.
  const float threshold = std::max(p.min_p, nucleus(kernels, e, n, target, work.values, work.spare));
  const double total = kernels.kept_sums(e, n, threshold, work.sums.data());
  const int64_t at = walk([&](int64_t start) { return e + start; }, n, threshold, work.sums, u * total);
  return kept ? work.ids[static_cast<size_t>(at)] : static_cast<int32_t>(at);
}

int32_t Sampler::draw(const Slot& slot, int32_t position, float* x, Work& work) const {
  const SamplingKernels& kernels = *noria::kernels().sampling;
  const SamplingParams& p = slot.params;
  const float factor = p.temperature > 0.0f ? std::min(1.0f / p.temperature, 1e30f) : 0.0f;
  const double u = uniform(p.seed, static_cast<uint32_t>(position), p.choice);
  const bool top_k = p.top_k > 0 && p.top_k < vocab_, top_p = p.top_p < 1.0f;
  if (p.temperature > 0.0f && !top_k && (top_p || p.min_p <= 0.0f)) {
    const RowScan row = bounded_scan(kernels, x, vocab_, factor, work.maxima.data(), work.sums.data());
    return row.largest == -kInfinity ? 0 : draw_from_all(p, x, row, factor, u, work);
  }
  bounded_maxima(kernels, x, vocab_, work.maxima.data());
  const float largest = *std::max_element(work.maxima.begin(), work.maxima.end());
  if (largest == -kInfinity) return 0;
  if (p.temperature == 0.0f) return first_equal(x, vocab_, work.maxima, largest);
  const int64_t n = top_k ? keep_top_k(x, p.top_k, work) : keep_likely(p, x, largest, work);
  float* e = work.e.data();
  double total = kernels.exponentials(work.values.data(), n, largest, factor, e, work.sums.data());
  float threshold = p.min_p;
  if (top_p)  // the candidates' logits, which lie in `values`, are not needed any more
    threshold = std::max(threshold, nucleus(kernels, e, n, static_cast<double>(p.top_p) * total, work.values, work.spare));
  if (threshold > 0.0f) total = kernels.kept_sums(e, n, threshold, work.sums.data());
  return work.ids[static_cast<size_t>(
      walk([&](int64_t start) { return e + start; }, n, threshold, work.sums, u * total))];
}

// How many logits are larger than this one, passing over chunks that hold none.
int64_t Sampler::count_larger(const float* x, float logit, const Work& work) const {
  const SamplingKernels& kernels = *noria::kernels().sampling;
  int64_t count = 0;
  for (int64_t start = 0; start < vocab_; start += kSamplingChunk)
    if (work.maxima[static_cast<size_t>(start / kSamplingChunk)] > logit)
      count += kernels.count_above(x + start, std::min(kSamplingChunk, vocab_ - start), logit);
  return count;
}

// Of raw logits x.
void Sampler::log_probs(float* x, int32_t chosen, int64_t wanted, int64_t row, const LogProbColumns& out, Work& work) const {
  const SamplingKernels& kernels = *noria::kernels().sampling;
  const RowScan found = bounded_scan(kernels, x, vocab_, 1.0f, work.maxima.data(), work.sums.data());
  const double level = found.largest > -kInfinity ? static_cast<double>(found.largest) + std::log(found.total) : 0;
  const auto value = [&](float logit) {
    return std::isnan(logit) ? -kInfinity : static_cast<float>(static_cast<double>(logit) - level);
  };
  const float logit = std::isnan(x[chosen]) ? -kInfinity : x[chosen];
  out.chosen[row] = value(logit);
  out.ranks[row] = static_cast<int32_t>(1 + count_larger(x, logit, work));
  const int64_t k = std::min(wanted, vocab_);
  if (k < 1) return;
  const float low = lower_bound_of_top(kernels, x, vocab_, work.maxima, work.ranked, k);
  const int64_t n = collect_from(kernels, x, vocab_, work.maxima, low, work.values.data(), work.ids.data());
  work.best.clear();
  for (int64_t i = 0; i < n; ++i) work.best.emplace_back(-work.values[static_cast<size_t>(i)], work.ids[static_cast<size_t>(i)]);
  const int64_t count = std::min(k, n);
  std::partial_sort(work.best.begin(), work.best.begin() + count, work.best.end());
  for (int64_t i = 0; i < count; ++i) {
    out.top_ids[row * out.k + i] = work.best[static_cast<size_t>(i)].second;
    out.top[row * out.k + i] = value(-work.best[static_cast<size_t>(i)].first);
  }
}

static void clear(const LogProbColumns& out, int64_t rows) {
  std::fill_n(out.chosen, rows, 0.0f);
  std::fill_n(out.ranks, rows, 0);
  std::fill_n(out.top_ids, rows * out.k, -1);
  std::fill_n(out.top, rows * out.k, 0.0f);
}

void Sampler::prepare(Pool& pool) {
  while (static_cast<int>(works_.size()) < pool.threads()) works_.push_back(std::make_unique<Work>(vocab_));
}

void Sampler::sample(Pool& pool, const Logits& logits, const int32_t* slots, const int32_t* positions,
                     const TokenMasks& masks, int32_t* tokens, const LogProbColumns* logprobs) {
  prepare(pool);
  masks_.assign(static_cast<size_t>(logits.rows), nullptr);
  for (int64_t i = 0; i < masks.count; ++i) masks_[static_cast<size_t>(masks.rows[i])] = masks.bits + i * masks.words;
  if (logprobs) clear(*logprobs, logits.rows);
  pool.run(logits.rows, [&](int64_t row, int thread) {
    Work& work = *works_[static_cast<size_t>(thread)];
    const Slot& slot = states_[static_cast<size_t>(slots[row])];
    float* x = logits.row(row);
    const uint32_t* mask = masks_[static_cast<size_t>(row)];
    const bool scored = logprobs && slot.params.logprobs >= 0;
    if (mask && scored) work.raw.assign(x, x + vocab_);
    if (mask) noria::kernels().sampling->forbid(x, vocab_, mask);
    adjust(slot, positions[row], mask, x, work);
    tokens[row] = draw(slot, positions[row], x, work);
    if (!scored) return;
    for (auto at = work.changed.rbegin(); !mask && at != work.changed.rend(); ++at) x[at->first] = at->second;
    log_probs(mask ? work.raw.data() : x, tokens[row], slot.params.logprobs, row, *logprobs, work);
  });
  // After all rows: two rows of one slot must not race.
  for (int64_t row = 0; row < logits.rows; ++row) {
    Slot& slot = states_[static_cast<size_t>(slots[row])];
    if (slot.penalised) slot.note(tokens[row], 1);
  }
}

void Sampler::score(Pool& pool, const Logits& logits, const int32_t* targets, const LogProbColumns& out) {
  prepare(pool);
  clear(out, logits.rows);
  pool.run(logits.rows, [&](int64_t row, int thread) {
    Work& work = *works_[static_cast<size_t>(thread)];
    log_probs(logits.row(row), targets[row], out.k, row, out, work);
  });
}

}  // namespace noria
