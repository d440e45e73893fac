#pragma once

// From one layout to another, on plain arrays.
//
//   from -> to        on the axis of P ranks             in the ledger
//   R    -> S(a)      keep the own part                  -
//   R    -> P(sum)    divide by P                        -
//   S(a) -> R         pad, all-gather, cut               all_gather
//   S(a) -> S(b)      pad, all-to-all, cut               all_to_all
//   P    -> R         all-reduce                         all_reduce
//   P    -> S(a)      pad, reduce-scatter, cut           reduce_scatter
//   S(a) -> P(sum)    zeros around the own part          -
//
// Axes whose cuts are nested come apart in order: the inner one first.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "chapters/11_dtensor/mesh.h"
#include "chapters/11_dtensor/placement.h"
#include "comm/ledger.h"

namespace shardbook::dtensor {

/// One axis of the mesh changes its placement.
struct Move {
  std::size_t axis = 0;
  Placement from, to;
};

/// The moves from one layout to another, in the order in which they run:
///
///   1. from the innermost axis outwards: move to the target; but to R, where
///      the target cuts a dim and the outer axes that cut it will change
///   2. from the outermost axis inwards: what still differs
///
/// (S(0), S(0)) -> (R, S(0)): the inner axis gathers, the outer one gathers,
/// the inner one cuts. torch/distributed/tensor/_redistribute.py.
std::vector<Move> moves_between(const Placements& from, const Placements& to);

/// A collective that moves need.
struct Call {
  std::size_t axis = 0;
  CommOp op = CommOp::kAllReduce;
  std::int64_t numel = 0;  ///< as in CommRecord
};
/// The calls of the rank at `coordinate`, in order.
std::vector<Call> calls_of(const Placements& from, const Placements& to,
                           const Shape& global, const Shape& mesh,
                           const std::vector<std::int64_t>& coordinate);
/// Elements that they put on the wire.
double wire_elements(const std::vector<Call>& calls, const Shape& mesh);

/// The local array of layout `to` from the array of layout `from`. Collective
/// over the axes that communicate; not recorded for backward. Where nothing
/// moves, the result shares the memory of `local`.
Tensor redistribute_local(const Tensor& local, const Mesh& mesh,
                          const Shape& global, const Placements& from,
                          const Placements& to);

/// This rank's part of the root's `whole` along `dim`. One scatter of the parts,
/// padded.
Tensor scatter_local(const Tensor& whole, ProcessGroup& group,
                     std::int64_t dim);

}  // namespace shardbook::dtensor
