#pragma once

// Loops over two arrays on the device: a thread that owns the i-th element, in
// the order of the loops, finds its places in both arrays by dividing.

#include <cstdint>

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cuda {

/// Loops by value, innermost first.
template <typename Index>
struct Walk {
  int count = 0;
  Index sizes[kMaxDims] = {}, a[kMaxDims] = {}, b[kMaxDims] = {};

  Walk() = default;
  /// The innermost loop counts vectors of `width` elements.
  explicit Walk(const Loops& loops, std::int64_t width = 1)
      : count(static_cast<int>(loops.sizes.size())) {
    for (int d = 0; d < count; ++d) {
      const std::size_t from = loops.sizes.size() - 1 - d;
      const std::int64_t step = d == 0 ? width : 1;
      sizes[d] = static_cast<Index>(loops.sizes[from] / step);
      a[d] = static_cast<Index>(loops.a[from] * step);
      b[d] = static_cast<Index>(loops.b[from] * step);
    }
  }

  __device__ void find(Index i, Index* a_at, Index* b_at) const {
    Index rest = i;
    *a_at = *b_at = 0;
#pragma unroll
    for (int d = 0; d < static_cast<int>(kMaxDims); ++d) {
      if (d == count) break;
      const Index next = d + 1 == count ? 0 : rest / sizes[d];
      const Index at = rest - next * sizes[d];
      *a_at += at * a[d];
      *b_at += at * b[d];
      rest = next;
    }
  }
};

}  // namespace shardbook::kernels::cuda
