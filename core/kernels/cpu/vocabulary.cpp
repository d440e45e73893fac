#include "core/kernels/vocabulary.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/vector_math.h"
#include "core/kernels/elementwise.h"

namespace shardbook::kernels::cpu {
namespace {

double num_counted(std::int64_t rows, const std::int64_t* targets) {
  return static_cast<double>(rows -
                             std::count(targets, targets + rows, kIgnoreIndex));
}

bool has_target(const VocabularyPart& part, std::int64_t target) {
  return target >= part.first && target < part.first + part.valid;
}

}  // namespace

void cross_entropy(KernelContext&, DType dtype, std::int64_t rows,
                   std::int64_t cols, const void* logits,
                   const std::int64_t* targets, void* loss, void* logsumexp) {
  dispatch_floating("cross_entropy", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(logits) + r * cols;
      const std::int64_t target = targets[r];
      const bool ignored = target == kIgnoreIndex;
      SB_CHECK(ignored || (target >= 0 && target < cols),
               "cross_entropy: target ", target, " in row ", r,
               "; classes are 0 to ", cols - 1);
      const S max = max_row(in, cols);
      const S total = max + std::log(sum_exp_row(in, cols, max));
      if (logsumexp != nullptr) static_cast<S*>(logsumexp)[r] = total;
      static_cast<S*>(loss)[r] = ignored ? S(0) : total - widen(in[target]);
    });
  });
}

void reduce_losses(KernelContext& context, DType stat, std::int64_t rows,
                   const void* losses, const std::int64_t* targets, bool mean,
                   void* loss) {
  const double total = sum_all(context, stat, rows, losses);
  fill(context, stat, 1, loss,
       mean ? total / num_counted(rows, targets) : total);
}

void vocabulary_max(KernelContext&, DType dtype, const VocabularyPart& part,
                    const void* logits, void* max) {
  dispatch_floating("vocabulary_max", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    for_rows(part.rows, part.cols, [&](std::int64_t r) {
      static_cast<S*>(max)[r] =
          part.valid == 0
              ? -std::numeric_limits<S>::infinity()
              : max_row(static_cast<const T*>(logits) + r * part.cols,
                        part.valid);
    });
  });
}

void vocabulary_sums(KernelContext&, DType dtype, const VocabularyPart& part,
                     const void* logits, const std::int64_t* targets,
                     const void* max, void* picked, void* sum) {
  dispatch_floating("vocabulary_sums", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    for_rows(part.rows, part.cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(logits) + r * part.cols;
      const S largest = static_cast<const S*>(max)[r];
      static_cast<S*>(sum)[r] = sum_exp_row(in, part.valid, largest);
      static_cast<S*>(picked)[r] =
          has_target(part, targets[r])
              ? widen(in[targets[r] - part.first]) - largest
              : S(0);
    });
  });
}

void vocabulary_losses(KernelContext&, DType stat, std::int64_t rows,
                       const std::int64_t* targets, const void* picked,
                       const void* max, const void* sum, void* loss,
                       void* logsumexp) {
  dispatch_floating("vocabulary_losses", stat, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const auto at = [](const void* x, std::int64_t r) {
      return widen(static_cast<const T*>(x)[r]);
    };
    for (std::int64_t r = 0; r < rows; ++r) {
      const S log_sum = std::log(at(sum, r));
      const S own = targets[r] == kIgnoreIndex ? S(0) : log_sum - at(picked, r);
      static_cast<T*>(logsumexp)[r] = narrow<T>(at(max, r) + log_sum);
      static_cast<T*>(loss)[r] = narrow<T>(own);
    }
  });
}

void vocabulary_gradient(KernelContext&, DType dtype,
                         const VocabularyPart& part, const void* logits,
                         const std::int64_t* targets, const void* logsumexp,
                         const void* dloss, bool mean, void* dlogits) {
  dispatch_floating("vocabulary_gradient", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    double factor = *static_cast<const S*>(dloss);
    if (mean) factor /= num_counted(part.rows, targets);
    for_rows(part.rows, part.cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(logits) + r * part.cols;
      T* out = static_cast<T*>(dlogits) + r * part.cols;
      const std::int64_t used = targets[r] == kIgnoreIndex ? 0 : part.valid;
      // Before the row is written, which may be the same array
      const S total = static_cast<const S*>(logsumexp)[r];
      const bool is_here = used > 0 && has_target(part, targets[r]);
      const S at_target =
          is_here
              ? exp_vec(V(widen(in[targets[r] - part.first]) - total)).get(0) -
                    S(1)
              : S(0);
      const V shift(total), by(static_cast<S>(factor));
      map_range(used, in, out,
                [&](const V& v) { return exp_vec(v - shift) * by; });
      std::fill(out + used, out + part.cols, narrow<T>(S(0)));
      if (is_here) {
        out[targets[r] - part.first] =
            narrow<T>(at_target * static_cast<S>(factor));
      }
    });
  });
}

}  // namespace shardbook::kernels::cpu
