// The native form of noria.backends.base.Graph: ops over numbered values, in execution order. Plain data; weights,
// tables and vectors belong to whoever built it.
#pragma once
#include <variant>
#include <vector>

#include "ops/elementwise.h"
#include "ops/linear.h"

namespace noria {

struct GraphValue {
  int64_t width = 0;
  bool outputs = false;  // a row per output row of the batch instead of one per token
};

constexpr int kNone = -1;  // no such value

struct EmbedOp {
  const EmbeddingTable* table = nullptr;
  float scale = 1;
  int out = kNone;
};
struct NormOp {
  int x = kNone;
  const float* weight = nullptr;  // [width]
  float eps = 0;
  int residual = kNone;
  int out = kNone;
};
struct LinearOp {
  int x = kNone;
  std::vector<const PackedWeight*> parts;
  const float* bias = nullptr;  // [sum of n] or null
  int residual = kNone;
  int out = kNone;
};
struct GatedLinearOp {
  int x = kNone;
  const PackedWeight* gate = nullptr;
  const PackedWeight* up = nullptr;
  const float* gate_bias = nullptr;  // [n] or null
  const float* up_bias = nullptr;
  Activation activation = Activation::silu;
  int out = kNone;
};
struct RopeCacheOp {
  int qkv = kNone;
  int layer = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int rotary_dim = 0;              // 0: no rotation
  int64_t positions = 0;           // rows of cos and sin
  const float* cos = nullptr;      // [positions][rotary_dim / 2]
  const float* sin = nullptr;
  const float* q_norm = nullptr;   // [head_dim] or null
  const float* k_norm = nullptr;
  float eps = 0;
  int out = kNone;
};
struct AttentionOp {
  int q = kNone;
  int layer = 0, heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1;
  int window = 0;
  float softcap = 0;
  int out = kNone;
};
struct SelectOp {
  int x = kNone;
  int out = kNone;
};

using GraphOp = std::variant<EmbedOp, NormOp, LinearOp, GatedLinearOp, RopeCacheOp, AttentionOp, SelectOp>;

struct Graph {
  std::vector<GraphValue> values;
  std::vector<GraphOp> ops;
  int hidden = kNone;
  const PackedWeight* head = nullptr;
  float logit_scale = 1;
  float logit_softcap = 0;
};

}  // namespace noria
