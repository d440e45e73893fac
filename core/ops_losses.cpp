// Losses, also of logits whose vocabulary is cut over ranks.

#include <algorithm>

#include "core/internal/op_scope.h"
#include "core/kernels/vocabulary.h"
#include "core/ops.h"

namespace shardbook {

using internal::bytes_of;
using internal::count;
using internal::OpScope;

namespace {

void check_targets(const char* op, const Tensor& logits, const Tensor& targets,
                   std::int64_t rows) {
  SB_CHECK(targets.dtype() == DType::kI64 && targets.numel() == rows, op,
           ": targets ", dtype_name(targets.dtype()),
           shape_text(targets.shape()), " for logits ",
           shape_text(logits.shape()), "; give one i64 per row");
  internal::check_same_device(op, logits, targets);
}

/// `lse` has the logarithms of the sums over all classes of a row.
void record_gradient(const Tensor& logits, const Tensor& targets,
                     const Tensor& lse, const kernels::VocabularyPart& part,
                     bool mean, const Tensor& loss) {
  autograd::record("cross_entropy", {logits}, {loss},
                   [=](const Tensors& grads) {
                     Tensor dlogits = logits.empty_like();
                     OpScope("cross_entropy", 3 * count(logits),
                             bytes_of({&logits, &dlogits}), logits)
                         .run(kernels::vocabulary_gradient, logits.dtype(),
                              part, logits.raw(), targets.data<std::int64_t>(),
                              lse.raw(), grads[0].raw(), mean, dlogits.raw());
                     return Tensors{dlogits};
                   });
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     Reduction reduction) {
  SB_CHECK(logits.ndim() >= 1, "cross_entropy: a scalar has no last dim");
  const std::int64_t cols = logits.size(-1);
  const std::int64_t rows = cols == 0 ? 0 : logits.numel() / cols;
  check_targets("cross_entropy", logits, targets, rows);
  const DType stat = internal::stat_dtype(logits.dtype());
  Tensor loss = Tensor::empty({}, {stat, logits.device()});
  Tensor lse = Tensor::empty({rows}, {stat, logits.device()});
  const bool mean = reduction == Reduction::kMean;
  {
    Tensor losses = lse.empty_like();
    OpScope scope("cross_entropy", 5 * count(logits), bytes_of({&logits}),
                  logits);
    if (scope.runs()) {
      kernels::cross_entropy(scope.kernels(), logits.dtype(), rows, cols,
                             logits.raw(), targets.data<std::int64_t>(),
                             losses.raw(), lse.raw());
      kernels::reduce_losses(scope.kernels(), stat, rows, losses.raw(),
                             targets.data<std::int64_t>(), mean, loss.raw());
    }
  }
  record_gradient(logits, targets, lse, {rows, cols, 0, cols}, mean, loss);
  return loss;
}

Tensor mse_loss(const Tensor& x, const Tensor& target) {
  SB_CHECK(x.shape() == target.shape(), "mse_loss: shapes ",
           shape_text(x.shape()), " and ", shape_text(target.shape()),
           " differ");
  return mean(square(sub(x, target)));
}

Tensor cross_entropy_part(const Tensor& logits, const Tensor& targets,
                          std::int64_t first, std::int64_t num_classes,
                          const ReduceOverRanks& reduce, Reduction reduction) {
  SB_CHECK(logits.ndim() >= 1 && logits.size(-1) > 0,
           "cross_entropy_part: logits ", shape_text(logits.shape()),
           "; give [.., classes]");
  kernels::VocabularyPart part;
  part.cols = logits.size(-1);
  part.rows = logits.numel() / part.cols;
  part.first = first;
  part.valid = std::clamp<std::int64_t>(num_classes - first, 0, part.cols);
  check_targets("cross_entropy_part", logits, targets, part.rows);
  const DType stat = internal::stat_dtype(logits.dtype());
  const bool mean = reduction == Reduction::kMean;
  const TensorOptions options{stat, logits.device()};
  Tensor loss = Tensor::empty({}, options);
  Tensor max = Tensor::empty({part.rows}, options);
  Tensor sum = Tensor::empty({part.rows}, options);
  Tensor picked = Tensor::empty({part.rows}, options);
  OpScope("cross_entropy", count(logits), bytes_of({&logits}), logits)
      .run(kernels::vocabulary_max, logits.dtype(), part, logits.raw(),
           max.raw());
  reduce(max, true);
  OpScope("cross_entropy", 4 * count(logits), bytes_of({&logits}), logits)
      .run(kernels::vocabulary_sums, logits.dtype(), part, logits.raw(),
           targets.data<std::int64_t>(), max.raw(), picked.raw(), sum.raw());
  reduce(picked, false);
  reduce(sum, false);
  {
    OpScope scope("cross_entropy", 2 * count(sum),
                  bytes_of({&max, &sum, &picked}), sum);
    if (scope.runs()) {
      kernels::vocabulary_losses(scope.kernels(), stat, part.rows,
                                 targets.data<std::int64_t>(), picked.raw(),
                                 max.raw(), sum.raw(), picked.raw(), max.raw());
      kernels::reduce_losses(scope.kernels(), stat, part.rows, picked.raw(),
                             targets.data<std::int64_t>(), mean, loss.raw());
    }
  }
  record_gradient(logits, targets, /*lse=*/max, part, mean, loss);
  return loss;
}

}  // namespace shardbook
