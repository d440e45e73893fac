#pragma once

// The gate: weights for the experts of each token, and losses that keep the load
// even.
//
//   x [S, M] -> logits [S, E] -> softmax -> choose, take slots -> weights [S, k]
//
// It computes in f32 (f64 for f64), whatever the dtype of x. A token's weight is
// its clean gate probability (k = 1), or its share among the choices that found
// room (k >= 2).

#include <functional>
#include <string>
#include <vector>

#include "chapters/13_moe/routing.h"
#include "core/layers.h"

namespace shardbook::moe {

struct GateResult {
  Routing routing;
  /// [S, k], in the gate's dtype; 0 for dropped choices. With gradient.
  Tensor weights;
  /// []: E sum_e me_e ce_e, with me the mean probability of an expert and ce the
  /// fraction of tokens whose first choice it is (k >= 3: of all choices); 1
  /// where the load is even. Its gradient goes through me alone.
  Tensor l_aux;
  /// []: mean(logsumexp(logits)^2). Undefined unless `wants_z_loss`.
  Tensor z_loss;
};

/// Arguments that depend on the step and on the other ranks.
struct GateCall {
  std::string name;          ///< names the random streams
  std::int64_t per_row = 1;  ///< tokens of a sample that this rank has
  SamplePart part;           ///< which ones; by default all
  bool is_training = true;
  bool wants_z_loss = false;
  std::vector<bool> used_token;  ///< or empty: all
  /// Without dropping: the largest of the ranks' counts, which all need for
  /// equal shapes. Empty: this rank's own.
  std::function<std::int64_t(std::int64_t count)> max_over_ranks;
  /// Slots of an expert are a multiple of this where nothing is dropped.
  std::int64_t capacity_multiple = 1;
  /// No capacity at all: choices stay without slots, all of them count.
  bool is_dropless = false;
};

/// Wg [M, E]; with noisy top-k also Wnoise [M, E], zeros at first.
class TopKGate : public ModuleOf<TopKGate> {
 public:
  TopKGate(const std::string& name, std::int64_t width,
           const GateOptions& options, const InitOptions& init);
  /// x [S, M], the tokens of one group.
  GateResult route(const Tensor& x, const GateCall& call) const;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "TopKGate"; }

  Tensor weight, noise_weight;
  GateOptions options;

 private:
  Tensor logits_of(const Tensor& x, const TokenDraws& draws,
                   const GateCall& call) const;
};

/// i64 tensor on x's device; on meta, `numel` elements without values.
Tensor index_tensor(const std::vector<std::int64_t>& values, const Shape& shape,
                    const Tensor& like);

// --- The dense form: for reading, and the oracle of the tests -----------------

/// combine[s, e, c] = the weight if token s sits in slot c of expert e, else 0:
/// [S, E, C], with gradient.
Tensor combine_mask(const Routing& routing, const Tensor& weights);
/// 1 where it sits there, whatever the weight: a weight that is rounded to 0
/// must not drop the token. [S, E, C].
Tensor dispatch_mask(const Routing& routing, const TensorOptions& options);

}  // namespace shardbook::moe
