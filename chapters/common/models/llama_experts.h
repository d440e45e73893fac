#pragma once

// The experts of Mixtral and Qwen3-MoE, whole on one device: the MLP of a block
// is E MLPs, and a token passes through k of them.
//
//   x [S, h] --gate--> logits [S, E] -> softmax -> the k largest -> weights [S, k]
//                      token     t0      t1      t2        k = 2, E = 3
//                      experts   0 2     2 1     0 2
//   rows by expert     e0: t0 t2 -     e1: t1 - -     e2: t0 t1 t2   [E, 3, h]
//   expert e           (silu(r gate_e) * (r up_e)) down_e
//   y [S, h]           y[s] = sum_j weights[s, j] row of choice j
//
// Nothing is dropped: every expert has as many rows as the busiest one needs, and
// zeros are in the rows that are left (-). The host chooses from the values of the
// softmax; gradients flow through the weights. On shapes, which have no values,
// all experts are chosen equally often.
//
// Jiang et al. 2024, "Mixtral of Experts", section 2.1; Qwen Team 2025, "Qwen3
// Technical Report", section 2. Chapter 13 spreads experts over ranks.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "core/shards.h"

namespace shardbook {

/// Why a batch in several parts has no balancing loss.
extern const char* const kBalancingLossInParts;

/// What the balancing loss needs of a forward: sums over its tokens, [E] each;
/// zeros on shapes.
struct RouterShares {
  double tokens = 0;
  std::vector<double> chosen;       ///< tokens that chose the expert
  std::vector<double> probability;  ///< its softmax
};

/// The MLP of a block with experts. Names are those of transformers 5 in memory:
/// gate.weight [h, E], experts.gate_up_proj [E, h, 2f], experts.down_proj
/// [E, f, h].
class LlamaExperts : public ModuleOf<LlamaExperts> {
 public:
  /// `part`: the experts that this module holds; empty: all.
  LlamaExperts(const std::string& name, const ModelConfig& config,
               const InitOptions& init, const Shards& part = {});
  /// [n, S, h] -> the same. The gate's product has x's dtype; the softmax and the
  /// weights are computed in f32 (f64 for f64), and rounded to x's dtype before
  /// they multiply. Equal probabilities: the expert of the lower index is chosen.
  /// A token's terms are summed from its most probable expert on.
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "LlamaExperts"; }

  /// The balancing loss is a part of the model's loss.
  bool is_balanced() const { return coefficient_ > 0; }
  /// Weight of the balancing loss.
  double coefficient() const { return coefficient_; }
  /// Of the last forward, where is_balanced.
  const RouterShares& shares() const { return shares_; }
  /// [E]: the gradient that every token's softmax gets from the balancing loss of
  /// the last forward. Set while backward runs, before it reaches this layer.
  void set_softmax_gradient(const Tensor& gradient) {
    softmax_gradient_ = gradient;
  }

  Tensor gate_weight, gate_up_proj, down_proj;

 protected:
  /// Where the tokens of a forward go.
  struct Choices {
    /// [S k]: experts, each token's most probable one first; empty on shapes.
    std::vector<std::int64_t> chosen;
    Tensor weights;  ///< [S, k]
    std::int64_t experts = 0;
  };
  /// Rows [S, h] through their experts: the weighed sums [S, h].
  virtual Tensor through_experts(const Tensor& rows, const Choices& choices);
  /// Rows by expert, [experts held, R, h] -> the same.
  Tensor apply_experts(const Tensor& grouped) const {
    return matmul(swiglu(matmul(grouped, gate_up_proj)), down_proj);
  }

 private:
  void remember(const Tensor& probabilities,
                const std::vector<std::int64_t>& chosen);
  Tensor balanced(const Tensor& y, const Tensor& probabilities);

  std::int64_t num_experts_, experts_per_token_;
  bool divides_by_sum_;  ///< the weights of a token add up to 1
  double coefficient_;   ///< 0: no balancing loss
  RouterShares shares_;
  Tensor softmax_gradient_;
};

/// The loss and `router_aux_loss_coef` times the balancing loss of the model's last
/// forward, where the config has output_router_logits; else the loss itself. The
/// balancing loss is
///
///   E sum_e f_e P_e    f_e  share of tokens that chose e among their k
///                      P_e  mean softmax of e
///
/// both over the tokens of all layers together; it is k where the load is even.
/// Its gradient goes through P alone. `parts` is the number of losses, one after
/// another, whose mean is the batch's: throws Error for more than one, since a mean
/// over all tokens is not the mean over parts. Ranks that share a batch sum their
/// shares by `sum`, which adds numbers over them; their gradients are averaged. A
/// model whose loss did not pass through here throws Error in backward. Fedus et
/// al. 2021, "Switch Transformers", section 2.2, with k choices.
using SumOfShares =
    std::function<std::vector<double>(const std::vector<double>& numbers)>;
Tensor with_balancing_loss(Module& model, const Tensor& loss,
                           std::int64_t parts = 1, const SumOfShares& sum = {});
/// How many numbers `sum` adds for each loss; 0 without a balancing loss.
std::int64_t num_balancing_shares(const ModelConfig& config);

/// The balancing loss of the last forward of this rank's tokens, without its
/// weight; empty where the model adds none, and on shapes.
std::optional<double> balancing_loss(Module& model);

}  // namespace shardbook
