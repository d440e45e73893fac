#pragma once

// The cost of a step on a cube of l x l x l ranks: the formulas of the page.

#include "chapters/common/sharded/sharded_strategy.h"

namespace shardbook::cube {

/// The sizes that the formulas need.
struct Sizes : ShardedSizes {
  double l = 1;
  bool keep_gathered = true;
};

/// Elements that a rank sends for Y = X W, X [M, K], W [K, N], forward and
/// backward, without bias: 2 (l-1)/l^3 (MK + KN + MN), and (l-1)/l^3 (MK + KN)
/// more where operands are gathered again.
double linear_elements(double l, double m, double k, double n,
                       bool keep_gathered = true);
/// Bytes that a rank sends in one step of a decoder, by the page's table; without the
/// norm of the gradient.
double step_bytes(const Sizes& sizes);
/// Parameters that a rank holds: 1/l^3 of matrices and tables, 1/l of vectors
/// and positions, all of the norms of heads.
double parameters_per_rank(const Sizes& sizes);
/// Activations that a rank keeps for backward, in bytes.
double kept_bytes(const Sizes& sizes);
/// Seconds of a step on the cluster `textbook`.
double step_s(const Sizes& sizes);

}  // namespace shardbook::cube
