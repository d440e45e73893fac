#pragma once

// The order in which kernels walk arrays that are broadcast, strided, summed or
// part of a larger one. A plan is made on the host and is the same for every
// type of device. Read by core/kernels/*/ only.

#include <cstdint>
#include <vector>

#include "core/kernels/layout.h"
#include "core/kernels/random.h"

namespace shardbook::kernels {

/// Nested loops over two arrays, outermost first, with the strides of each.
struct Loops {
  Dims sizes, a, b;
};
/// The loops of a broadcast over its operands, with adjacent dims that move
/// alike joined into one. A stride of 0 repeats. At least one loop. `out` is
/// broadcast_shape(a, b), without zeros.
Loops plan_broadcast(const Dims& out, const Dims& a, const Dims& b);
/// The loops of a copy from array a to array b. Drops dims of one element,
/// orders loops by the strides of `dst`, and joins loops that continue in both
/// arrays. Throws Error for what copy_strided refuses.
Loops plan_copy(const Dims& shape, const Dims& src_strides,
                const Dims& dst_strides);

/// A contiguous array whose dims are put in another order.
struct PermutedView {
  Dims shape, strides;
};
/// Throws Error unless `order` names each dim once.
PermutedView plan_permute(const Dims& shape, const Dims& order);

/// A reduction to a broadcast shape as alternating kept and summed dims.
struct SumGroups {
  Dims sizes;
  std::vector<bool> summed;
};
/// Throws Error for what sum_to_shape refuses.
SumGroups plan_sum(const Dims& x_shape, const Dims& out_shape);

/// A view whose inner dims are joined into runs of evenly spaced elements.
struct ViewRuns {
  std::int64_t count = 1;
  std::int64_t length = 1;
  std::uint64_t step = 1;
  Dims sizes;  ///< of the outer dims
  std::vector<std::uint64_t> strides;
  std::uint64_t first = 0;

  /// The global index where run `i` starts.
  std::uint64_t start(std::int64_t i) const {
    std::uint64_t at = first;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      at += static_cast<std::uint64_t>(i % sizes[d]) * strides[d];
      i /= sizes[d];
    }
    return at;
  }
};
/// Throws Error when the view leaves its global shape.
ViewRuns plan_runs(const GlobalView& view);

/// An element is kept when its bits reach this: P(keep) = 1 - p.
std::uint32_t keep_threshold(double p);
/// The same; throws Error unless 0 <= p < 1.
std::uint32_t dropout_threshold(double p);

}  // namespace shardbook::kernels
