#pragma once

// From one layout to another: arithmetic on sizes, without ranks or data.
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

// --- Sizes of one move ---------------------------------------------------------

/// The array with the dims that this axis cuts at their length before the cut.
Shape whole_along(std::size_t axis, Placements placements, const Shape& global,
                  const Shape& mesh,
                  const std::vector<std::int64_t>& coordinate);
std::int64_t ceil_div(std::int64_t n, std::int64_t parts);
Shape with_size(Shape shape, std::int64_t dim, std::int64_t size);
std::int64_t length(const Shape& shape, std::int64_t dim);
/// Elements of `shape` with `dim` padded to equal parts.
std::int64_t padded_numel(const Shape& shape, std::int64_t dim,
                          std::int64_t parts);

}  // namespace shardbook::dtensor
