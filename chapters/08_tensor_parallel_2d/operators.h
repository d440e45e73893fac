#pragma once

// Operations of sharded layers between their products, on any group: sums and
// gathers with their backward, and a norm and a loss over a cut last dimension.
// The 2D, 2.5D and 3D layers are all built from them.
//
// With a group of size one, or null, each is the single-device operation.

#include <cstdint>

#include "chapters/08_tensor_parallel_2d/grid.h"
#include "core/ops.h"

namespace shardbook::summa {

/// Identity for a parameter that the ranks of `group` replicate and use on
/// different rows. Backward sums the ranks' gradients with an in-place
/// all_reduce, so only one operation may use the result.
Tensor replicated(const Tensor& parameter, ProcessGroup* group);
/// The sum over the ranks, on all of them: all_reduce. Its backward is the
/// identity, since every rank has the whole gradient of the sum already.
Tensor sum_over(const Tensor& partial, ProcessGroup& group);

/// A call in flight, not recorded for backward; `wait` returns its result.
class InFlight {
 public:
  /// The ranks' rows end to end.
  static InFlight gather(const Tensor& own, ProcessGroup& group);
  /// This rank's rows of the sum over ranks.
  static InFlight scatter(const Tensor& partial, ProcessGroup& group);
  Tensor wait();

 private:
  Tensor input_, result_;
  Work work_;
};

/// The ranks' rows end to end: all_gather on dim 0. Backward: reduce_scatter.
Tensor gather_rows(const Tensor& own, ProcessGroup& group);
/// This rank's rows of the sum over ranks: reduce_scatter on dim 0. Backward:
/// all_gather.
Tensor scatter_rows(const Tensor& partial, ProcessGroup& group);
/// The same as gather_rows on the last dim: pieces [.., n/P] -> [.., n].
Tensor gather_columns(const Tensor& own, ProcessGroup& group);

/// layer_norm of rows that are cut over `group`: x [.., n/P], gamma and beta
/// [n/P]. The means of x and x^2 need one all_reduce of 2 values per row,
/// forward and backward; var = E[x^2] - E[x]^2, in f32 or f64.
Tensor split_layer_norm(const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, ProcessGroup& group, double eps);

/// rms_norm of rows that are cut over `group`: x [.., n/P], gamma [n/P]. The mean of
/// x^2 needs one all_reduce of a value per row, and so does backward.
Tensor split_rms_norm(const Tensor& x, const Tensor& gamma, ProcessGroup& group,
                      double eps);

/// Cross-entropy of rows whose classes are cut over `group`: logits
/// [.., v] hold classes first .. first + v - 1; classes from `vocabulary` on
/// are padding (0: no padding). See cross_entropy_part: three all_reduces of
/// one value per row forward, none backward.
Tensor split_cross_entropy(const Tensor& logits, const Tensor& targets,
                           std::int64_t first, ProcessGroup& group,
                           std::int64_t vocabulary = 0,
                           Reduction reduction = Reduction::kMean);

/// Attention of one of n parts of the heads, which `options` count: of qkv [b, S,
/// 3h/n] -> [b, S, h/n]. Rows are whole sequences, so nothing is sent; dropout
/// draws the block's part of the single-device masks.
Tensor block_attention(const Tensor& qkv, const AttentionOptions& options,
                       const BlockPlace& at);
/// Draws the block's part of the single-device mask.
Tensor block_dropout(const Tensor& x, double p, const BlockPlace& at);

/// Linear rows of `x` as a matrix [rows, last dim].
Tensor as_matrix(const Tensor& x);
/// `shape` with another last dim.
Shape with_last(Shape shape, std::int64_t last);

}  // namespace shardbook::summa
