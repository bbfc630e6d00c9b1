// From logits to tokens. The contract (order of operations, random numbers) is noria.backends.base.Sampler's docstring.
// A row's result depends on that row and its slot only.
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "core/types.h"

namespace noria {

struct RowScan;  // kernels/sampling.h

struct SamplingParams {
  float temperature = 1, top_p = 1, min_p = 0;
  int32_t top_k = 0;  // <= 0: all
  float repetition = 1, frequency = 0, presence = 0;
  int32_t min_tokens = 0;
  int32_t logprobs = -1;  // alternatives asked for; -1: no log-probabilities
  uint64_t seed = 0;
  uint32_t choice = 0;
};

// Columns over rows; `top_ids` and `top` are [rows][k].
struct LogProbColumns {
  float* chosen = nullptr;
  int32_t* ranks = nullptr;
  int32_t* top_ids = nullptr;
  float* top = nullptr;
  int64_t k = 0;
};

struct Logits {
  float* data = nullptr;
  int64_t rows = 0, stride = 0;  // floats from a row to the next
  float* row(int64_t i) const { return data + i * stride; }
};

// Which tokens some of the rows may yield: bit t % 32 of word t / 32 stands for token t.
struct TokenMasks {
  const int32_t* rows = nullptr;  // [count], of the logits
  const uint32_t* bits = nullptr;  // [count][words]
  int64_t count = 0, words = 0;
};

class Sampler {
 public:
  Sampler(int64_t slots, int64_t vocab);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  int64_t slots() const { return static_cast<int64_t>(states_.size()); }
  int64_t vocab() const { return vocab_; }

  // Token ids must lie in the vocabulary. `tokens`: prompt, then output so far.
  void admit(int64_t slot, const SamplingParams& params, std::vector<std::pair<int32_t, float>> bias,
             std::vector<int32_t> stop_ids, const int32_t* tokens, int64_t count, int64_t prompt_length);
  void release(int64_t slot);
  bool admitted(int64_t slot) const { return states_[static_cast<size_t>(slot)].used; }
  const SamplingParams& params(int64_t slot) const { return states_[static_cast<size_t>(slot)].params; }

  // One token per row, noted in its slot's penalties. Logits may be overwritten. `logprobs` or null. A row's mask allows at
  // least one token.
  void sample(Pool& pool, const Logits& logits, const int32_t* slots, const int32_t* positions, const TokenMasks& masks,
              int32_t* tokens, const LogProbColumns* logprobs);
  // Log-probabilities of targets and of the k most likely tokens of each row.
  void score(Pool& pool, const Logits& logits, const int32_t* targets, const LogProbColumns& out);

 private:
  struct Seen {
    int32_t token, outputs;  // times in the output
  };
  struct Slot {
    bool used = false, penalised = false;
    SamplingParams params;
    std::vector<std::pair<int32_t, float>> bias;
    std::vector<int32_t> stop_ids;
    std::vector<Seen> seen;  // tokens of prompt (for the repetition penalty) and output
    std::unordered_map<int32_t, size_t> index;
    void note(int32_t token, int outputs);
  };
  struct Work;  // of one thread
  bool allows_others(const Slot& slot, const uint32_t* mask) const;
  void adjust(const Slot& slot, int32_t position, const uint32_t* mask, float* x, Work& work) const;
  int64_t keep_top_k(const float* x, int64_t k, Work& work) const;
  int64_t keep_likely(const SamplingParams& p, const float* x, float largest, Work& work) const;
  int64_t keep_mass(const float* x, float largest, float factor, double target, Work& work) const;
  int32_t draw_from_all(const SamplingParams& p, const float* x, const RowScan& row, float factor, double u,
                        Work& work) const;
  int32_t draw(const Slot& slot, int32_t position, float* x, Work& work) const;
  int64_t count_larger(const float* x, float logit, const Work& work) const;
  void log_probs(float* x, int32_t chosen, int64_t wanted, int64_t row, const LogProbColumns& out, Work& work) const;
  void prepare(Pool& pool);  // work space for each thread

  int64_t vocab_;
  std::vector<Slot> states_;
  std::vector<std::unique_ptr<Work>> works_;
  std::vector<const uint32_t*> masks_;  // of the rows of a call, or null
};

}  // namespace noria
