#pragma once

// Softmax over the last dim, and the loss of a classifier. Arrays are
// [rows, cols]; "stat" arrays are f64 for f64, otherwise f32.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// Targets with this value count for nothing.
constexpr std::int64_t kIgnoreIndex = -100;

/// y = exp(x - max) / sum. y may be x. A row that is all -inf gives NaN.
SHARDBOOK_KERNEL(softmax,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* x, void* y));

/// dx = y * (dy - sum(dy * y)), from the output y. dx may be dy.
SHARDBOOK_KERNEL(softmax_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx));

/// y = x - logsumexp(x). y may be x.
SHARDBOOK_KERNEL(log_softmax,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* x, void* y));

/// dx = dy - exp(y) * sum(dy), from the output y. dx may be dy.
SHARDBOOK_KERNEL(log_softmax_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx));

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

/// dlogits = (softmax(logits) - onehot(targets)) * dloss, divided by the number
/// of targets that are not ignored with `mean`; rows that are ignored get
/// zeros. dlogits may be logits. dloss [1] stat.
SHARDBOOK_KERNEL(cross_entropy_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* logits,
                      const std::int64_t* targets, const void* logsumexp,
                      const void* dloss, bool mean, void* dlogits));

}  // namespace shardbook::kernels
