#pragma once

// Dispatch and combine: tokens to their experts' slots, and back.
//
//              this rank's tokens                    this rank's experts
//   x [S, M] --dispatch--> [E, C, M] --all_to_all--> [El, ep C, M] --> experts
//   y [S, M] <--combine--- [E, C, M] <-all_to_all--- [El, ep C, M] <-- experts
//
// Empty slots hold zeros. An expert with a bias turns them into something else,
// which no token reads: it reaches neither outputs nor gradients.
//
// Lepikhin et al. 2020, "GShard", section 3.2.

#include "chapters/13_moe/gate.h"
#include "comm/process_group.h"

namespace shardbook::moe {

// --- One rank ------------------------------------------------------------------

/// The naive form, a product with a mask of zeros and ones: S E C M
/// multiplications where S k M copies would do. [S, M] -> [E, C, M].
Tensor naive_dispatch(const Tensor& x, const Routing& routing);
/// y[s] = sum combine[s, e, c] outputs[e, c]. [E, C, M] -> [S, M].
Tensor naive_combine(const Tensor& outputs, const Routing& routing,
                     const Tensor& weights);

/// The same by index: rows are gathered, and gradients added where they came
/// from.
Tensor dispatch(const Tensor& x, const Routing& routing);
Tensor combine(const Tensor& outputs, const Routing& routing,
               const Tensor& weights);
/// sum_j weights[s, j] rows[index[s k + j]]: [n, M] -> [S, M]; an index of n reads
/// zeros.
Tensor weigh_rows(const Tensor& rows, const Tensor& index,
                  const Tensor& weights);

// --- Over the ranks of an EP group (null or of one rank: nothing moves) --------

/// [E, C, M] -> [El, ep C, M]: each rank's rows for this rank's experts, by
/// source. Rank r has experts r El .. (r+1) El - 1. One all_to_all of E C M
/// elements, in backward another one.
Tensor to_experts(const Tensor& rows, ProcessGroup* ep);
/// The inverse.
Tensor from_experts(const Tensor& rows, ProcessGroup* ep, std::int64_t experts);

/// Different numbers of rows per rank: [n, M] by destination -> [m, M] by
/// source. Backward sends gradients back the same way.
Tensor exchange_rows(const Tensor& rows, ProcessGroup* ep,
                     const std::vector<std::int64_t>& send_rows,
                     const std::vector<std::int64_t>& recv_rows,
                     const char* label);

/// The number of choices that each rank has for each of this rank's experts:
/// [ep, El], row by row. One all_to_all of E i64. On shapes, which have no
/// values, `drawn(source)` gives the counts [E] of every source.
std::vector<std::int64_t> exchange_counts(
    const std::vector<std::int64_t>& counts, ProcessGroup* ep,
    const Tensor& like,
    const std::function<std::vector<std::int64_t>(int source)>& drawn);

// --- Without capacity ------------------------------------------------------------

/// Where a layer's choices go, and what its experts do.
struct DroplessCall {
  const Routing& routing;  ///< its slots are not read
  const Tensor& weights;   ///< [S, k]
  ProcessGroup* ep = nullptr;
  /// On shapes: the choices [E] of an EP rank; of this one, where `routing` has
  /// none.
  std::function<std::vector<std::int64_t>(int source)> drawn;
  /// [El, R, M] -> the same: R rows for each expert, zeros behind its own.
  std::function<Tensor(const Tensor& rows)> experts;
};
/// Rows [S, M] to their experts and back, weighed: [S, M]. Sorted by expert, they
/// travel in one exchange there and one back; R is what the busiest expert of this
/// rank needs. Adds to `sent_rows` what left this rank, there and back; its
/// backward sends as many.
Tensor dropless(const Tensor& rows, const DroplessCall& call,
                std::int64_t& sent_rows);

}  // namespace shardbook::moe
