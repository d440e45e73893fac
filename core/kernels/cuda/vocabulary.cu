// The cross-entropy of logits whose vocabulary is cut over ranks. A warp works
// on a row of up to 1024 columns, a block on a longer one (warp_rows.h). Each kernel
// reads the logits once, so all of them run at the rate of memory.

#include "core/kernels/vocabulary.h"

#include <cmath>
#include <limits>

#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/warp_rows.h"
#include "core/kernels/softmax.h"

namespace shardbook::kernels::cuda {

namespace {

template <typename T, typename Shape>
__global__ void max_kernel(VocabularyPart part, const T* logits,
                           Compute<T>* max) {
  using S = Compute<T>;
  const std::int64_t row = Shape::first_row();
  if (row >= part.rows) return;  // Never a part of a warp
  S largest = -std::numeric_limits<S>::infinity();
  for (std::int64_t c = Shape::thread(); c < part.valid; c += Shape::kThreads) {
    largest = Max()(largest, widen(logits[row * part.cols + c]));
  }
  largest = Shape::largest(largest);
  if (Shape::thread() == 0) max[row] = largest;
}

template <typename T, typename Shape>
__global__ void sums_kernel(VocabularyPart part, const T* logits,
                            const std::int64_t* targets, const Compute<T>* max,
                            Compute<T>* picked, Compute<T>* sum) {
  using S = Compute<T>;
  const std::int64_t row = Shape::first_row();
  if (row >= part.rows) return;
  const T* in = logits + row * part.cols;
  const S largest = max[row];
  S total = 0;
  for (std::int64_t c = Shape::thread(); c < part.valid; c += Shape::kThreads) {
    total += std::exp(widen(in[c]) - largest);
  }
  total = Shape::sum(total);
  if (Shape::thread() != 0) return;
  sum[row] = total;
  const std::int64_t target = targets[row] - part.first;
  picked[row] =
      target >= 0 && target < part.valid ? widen(in[target]) - largest : S(0);
}

template <typename T>
__global__ void losses_kernel(std::int64_t rows, const std::int64_t* targets,
                              const T* picked, const T* max, const T* sum,
                              T* loss, T* logsumexp) {
  using S = Compute<T>;
  for (std::int64_t r = first_index(); r < rows; r += index_step()) {
    const S log_sum = std::log(widen(sum[r]));
    const S own =
        targets[r] == kIgnoreIndex ? S(0) : log_sum - widen(picked[r]);
    logsumexp[r] = narrow<T>(widen(max[r]) + log_sum);
    loss[r] = narrow<T>(own);
  }
}

// One block: the factor of the gradient of a row's loss.
template <typename S>
__global__ void factor_kernel(std::int64_t rows, const std::int64_t* targets,
                              const S* dloss, bool mean, S* factor) {
  __shared__ SharedArray<double, 32> parts;
  double counted = 0;
  for (std::int64_t r = threadIdx.x; r < rows; r += kBlock) {
    counted += targets[r] == kIgnoreIndex ? 0.0 : 1.0;
  }
  counted = join_block<kBlock>(counted, Sum(), parts);
  if (threadIdx.x != 0) return;
  const double value = *dloss;
  *factor = static_cast<S>(mean ? value / counted : value);
}

template <typename T, typename Shape>
__global__ void gradient_kernel(VocabularyPart part, const T* logits,
                                const std::int64_t* targets,
                                const Compute<T>* logsumexp,
                                const Compute<T>* factor, T* dlogits) {
  using S = Compute<T>;
  const std::int64_t row = Shape::first_row();
  if (row >= part.rows) return;
  const S total = logsumexp[row], by = *factor;
  const std::int64_t target = targets[row] - part.first;
  const std::int64_t used = targets[row] == kIgnoreIndex ? 0 : part.valid;
  for (std::int64_t c = Shape::thread(); c < part.cols; c += Shape::kThreads) {
    const std::int64_t at = row * part.cols + c;
    const S hit = c == target ? S(1) : S(0);
    const S value =
        c < used ? (std::exp(widen(logits[at]) - total) - hit) * by : S(0);
    dlogits[at] = narrow<T>(value);
  }
}

}  // namespace

void vocabulary_max(KernelContext& context, DType dtype,
                    const VocabularyPart& part, const void* logits, void* max) {
  with_floating("vocabulary_max", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_walk<1>(part.cols, [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, "vocabulary_max", Shape::grid(part.rows),
             Shape::kBlockThreads, max_kernel<T, Shape>, part, logits, max);
    });
  });
}

void vocabulary_sums(KernelContext& context, DType dtype,
                     const VocabularyPart& part, const void* logits,
                     const std::int64_t* targets, const void* max, void* picked,
                     void* sum) {
  with_floating("vocabulary_sums", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_walk<1>(part.cols, [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, "vocabulary_sums", Shape::grid(part.rows),
             Shape::kBlockThreads, sums_kernel<T, Shape>, part, logits, targets,
             max, picked, sum);
    });
  });
}

void vocabulary_losses(KernelContext& context, DType stat, std::int64_t rows,
                       const std::int64_t* targets, const void* picked,
                       const void* max, const void* sum, void* loss,
                       void* logsumexp) {
  with_floating("vocabulary_losses", stat, [&](auto zero) {
    using T = decltype(zero);
    launch(context, "vocabulary_losses", blocks_for(rows), kBlock,
           losses_kernel<T>, rows, targets, picked, max, sum, loss, logsumexp);
  });
}

void vocabulary_gradient(KernelContext& context, DType dtype,
                         const VocabularyPart& part, const void* logits,
                         const std::int64_t* targets, const void* logsumexp,
                         const void* dloss, bool mean, void* dlogits) {
  with_floating("vocabulary_gradient", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    Scratch factor(context, sizeof(S));
    launch(context, "vocabulary_gradient", 1, kBlock, factor_kernel<S>,
           part.rows, targets, dloss, mean, factor.data());
    with_walk<1>(part.cols, [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, "vocabulary_gradient", Shape::grid(part.rows),
             Shape::kBlockThreads, gradient_kernel<T, Shape>, part, logits,
             targets, logsumexp, factor.data(), dlogits);
    });
  });
}

SHARDBOOK_CUDA_KERNEL(vocabulary_max);
SHARDBOOK_CUDA_KERNEL(vocabulary_sums);
SHARDBOOK_CUDA_KERNEL(vocabulary_losses);
SHARDBOOK_CUDA_KERNEL(vocabulary_gradient);

}  // namespace shardbook::kernels::cuda
