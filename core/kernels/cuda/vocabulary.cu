// The cross-entropy of whole logits, and of logits whose vocabulary is cut over
// ranks. A warp works on a row of up to 1024 columns, a block on a longer one
// (warp_rows.h). Each kernel reads the logits once, so all of them run at the
// rate of memory.

#include "core/kernels/vocabulary.h"

#include <cmath>
#include <limits>

#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/warp_rows.h"

namespace shardbook::kernels::cuda {

namespace {

template <typename S>
__device__ constexpr S lowest() {
  return -std::numeric_limits<S>::infinity();
}

/// The sum of exp(x - max) over elements whose maximum is not known yet.
template <typename S>
struct OnlineSum {
  S max = lowest<S>(), sum = 0;

  /// The number to subtract: while all is -infinity, exp must give 0.
  __device__ static S shift(S max) { return max == lowest<S>() ? S(0) : max; }

  template <typename T, int kWidth>
  __device__ void add(const AlignedVector<T, kWidth>& v) {
    S next = max;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S value = widen(v[j]);
      next = value > next ? value : next;
    }
    if (next != max) {
      sum *= std::exp(max - next);
      max = next;
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += std::exp(widen(v[j]) - shift(max));
  }
};

/// The target of a row. A target that is no class is reported to the host and
/// becomes kIgnoreIndex.
__device__ inline std::int64_t checked_target(std::int64_t target,
                                              std::int64_t cols,
                                              DeviceError* error) {
  if (target == kIgnoreIndex || (target >= 0 && target < cols)) return target;
  report(error, DeviceError::kTargetOutside, target, 0, cols);
  return kIgnoreIndex;
}

template <typename T, typename Shape>
__global__ void cross_entropy_rows(std::int64_t rows, std::int64_t cols,
                                   const T* logits, const std::int64_t* targets,
                                   Compute<T>* loss, Compute<T>* logsumexp,
                                   DeviceError* error) {
  using S = Compute<T>;
  const std::int64_t row = Shape::first_row();
  if (row >= rows) return;
  const T* const in = logits + row * cols;
  OnlineSum<S> online;
  walk_row<Shape>(in, cols,
                  [&](const auto& v, std::int64_t) { online.add(v); });
  const S max = Shape::largest(online.max);
  const S sum =
      Shape::sum(online.sum * std::exp(online.max - OnlineSum<S>::shift(max)));
  if (Shape::thread() != 0) return;
  // A row that is all -infinity gives NaN.
  const S total = max + std::log(max == lowest<S>() ? max - max : sum);
  const std::int64_t target = checked_target(targets[row], cols, error);
  if (logsumexp != nullptr) logsumexp[row] = total;
  loss[row] = target == kIgnoreIndex ? S(0) : total - widen(in[target]);
}

/// Counts targets that are not ignored; called by all threads of the block.
template <int kThreads>
__device__ double num_counted(std::int64_t rows, const std::int64_t* targets,
                              SharedArray<double, 32>& parts) {
  double counted = 0.0;
#pragma unroll 4
  for (std::int64_t r = threadIdx.x; r < rows; r += kThreads) {
    counted += targets[r] == kIgnoreIndex ? 0.0 : 1.0;
  }
  return join_block<kThreads>(counted, Sum(), parts);
}

/// One block: the sum of the losses, divided by the number of targets with
/// `mean`.
template <typename S, int kThreads>
__global__ void total_loss(std::int64_t rows, const S* losses,
                           const std::int64_t* targets, bool mean, S* loss) {
  __shared__ SharedArray<double, 32> parts;
  double sum = 0.0;
#pragma unroll 4
  for (std::int64_t r = threadIdx.x; r < rows; r += kThreads) {
    sum += static_cast<double>(widen(losses[r]));
  }
  sum = join_block<kThreads>(sum, Sum(), parts);
  if (mean) sum /= num_counted<kThreads>(rows, targets, parts);
  if (threadIdx.x == 0) *loss = narrow<S>(static_cast<Compute<S>>(sum));
}

/// One block: the factor of the gradient of a row's loss.
template <typename S, int kThreads>
__global__ void loss_factor(std::int64_t rows, const std::int64_t* targets,
                            const S* dloss, bool mean, S* factor) {
  __shared__ SharedArray<double, 32> parts;
  double value = *dloss;
  if (mean) value /= num_counted<kThreads>(rows, targets, parts);
  if (threadIdx.x == 0) *factor = static_cast<S>(value);
}

/// Calls body(threads) with the size of the only block that walks over `rows`.
template <typename Body>
void with_one_block(std::int64_t rows, Body body) {
  if (rows <= kWarp) {
    body(std::integral_constant<int, kWarp>{});
  } else {
    body(std::integral_constant<int, 1024>{});
  }
}

template <typename T, typename Shape>
__global__ void max_kernel(VocabularyPart part, const T* logits,
                           Compute<T>* max) {
  using S = Compute<T>;
  const std::int64_t row = Shape::first_row();
  if (row >= part.rows) return;  // Never a part of a warp
  S largest = lowest<S>();
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

template <typename T, typename Shape>
__global__ void gradient_kernel(VocabularyPart part, const T* logits,
                                const std::int64_t* targets,
                                const Compute<T>* logsumexp,
                                const Compute<T>* factor, T* dlogits) {
  using S = Compute<T>;
  const std::int64_t row = Shape::first_row();
  if (row >= part.rows) return;
  T* const out = dlogits + row * part.cols;
  const S total = logsumexp[row], by = *factor;
  const std::int64_t target = targets[row] - part.first;
  const std::int64_t used = targets[row] == kIgnoreIndex ? 0 : part.valid;
  walk_row<Shape>(
      logits + row * part.cols, part.cols,
      [&](const auto& v, std::int64_t column) {
        constexpr int kWidth = static_cast<int>(sizeof(v) / sizeof(T));
        AlignedVector<T, kWidth> d;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const S hit = column + j == target ? S(1) : S(0);
          const S value = (std::exp(widen(v[j]) - total) - hit) * by;
          d[j] = narrow<T>(column + j < used ? value : S(0));
        }
        store_vector(out + column, d);
      });
}

}  // namespace

void cross_entropy(KernelContext& context, DType dtype, std::int64_t rows,
                   std::int64_t cols, const void* logits,
                   const std::int64_t* targets, void* loss, void* logsumexp) {
  with_floating("cross_entropy", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_walk<kLanes<T>>(cols, [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, "cross_entropy", Shape::grid(rows), Shape::kBlockThreads,
             cross_entropy_rows<T, Shape>, rows, cols, logits, targets, loss,
             logsumexp, cuda_state(context).error);
    });
  });
}

