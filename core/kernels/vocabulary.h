#pragma once

// The loss of a classifier, or of a language model: the cross-entropy of logits
// [rows, cols], whole, or cut over ranks by columns. The forward of the latter
// is in pieces, between which the ranks add up. "stat" arrays are f64 for f64,
// otherwise f32.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// Targets with this value count for nothing.
constexpr std::int64_t kIgnoreIndex = -100;

/// Losses of rows: loss[r] = logsumexp(logits[r]) - logits[r, targets[r]], or 0
/// where the target is kIgnoreIndex. Nothing is averaged.
///
///   logits          [rows, cols]
///   loss, logsumexp [rows] stat, written; logsumexp may be null
///
/// Throws Error for a target outside [0, cols) that is not ignored.
SHARDBOOK_KERNEL(cross_entropy,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* logits,
                      const std::int64_t* targets, void* loss,
                      void* logsumexp));

/// loss = sum of losses, added in f64; with `mean`, divided by the number of
/// targets that are not ignored.
///
///   losses [rows] and loss [1] of dtype `stat`, f64 or f32
SHARDBOOK_KERNEL(reduce_losses,
                 void(KernelContext& context, DType stat, std::int64_t rows,
                      const void* losses, const std::int64_t* targets,
                      bool mean, void* loss));

/// One rank's columns of the logits: [rows, cols], of which the first `valid`
/// are classes first, first + 1, ..; the others are padding and count for
/// nothing. `valid` may be 0. Whole logits have `cols` classes from 0 on.
struct VocabularyPart {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t first = 0;
  std::int64_t valid = 0;
};

/// max[r] = the largest of logits[r, 0 .. valid); -inf where there is none.
SHARDBOOK_KERNEL(vocabulary_max, void(KernelContext& context, DType dtype,
                                      const VocabularyPart& part,
                                      const void* logits, void* max));

/// picked[r] = logits[r, targets[r] - first] - max[r] where this rank has the
/// target, else 0; sum[r] = sum of exp(logits[r] - max[r]). `max` is the
/// maximum over all ranks.
SHARDBOOK_KERNEL(vocabulary_sums,
                 void(KernelContext& context, DType dtype,
                      const VocabularyPart& part, const void* logits,
                      const std::int64_t* targets, const void* max,
                      void* picked, void* sum));

/// From the sums over all ranks: loss[r] = log(sum[r]) - picked[r], or 0 where the
/// target is ignored, and logsumexp[r] = max[r] + log(sum[r]). All arrays [rows]
/// of dtype `stat`; loss may be picked, and logsumexp may be max.
SHARDBOOK_KERNEL(vocabulary_losses,
                 void(KernelContext& context, DType stat, std::int64_t rows,
                      const std::int64_t* targets, const void* picked,
                      const void* max, const void* sum, void* loss,
                      void* logsumexp));

/// dlogits = (exp(logits - logsumexp) - onehot(targets)) * dloss, divided by the
/// number of targets that are not ignored with `mean`; zeros in rows that are
/// ignored and in padding. dlogits may be logits. dloss [1] stat.
SHARDBOOK_KERNEL(vocabulary_gradient,
                 void(KernelContext& context, DType dtype,
                      const VocabularyPart& part, const void* logits,
                      const std::int64_t* targets, const void* logsumexp,
                      const void* dloss, bool mean, void* dlogits));

}  // namespace shardbook::kernels
