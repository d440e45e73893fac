#pragma once

// Recomputation that knows of other ranks: it replays all random streams, and
// may keep 1/t of a block's input in place of the whole.
//
//   forward    x -> block -> y; keep x's part, and the streams' positions
//   backward   all-gather the parts -> x -> block, with the same masks
//
// autograd::recompute alone keeps the whole input, and replays the default
// stream alone.

#include <functional>
#include <optional>

#include "chapters/07_tensor_parallel/rng.h"
#include "comm/process_group.h"
#include "core/context.h"
#include "core/module.h"

namespace shardbook::tensor_parallel {

struct RecomputeOptions {
  /// Outlives the model.
  RngTracker* rng = nullptr;
  /// Ranks that have the same input, of which each keeps one part; null: each
  /// keeps all of it. Megatron-LM's distribute_saved_activations.
  ProcessGroup* distribute_over = nullptr;
};

/// A forward whose activations are dropped. Between construction and `finish`
/// nothing is recorded.
class DroppedForward {
 public:
  /// x: the input of the forward that comes next.
  DroppedForward(const Tensor& x, const RecomputeOptions& options);
  /// y: what the forward made of x. Returns y linked to x by one node, whose
  /// backward calls `again(x)`. With distribute_over, x's array is freed until
  /// then: nothing else may need it, and its elements divide by the ranks.
  /// Communication there: one all-gather of x, in backward.
  Tensor finish(const Tensor& y, std::function<Tensor(const Tensor& x)> again);

 private:
  const Tensor x_;
  const RecomputeOptions setup_;
  const RngTracker::States streams_;
  std::optional<NoGrad> unrecorded_;
};

/// Every GptBlock of the model does so from now on, by hooks.
void recompute_blocks(Module& model, const RecomputeOptions& options);

}  // namespace shardbook::tensor_parallel
