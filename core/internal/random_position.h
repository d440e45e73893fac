#pragma once

// Where the elements of a random operation lie in the global tensor, and which
// stream they draw from. Read by core/*.cpp only.

#include <cstdint>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/cuda_device.h"
#include "core/kernels/random.h"
#include "core/ops.h"

namespace shardbook::internal {

/// The stream of the next random operation of this step.
inline kernels::RandomKey next_random_key(const char* op) {
  RankContext& context = RankContext::current();
  refuse_recording(context.device, op,
                   "its random numbers would be the same at each launch");
  RandomState& random = context.random;
  // The top bit keeps operations apart from the streams of names.
  const std::uint64_t stream =
      (std::uint64_t{1} << 63) | (random.step << 16) | random.next_op++;
  return {random.seed, stream};
}

/// Where `shape` lies in one device's tensor: `shard` places it in this batch's
/// rows, and the context places those (dim 0) in the global batch.
inline kernels::GlobalView global_view(const Shape& shape,
                                       const ShardView& shard) {
  kernels::GlobalView view = kernels::whole_view(shape);
  if (!shard.global_shape.empty()) {
    view = {shape, shard.global_shape, shard.offset, shard.step};
  }
  if (view.offset.empty()) view.offset.assign(shape.size(), 0);
  if (view.step.empty()) view.step.assign(shape.size(), 1);
  SB_CHECK(view.global_shape.size() == shape.size() &&
               view.offset.size() == shape.size() &&
               view.step.size() == shape.size(),
           "dropout: a shard of ", shape_text(shape), " in ",
           shape_text(view.global_shape), " with ", view.offset.size(),
           " offsets and ", view.step.size(), " steps; give one per dim");
  if (shape.empty() || shape[0] == 0) return view;
  const BatchSlice& batch = RankContext::current().random.batch;
  const auto global_row = [&](std::int64_t row) {
    return batch.first + batch.stride * row;
  };
  view.offset[0] = global_row(view.offset[0]);
  view.step[0] *= batch.stride;
  view.global_shape[0] = global_row(view.global_shape[0] - 1) + 1;
  return view;
}

}  // namespace shardbook::internal
