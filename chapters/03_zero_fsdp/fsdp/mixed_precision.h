#pragma once

// Mixed precision: 16 bits for messages and computation, f32 for shards.

#include <optional>

#include "core/dtype.h"

namespace shardbook::fsdp {

/// Absent: the dtype of the parameters. The shard, its gradient and the
/// optimizer's state always keep that dtype.
struct MixedPrecision {
  /// Forward and backward. Shards are cast BEFORE the gather, so that few
  /// bytes travel.
  std::optional<DType> param_dtype;
  /// The reduce-scatter; absent: param_dtype.
  std::optional<DType> reduce_dtype;
  /// Buffers, such as running statistics. BatchNorm keeps its own.
  std::optional<DType> buffer_dtype;
};

}  // namespace shardbook::fsdp
