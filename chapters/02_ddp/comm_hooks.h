#pragma once

// Communication hooks: they handle full buckets.
//
// The reducer hands a full bucket to a communication hook and goes on with
// backward; at the end it calls the functions that hooks returned, in launch
// order. A hook takes over the division by the number of ranks as well:
//
//   ddp.register_comm_hook(ddp::bf16_compress_hook());
//
// Hooks run at the same places on all ranks, and issue the same calls.

#include <functional>
#include <optional>

#include "comm/process_group.h"

namespace shardbook::ddp {

/// A bucket whose gradients are all there.
struct GradBucket {
  int index = 0;  ///< in launch order
  /// [n]: this rank's gradients end to end, not divided. The hook's result
  /// goes here.
  Tensor gradients;
  /// The divisor of the sum.
  double divisor = 1;
};

/// Waits for the communication and leaves the mean in `bucket.gradients`.
using FinishBucket = std::function<void()>;
using CommHook =
    std::function<FinishBucket(const GradBucket& bucket, ProcessGroup& group)>;

/// Divides, rounds to bf16, all-reduces (half the bytes of f32, a quarter of
/// f64), and converts back. Memory: one bf16 copy of each bucket in flight.
CommHook bf16_compress_hook();

/// Divides by `before`, sums, and divides by divisor / before. before = 1 keeps
/// small gradients; before = the number of ranks keeps large sums finite
/// (DeepSpeed's gradient_predivide_factor). With `wire`, gradients travel in
/// that dtype. Memory: then one copy of each bucket in flight.
CommHook predivide_hook(double before, std::optional<DType> wire = {});

}  // namespace shardbook::ddp
