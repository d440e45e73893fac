#pragma once

// Operations on DTensors. Each returns the same as core's operation of that
// name (core/ops.h) for the whole tensors; its rules list the layouts that it
// computes on, and propagation.h chooses among them. Operands lie on one mesh.
//
//   const DTensor hidden = gelu(add(matmul(x, w1()), b1()));  // S(-1)
//   const DTensor y = matmul(hidden, w2());                   // P(sum)
//   add(y.redistribute({replicate()}), b2());

#include "chapters/11_dtensor/dtensor.h"
#include "core/ops.h"

namespace shardbook::dtensor {

// --- Element-wise: equal shards of all operands, with broadcasting -----------
// Replicas are sliced. Sums of partials stay partials; a partial and a replica
// are not added: the replica would count once per rank.

DTensor add(const DTensor& a, const DTensor& b);
DTensor sub(const DTensor& a, const DTensor& b);
DTensor mul(const DTensor& a, const DTensor& b);
/// Keeps partials.
DTensor scale(const DTensor& x, double factor);
DTensor relu(const DTensor& x);
DTensor gelu(const DTensor& x);
DTensor tanh(const DTensor& x);
DTensor square(const DTensor& x);
/// Draws at global positions: the mask of one device, in any layout.
DTensor dropout(const DTensor& x, double p);

// --- Products ------------------------------------------------------------------
// [.., M, K] x [K, N]: rows or columns of the result, or terms where K is cut.

/// a [.., m, k], b [k, n], or [n, k] with `trans_b`.
DTensor matmul(const DTensor& a, const DTensor& b, bool trans_b = false);
/// q [b, s, heads d], k and v [b, s, kv_heads d]: the batch may be cut, and the
/// last dim by whole heads of both.
DTensor attention(const DTensor& q, const DTensor& k, const DTensor& v,
                  const AttentionOptions& options);

// --- Reductions: shards of the reduced dim give partials -----------------------

/// Over one dim, which disappears.
DTensor sum(const DTensor& x, std::int64_t dim);
/// P(avg) where all shards are equal; else P(sum) of sums over the length.
DTensor mean(const DTensor& x, std::int64_t dim);
/// All elements -> [].
DTensor sum(const DTensor& x);
DTensor mean(const DTensor& x);
/// Over one dim. No gradient. Empty shards contribute -inf (max), inf (min).
DTensor max(const DTensor& x, std::int64_t dim);
DTensor min(const DTensor& x, std::int64_t dim);

// --- Along the last dim: softmax and norms need it whole ---------------------------

DTensor softmax(const DTensor& x);
DTensor layer_norm(const DTensor& x, const DTensor& gamma, const DTensor& beta,
                   double eps = 1e-5);
/// The mean over all targets except -100: logits [.., v], targets i64 [..]. Cut
/// rows give terms of it, over a count that is added up first. Cut classes stay
/// where they are: three all-reduces of a number per row (cross_entropy_part),
/// none in backward. PyTorch's loss_parallel.
DTensor cross_entropy(const DTensor& logits, const DTensor& targets);

// --- Lookup --------------------------------------------------------------------------

/// Rows of table [v, h] by indices i64 [..]. A table cut by rows gives terms:
/// each rank looks up its own rows, and has zeros for the others.
DTensor embedding(const DTensor& table, const DTensor& indices);

// --- Layout --------------------------------------------------------------------------

DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1);
/// Merged dims stay cut along the outermost, and split dims along the outermost
/// factor, where these divide; other cuts are gathered first.
DTensor reshape(const DTensor& x, const Shape& shape);

}  // namespace shardbook::dtensor
