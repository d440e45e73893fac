#pragma once

// The cost of a step on d squares of q x q ranks: the formulas of the page.

#include "chapters/common/sharded/sharded_strategy.h"

namespace shardbook::summa {

/// The sizes that the formulas need.
struct Sizes : ShardedSizes {
  double q = 1, d = 1;
};

/// The sum of of(k, n, b) over a block's products, of weights [k, n] and biases of
/// b elements (0: none).
template <typename Function>
double over_products(const BlockTable& block, const Function& of) {
  double sum = 0;
  for (const BlockPart& part : block.parts()) {
    if (part.kind != PartKind::kProduct) continue;
    const auto n = static_cast<double>(part.out);
    sum += of(static_cast<double>(part.in), n, part.bias ? n : 0);
  }
  return sum;
}
/// Elements of the vectors of a block that are cut: of its norms, and biases.
double vector_sizes(const BlockTable& block);
/// Elements of the norms of heads of all blocks, which each rank has whole.
double head_norms(const ShardedSizes& sizes);

/// The sum over the four linears of a block of GPT-2: [h, 3h], [h, h], [h, 4h] and
/// [4h, h].
template <typename Function>
double over_linears(double h, const Function& of) {
  return of(h, 3 * h) + of(h, h) + of(h, 4 * h) + of(4 * h, h);
}

/// Elements that a rank sends for Y = X W, X [M, K], W [K, N], forward and
/// backward, without bias: 3 (q-1)/q^2 (MK/d + KN) + 2 (d-1)/d KN/q^2.
double linear_elements(double q, double d, double m, double k, double n);
/// Bytes that a rank sends in one step of a decoder, by the page's table; without the
/// norm of the gradient.
double step_bytes(const Sizes& sizes);
/// Parameters that a rank holds: 1/q^2 of all, and norms of heads.
double parameters_per_rank(const Sizes& sizes);
/// Activations that a rank keeps for backward, in bytes.
double kept_bytes(const Sizes& sizes);
/// Seconds of a step on the cluster `textbook`.
double step_s(const Sizes& sizes);

}  // namespace shardbook::summa
