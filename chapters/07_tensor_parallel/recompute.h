#pragma once

// Recomputation for tensor parallelism: it replays all random streams, and may
// keep only 1/t of a block's input.
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
  /// Must outlive the model.
  RngTracker* rng = nullptr;
  /// Ranks that have the same input and keep one part each; null: each keeps
  /// all of it. Megatron-LM's distribute_saved_activations.
  ProcessGroup* distribute_over = nullptr;
};

/// A forward whose activations are dropped. Between construction and `finish`
/// nothing is recorded.
class DroppedForward {
 public:
  /// x: the input of the next forward.
  DroppedForward(const Tensor& x, const RecomputeOptions& options);
  /// y: the result of the forward. Returns y linked to x by one node, whose
  /// backward calls `again(x)`. With distribute_over, x's array is freed until
  /// then: nothing else may need it, and its size must divide by the ranks.
  /// Backward then all-gathers x.
  Tensor finish(const Tensor& y, std::function<Tensor(const Tensor& x)> again);

 private:
  const Tensor x_;
  const RecomputeOptions setup_;
  const RngTracker::States streams_;
  std::optional<NoGrad> unrecorded_;
};

/// Makes every GptBlock of the model recompute this way, by hooks.
void recompute_blocks(Module& model, const RecomputeOptions& options);

}  // namespace shardbook::tensor_parallel
