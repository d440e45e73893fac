#pragma once

// sum_to_shape in passes, the same on every type of device. Read by
// core/kernels/*/reduce.* only.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/kernels/elementwise.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels {

/// Sums x to `out_shape`, one group of dims after the other, innermost first.
/// pass(outer, n, inner, from, to) sums the middle dim of [outer, n, inner].
/// Sums between two passes are of type S, in which T is computed, and wait in
/// scratch.
template <typename S, typename T, typename Pass>
void sum_in_passes(KernelContext& context, DType dtype, const Dims& x_shape,
                   const T* x, const Dims& out_shape, T* out,
                   const Pass& pass) {
  SumGroups groups = plan_sum(x_shape, out_shape);
  std::int64_t out_size = 1, size = 1;
  for (const std::int64_t s : out_shape) out_size *= s;
  for (const std::int64_t s : x_shape) size *= s;
  if (out_size == 0) return;
  if (size == 0) return fill(context, dtype, out_size, out, 0.0);
  auto summed_left =
      std::count(groups.summed.begin(), groups.summed.end(), true);
  if (summed_left == 0) return cast(context, dtype, x, dtype, out, out_size);
  const bool direct = summed_left == 1;
  Scratch first(context, direct ? 0 : (size / 2 + 1) * sizeof(S));
  Scratch second(context, direct ? 0 : (size / 4 + 1) * sizeof(S));
  S* to = first.as<S>();
  S* next = second.as<S>();
  const S* from = nullptr;  // Null before the first pass
  for (std::size_t g = groups.sizes.size(); g-- > 0;) {
    if (!groups.summed[g]) continue;
    std::int64_t outer = 1, inner = 1;
    for (std::size_t d = 0; d < g; ++d) outer *= groups.sizes[d];
    for (std::size_t d = g + 1; d < groups.sizes.size(); ++d) {
      inner *= groups.sizes[d];
    }
    const std::int64_t n = groups.sizes[g];
    const auto run = [&](const auto* in) {
      if (summed_left == 1) {
        pass(outer, n, inner, in, out);
      } else {
        pass(outer, n, inner, in, to);
      }
    };
    from == nullptr ? run(x) : run(from);
    from = to;
    std::swap(to, next);
    groups.sizes[g] = 1;
    --summed_left;
  }
}

}  // namespace shardbook::kernels
