#pragma once

// Options of ZeRO: stages, and sizes of messages. The names are DeepSpeed's.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace shardbook::zero {

struct ZeroOptions {
  int stage = 2;  ///< 1, 2 or 3
  /// Elements of gradients that travel together, stages 1 and 2.
  std::int64_t reduce_bucket_size = 500'000'000;
  /// Elements that are gathered together after a step, stages 1 and 2.
  std::int64_t allgather_bucket_size = 500'000'000;
  /// Each rank receives all new parameters in one all-gather; false: each owner
  /// broadcasts its own. Stages 1 and 2.
  bool allgather_partitions = true;
  /// Backward goes on while gradients travel. Stages 1 and 2; needs a second
  /// bucket.
  bool overlap_comm = true;
  /// Each rank receives its own shard; false: all of the bucket is all-reduced
  /// and each rank keeps its part, at twice the bytes (DeepSpeed's way).
  bool reduce_scatter = true;
  /// Divide gradients by this before the sum and by ranks / this after it; 0:
  /// by ranks before. Needs reduce_scatter false.
  double divide_before = 0;
  /// Dtype of gradients on the wire; none: their own.
  std::optional<DType> wire = {};
  /// Shards of 16-bit gradients are f32, and so are their sums over
  /// micro-steps; what travels is not. Stages 2 and 3.
  bool accumulate_f32 = false;
  /// Neighbouring gradients go to different owners, stages 1 and 2.
  bool round_robin_gradients = false;
  std::int64_t alignment = 2;  ///< elements, stages 1 and 2
  double clip = 0;             ///< largest norm of the gradient; 0: any
  /// The factor by which the loss was multiplied before backward. With f16
  /// parameters, all ranks skip a step whose gradient overflows on any.
  double loss_scale = 1;
  /// Skip such steps in every dtype, not only in f16.
  bool check_grad_overflow = false;
  /// Optimizer state, master copies and gradient shards stay on the host, and
  /// so does the update. Stages 2 and 3.
  bool offload_optimizer = false;
  /// The update works on f32 copies of 16-bit parameters.
  bool master_copies = true;
  /// Elements of a shard that are updated together. From the host they return
  /// to the device while the next ones are updated.
  std::int64_t sub_group_size = 1'000'000'000;

  // Stage 3 only.
  /// Parameters of at most this many elements stay gathered.
  std::int64_t persistence_threshold = 100'000;
  /// Units are gathered ahead of their use while fewer elements than this are in
  /// flight; 0: none. The last unit may exceed it, as in DeepSpeed.
  std::int64_t prefetch_bucket_size = 50'000'000;
  /// While this many elements are whole, besides those that stay gathered, no
  /// further unit is gathered ahead, and units that were kept are released. A
  /// unit that computes is whole in any case.
  std::int64_t max_live_parameters = 1'000'000'000;
  /// A unit stays whole after its use when fewer elements are fetched before
  /// its next use in the same micro-step; 0: never. DeepSpeed's default is 10^9.
  std::int64_t max_reuse_distance = 0;
  /// Modules of these types are fetched as a whole; see zero3.h.
  std::vector<std::string> unit_types = {"GptBlock"};
  /// Shards of the parameters lie on the host as well; needs
  /// offload_optimizer.
  bool offload_parameters = false;
};

}  // namespace shardbook::zero
