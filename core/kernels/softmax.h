#pragma once

// Softmax over the last dim, and the loss of a classifier. Arrays are
// [rows, cols]; "stat" arrays are f64 for f64, otherwise f32.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel_context.h"

namespace shardbook::kernels {

/// Targets with this value count for nothing.
constexpr std::int64_t kIgnoreIndex = -100;

/// y = exp(x - max) / sum. y may be x. A row that is all -inf gives NaN.
void softmax(KernelContext& context, DType dtype, std::int64_t rows,
             std::int64_t cols, const void* x, void* y);

/// dx = y * (dy - sum(dy * y)), from the output y. dx may be dy.
void softmax_backward(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx);

/// y = x - logsumexp(x). y may be x.
void log_softmax(KernelContext& context, DType dtype, std::int64_t rows,
                 std::int64_t cols, const void* x, void* y);

/// dx = dy - exp(y) * sum(dy), from the output y. dx may be dy.
void log_softmax_backward(KernelContext& context, DType dtype,
                          std::int64_t rows, std::int64_t cols, const void* y,
                          const void* dy, void* dx);

/// Losses of rows: loss[r] = logsumexp(logits[r]) - logits[r, targets[r]], or 0
/// where the target is `ignore_index`. Nothing is averaged.
///
///   logits          [rows, cols]
///   loss, logsumexp [rows] stat, written; logsumexp may be null
///
/// Throws Error for a target outside [0, cols) that is not ignored.
void cross_entropy(KernelContext& context, DType dtype, std::int64_t rows,
                   std::int64_t cols, const void* logits,
                   const std::int64_t* targets, void* loss, void* logsumexp,
                   std::int64_t ignore_index = kIgnoreIndex);

/// dlogits = (softmax(logits) - onehot(targets)) * scale; rows that are ignored
/// get zeros. dlogits may be logits. For a mean, scale is dloss / count.
void cross_entropy_backward(KernelContext& context, DType dtype,
                            std::int64_t rows, std::int64_t cols,
                            const void* logits, const std::int64_t* targets,
                            const void* logsumexp, double scale, void* dlogits,
                            std::int64_t ignore_index = kIgnoreIndex);

}  // namespace shardbook::kernels
