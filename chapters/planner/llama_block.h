#pragma once

// Llama's block on shapes: rotary positions, grouped queries, no biases, and a
// gated MLP, or experts in its place. Its weights are cut over tp as the
// chapter on tensor parallelism cuts them.

#include <cstdint>
#include <optional>
#include <vector>

#include "chapters/13_moe/gate.h"
#include "chapters/planner/stage.h"
#include "comm/process_group.h"
#include "core/layers.h"

namespace shardbook::planner {

/// The groups of one rank, and what it needs to make a stage.
struct Place {
  ProcessGroup& tp;
  ProcessGroup& cp;
  ProcessGroup& ep;
  const DecoderSizes& sizes;
  const StageLayout& layout;
  /// Tokens of a sequence on this rank of cp.
  std::int64_t tokens() const { return sizes.seq / cp.size(); }
};

/// Attention of this rank's heads, over the tokens of all ranks of cp.
Tensor attend(const Place& at, const Tensor& q, const Tensor& k,
              const Tensor& v, const AttentionOptions& options);

/// Gated experts of the chapter on experts. The router spreads tokens evenly:
/// every expert has the same number of slots.
class ExpertMlp {
 public:
  ExpertMlp(const Place& at, const InitOptions& init);
  /// [n, s, h] -> [n, s, h]; of this rank's own tokens where tp cuts them.
  Tensor operator()(const Tensor& x) const;
  Tensors shared_parameters() const { return {gate_.weight}; }
  Tensors own_parameters() const { return {up_, down_}; }

 private:
  Place at_;
  moe::TopKGate gate_;
  Tensor up_, down_;  ///< [E / ep, h, 2 f], [E / ep, f, h]
};

class LlamaBlock {
 public:
  /// `index` counts the blocks of a stage.
  LlamaBlock(const Place& at, std::int64_t index, const InitOptions& init);
  Tensor operator()(const Tensor& x) const;
  const Tensors& parameters() const { return parameters_; }
  /// The experts' parameters, shared only by ranks with the same experts.
  Tensors expert_parameters() const {
    return experts_ ? experts_->own_parameters() : Tensors();
  }

 private:
  Tensor compute(const Tensor& x) const;
  /// Runs the recomputation of Recompute::kEverySecondProduct.
  void replay(const Tensor& x) const;
  Tensor mlp(const Tensor& x) const;

  Place at_;
  bool has_window_ = false, recomputes_ = false;
  Tensors parameters_;
  Tensor qkv_, out_, up_, down_, gamma_1_, gamma_2_, table_;
  std::optional<ExpertMlp> experts_;
};

}  // namespace shardbook::planner
