// Sampler on NumPy arrays. Slots and token ids are checked here, once.
#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "core/pool.h"
#include "ops/sampling.h"

namespace noria {

namespace {

using Ints = Array<const int32_t>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

template <class T> nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t n : shape) count *= n;
  T* data = new T[count ? count : 1];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

// Log-probabilities as the arrays (chosen, ranks, top_ids, top).
struct LogProbArrays {
  nb::ndarray<nb::numpy, float> chosen, top;
  nb::ndarray<nb::numpy, int32_t> ranks, top_ids;
  size_t k;
  LogProbArrays(size_t rows, size_t k)
      : chosen(new_array<float>({rows})), top(new_array<float>({rows, k})), ranks(new_array<int32_t>({rows})),
        top_ids(new_array<int32_t>({rows, k})), k(k) {}
  LogProbColumns columns() { return {chosen.data(), ranks.data(), top_ids.data(), top.data(), static_cast<int64_t>(k)}; }
  nb::tuple tuple() { return nb::make_tuple(chosen, ranks, top_ids, top); }
};

void check_slot(const Sampler& sampler, int64_t slot) { require(slot >= 0 && slot < sampler.slots(), "slot is outside the sampler"); }

void check_tokens(const Sampler& sampler, const Ints& ids) {
  for (size_t i = 0; i < ids.size(); ++i)
    require(ids.data()[i] >= 0 && ids.data()[i] < sampler.vocab(), "a token id is outside the vocabulary");
}

Logits view(const Sampler& sampler, const Rows& logits) {
  require(static_cast<int64_t>(logits.shape(1)) == sampler.vocab() && (logits.stride(1) == 1 || logits.shape(1) == 1),
          "logits must be float32 [rows, vocab] with contiguous rows");
  return {logits.data(), static_cast<int64_t>(logits.shape(0)), logits.stride(0)};
}

void admit(Sampler& sampler, int64_t slot, uint64_t seed, uint32_t choice, float temperature, int32_t top_k, float top_p,
           float min_p, float repetition, float frequency, float presence, int32_t min_tokens, int32_t logprobs, Ints bias_ids,
           Array<const float> bias, Ints stop_ids, Ints token_ids, int64_t prompt_length) {
  check_slot(sampler, slot);
  require(bias_ids.size() == bias.size(), "bias_ids and bias differ in length");
  require(prompt_length >= 0 && prompt_length <= static_cast<int64_t>(token_ids.size()), "prompt_length exceeds token_ids");
  require(temperature >= 0 && repetition > 0, "temperature must be at least 0 and repetition_penalty above 0");
  for (const Ints& ids : {bias_ids, stop_ids, token_ids}) check_tokens(sampler, ids);
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  params.repetition = repetition;
  params.frequency = frequency;
  params.presence = presence;
  params.min_tokens = min_tokens;
  params.logprobs = logprobs;
  params.seed = seed;
  params.choice = choice;
  std::vector<std::pair<int32_t, float>> biases(bias.size());
  for (size_t i = 0; i < bias.size(); ++i) biases[i] = {bias_ids.data()[i], bias.data()[i]};
  sampler.admit(slot, params, std::move(biases), std::vector<int32_t>(stop_ids.data(), stop_ids.data() + stop_ids.size()),
                token_ids.data(), static_cast<int64_t>(token_ids.size()), prompt_length);
}

using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

TokenMasks view(const Sampler& sampler, const Rows& logits, const Ints& rows, const Masks& bits) {
  const int64_t words = (sampler.vocab() + 31) / 32;
  require(bits.shape(0) == rows.size() && static_cast<int64_t>(bits.shape(1)) == words,
          "mask_bits must be uint32 [masked rows, ceil(vocab / 32)]");
  for (size_t i = 0; i < rows.size(); ++i)
    require(rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(logits.shape(0)), "mask_rows names no row");
  return {rows.data(), bits.data(), static_cast<int64_t>(rows.size()), words};
}

nb::tuple sample(Sampler& sampler, Pool& pool, Rows logits, Ints slots, Ints positions, Ints mask_rows, Masks mask_bits) {
  const Logits rows = view(sampler, logits);
  const TokenMasks masks = view(sampler, logits, mask_rows, mask_bits);
  const size_t count = logits.shape(0);
  require(slots.size() == count && positions.size() == count, "slots and output_positions must have one entry per row");
  int32_t wanted = -1;
  for (size_t i = 0; i < count; ++i) {
    check_slot(sampler, slots.data()[i]);
    require(sampler.admitted(slots.data()[i]), "a slot was not admitted to the sampler");
    wanted = std::max(wanted, sampler.params(slots.data()[i]).logprobs);
  }
  auto tokens = new_array<int32_t>({count});
  if (wanted < 0) {
    {
      nb::gil_scoped_release release;
      sampler.sample(pool, rows, slots.data(), positions.data(), masks, tokens.data(), nullptr);
    }
    return nb::make_tuple(tokens, nb::none());
  }
  LogProbArrays out(count, static_cast<size_t>(wanted));
  {
    const LogProbColumns columns = out.columns();
    nb::gil_scoped_release release;
    sampler.sample(pool, rows, slots.data(), positions.data(), masks, tokens.data(), &columns);
  }
  return nb::make_tuple(tokens, out.tuple());
}

nb::tuple score(Sampler& sampler, Pool& pool, Rows logits, Ints targets, int32_t k) {
  const Logits rows = view(sampler, logits);
  require(targets.size() == logits.shape(0), "targets must have one entry per row");
  require(k >= 0, "k must be at least 0");
  check_tokens(sampler, targets);
  LogProbArrays out(logits.shape(0), static_cast<size_t>(k));
  {
    const LogProbColumns columns = out.columns();
    nb::gil_scoped_release release;
    sampler.score(pool, rows, targets.data(), columns);
  }
  return out.tuple();
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler", "Turns logits into tokens; the contract is noria.backends.base.Sampler.")
      .def(
          "__init__",
          [](Sampler* self, int64_t slots, int64_t vocab) {
            require(slots >= 1 && vocab >= 1 && vocab < (int64_t{1} << 31), "slots and vocab must be at least 1");
            new (self) Sampler(slots, vocab);
          },
          nb::arg("slots"), nb::arg("vocab"))
      .def("admit", &admit, nb::arg("slot"), nb::arg("seed"), nb::arg("choice"), nb::arg("temperature"), nb::arg("top_k"),
           nb::arg("top_p"), nb::arg("min_p"), nb::arg("repetition_penalty"), nb::arg("frequency_penalty"),
           nb::arg("presence_penalty"), nb::arg("min_tokens"), nb::arg("logprobs"), nb::arg("bias_ids"), nb::arg("bias"),
           nb::arg("stop_ids"), nb::arg("token_ids"), nb::arg("prompt_length"),
           "Sets a slot. logprobs: -1 for none; top_k: 0 or less for all; bias_ids, stop_ids, token_ids: int32; bias: "
           "float32. token_ids: prompt, then output so far.")
      .def(
          "release",
          [](Sampler& sampler, int64_t slot) {
            check_slot(sampler, slot);
            sampler.release(slot);
          },
          nb::arg("slot"))
      .def("sample", &sample, nb::arg("pool"), nb::arg("logits"), nb::arg("slots"), nb::arg("output_positions"),
           nb::arg("mask_rows"), nb::arg("mask_bits"),
           "(tokens int32 [rows], None or (chosen float32 [rows], ranks int32 [rows], top_ids int32 [rows, k], top float32 "
           "[rows, k])). Overwrites logits. mask_rows int32 [masked]: rows that yield only tokens whose bit is set in mask_bits "
           "uint32 [masked, ceil(vocab / 32)], at least one each. Rows that asked for no log-probabilities hold rank 0; ids are -1 beyond what a "
           "row asked for.")
      .def("score", &score, nb::arg("pool"), nb::arg("logits"), nb::arg("targets"), nb::arg("k"),
           "(chosen, ranks, top_ids, top) of given targets, as in sample.");
}

}  // namespace noria
