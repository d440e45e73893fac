#pragma once

// The check of attention's dropout on every type of device.

#include <cstddef>
#include <cstdint>

#include "core/check.h"
#include "core/kernels/attention.h"

namespace shardbook::kernels {

/// Where the elements of the dropout mask lie in the global tensor:
/// element (b, h, i, j) at index
/// ((g_0 * global[1] + g_1) * global[2] + g_2) * global[3] + g_3
/// with g_d = offset[d] + step[d] * local_d.
struct DropoutPlace {
  std::uint64_t global[4] = {}, offset[4] = {}, step[4] = {};
};

/// Throws Error unless 0 <= dropout < 1 and the view is [batch, heads, q_rows,
/// k_rows] within its global shape. Zeros without dropout.
inline DropoutPlace checked_dropout(const AttentionArgs& args) {
  DropoutPlace place;
  if (args.dropout == 0.0) return place;
  const GlobalView& view = args.dropout_view;
  SB_CHECK(args.dropout > 0.0 && args.dropout < 1.0, "attention: dropout ",
           args.dropout, "; it lies in [0, 1)");
  const Dims shape = {args.batch, args.heads, args.q_rows, args.k_rows};
  SB_CHECK(view.shape == shape && view.global_shape.size() == 4,
           "attention: the view of dropout must be [batch, heads, q_rows, "
           "k_rows], here ",
           args.batch, ", ", args.heads, ", ", args.q_rows, ", ", args.k_rows);
  for (std::size_t d = 0; d < 4; ++d) {
    const std::int64_t offset = view.offset.empty() ? 0 : view.offset[d];
    const std::int64_t step = view.step.empty() ? 1 : view.step[d];
    SB_CHECK(offset >= 0 && step >= 1 &&
                 (shape[d] == 0 ||
                  offset + (shape[d] - 1) * step < view.global_shape[d]),
             "attention: dim ", d,
             " of the view of dropout leaves the global size ",
             view.global_shape[d]);
    place.global[d] = static_cast<std::uint64_t>(view.global_shape[d]);
    place.offset[d] = static_cast<std::uint64_t>(offset);
    place.step[d] = static_cast<std::uint64_t>(step);
  }
  return place;
}

}  // namespace shardbook::kernels