void reduce_losses(KernelContext& context, DType stat, std::int64_t rows,
                   const void* losses, const std::int64_t* targets, bool mean,
                   void* loss) {
  with_floating("reduce_losses", stat, [&](auto zero) {
    using S = decltype(zero);
    with_one_block(rows, [&](auto threads) {
      launch(context, "reduce_losses", 1, threads(), total_loss<S, threads()>,
             rows, losses, targets, mean, loss);
    });
  });
}

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
    with_one_block(part.rows, [&](auto threads) {
      launch(context, "vocabulary_gradient", 1, threads(),
             loss_factor<S, threads()>, part.rows, targets, dloss, mean,
             factor.data());
    });
    const auto run = [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, "vocabulary_gradient", Shape::grid(part.rows),
             Shape::kBlockThreads, gradient_kernel<T, Shape>, part, logits,
             targets, logsumexp, factor.data(), dlogits);
    };
    // Rows of both arrays meet whole vectors at the same elements, or never.
    const auto distance = reinterpret_cast<std::uintptr_t>(logits) -
                          reinterpret_cast<std::uintptr_t>(dlogits);
    if (distance % kVectorBytes == 0) {
      with_walk<kLanes<T>>(part.cols, run);
    } else {
      with_walk<1>(part.cols, run);
    }
  });
}

SHARDBOOK_CUDA_KERNEL(cross_entropy);
SHARDBOOK_CUDA_KERNEL(reduce_losses);
SHARDBOOK_CUDA_KERNEL(vocabulary_max);
SHARDBOOK_CUDA_KERNEL(vocabulary_sums);
SHARDBOOK_CUDA_KERNEL(vocabulary_losses);
SHARDBOOK_CUDA_KERNEL(vocabulary_gradient);

}  // namespace shardbook::kernels::cuda
