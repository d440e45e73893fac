// Softmax and its loss. A warp works on a row of up to 1024 elements, a block
// on a longer one (warp_rows.h).

#include "core/kernels/softmax.h"

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

/// Softmax, or with kLog its logarithm.
template <typename T, typename Shape, bool kLog>
__global__ void softmax_rows(std::int64_t rows, std::int64_t cols, const T* x,
                             T* y) {
  using S = Compute<T>;
  constexpr int kWidth = Shape::kWidth;
  const std::int64_t row = Shape::first_row();
  if (row >= rows) return;  // Never a part of a warp
  const RowPart<T, Shape> part(x + row * cols, cols);

  S max = lowest<S>();
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) max = Max()(max, widen(v[j]));
  });
  max = Shape::largest(max);

  S sum = 0;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += std::exp(widen(v[j]) - max);
  });
  sum = Shape::sum(sum);

  // The maximum is subtracted first: the sum's logarithm is small beside it.
  const S last = kLog ? std::log(sum) : S(1) / sum;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S d = widen(v[j]) - max;
      out[j] = narrow<T>(kLog ? d - last : std::exp(d) * last);
    }
    store_vector(y + row * cols + column, out);
  });
}

template <typename T, typename Shape, bool kLog>
__global__ void softmax_gradients(std::int64_t rows, std::int64_t cols,
                                  const T* y, const T* dy, T* dx) {
  using S = Compute<T>;
  constexpr int kWidth = Shape::kWidth;
  const std::int64_t row = Shape::first_row();
  if (row >= rows) return;
  const RowPart<T, Shape> part(y + row * cols, cols);
  const RowPart<T, Shape> grad(dy + row * cols, cols);

  S sum = 0;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column), g = grad.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum += kLog ? widen(g[j]) : widen(v[j]) * widen(g[j]);
    }
  });
  sum = Shape::sum(sum);

  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column), g = grad.at(i, column);
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S p = widen(v[j]), up = widen(g[j]);
      out[j] = narrow<T>(kLog ? up - std::exp(p) * sum : p * (up - sum));
    }
    store_vector(dx + row * cols + column, out);
  });
}

/// Calls fn(vector, column) for this thread's elements of a row that may begin
/// anywhere: single elements up to the first address that a vector may have,
/// whole vectors, single elements again.
template <typename Shape, typename T, typename Fn>
__device__ void walk_row(const T* row, std::int64_t cols, Fn fn) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  const int thread = Shape::thread();
  const auto past =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % kBytes);
  const std::int64_t before =
      (kBytes - past) % kBytes / static_cast<int>(sizeof(T));
  const std::int64_t head = before < cols ? before : cols;
  const std::int64_t tail = cols - (cols - head) % kWidth;
  if (thread < head) fn(load_vector<1>(row + thread), thread);
  for (std::int64_t i = head + thread * kWidth; i < tail;
       i += Shape::kThreads * kWidth) {
    fn(load_vector<kWidth>(row + i), i);
  }
  if (tail + thread < cols)
    fn(load_vector<1>(row + tail + thread), tail + thread);
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

/// dlogits of all rows; `factor` is computed by loss_factor.
template <typename T, typename Shape>
__global__ void cross_entropy_gradients(std::int64_t rows, std::int64_t cols,
                                        const T* logits,
                                        const std::int64_t* targets,
                                        const Compute<T>* logsumexp,
                                        const Compute<T>* factor, T* dlogits,
                                        DeviceError* error) {
  using S = Compute<T>;
  const std::int64_t row = Shape::first_row();
  if (row >= rows) return;
  T* const out = dlogits + row * cols;
  std::int64_t target = targets[row];
  if (Shape::thread() == 0) checked_target(target, cols, error);
  const bool ignored = target < 0 || target >= cols;
  const S total = logsumexp[row], by = *factor;
  walk_row<Shape>(
      logits + row * cols, cols, [&](const auto& v, std::int64_t column) {
        constexpr int kWidth = static_cast<int>(sizeof(v) / sizeof(T));
        AlignedVector<T, kWidth> d;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const S hit = column + j == target ? S(1) : S(0);
          const S value = (std::exp(widen(v[j]) - total) - hit) * by;
          d[j] = narrow<T>(ignored ? S(0) : value);
        }
        store_vector(out + column, d);
      });
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
  if (threadIdx.x == 0) {
    *loss = narrow<S>(static_cast<Compute<S>>(sum));
  }
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

template <bool kLog>
void run_softmax(KernelContext& context, const char* name, DType dtype,
                 std::int64_t rows, std::int64_t cols, const void* x, void* y) {
  with_floating(name, dtype, [&](auto zero) {
    using T = decltype(zero);
    with_row_shape<T>(cols, is_aligned(kVectorBytes, x, y), [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, name, Shape::grid(rows), Shape::kBlockThreads,
             softmax_rows<T, Shape, kLog>, rows, cols, x, y);
    });
  });
}

template <bool kLog>
void run_backward(KernelContext& context, const char* name, DType dtype,
                  std::int64_t rows, std::int64_t cols, const void* y,
                  const void* dy, void* dx) {
  with_floating(name, dtype, [&](auto zero) {
    using T = decltype(zero);
    with_row_shape<T>(
        cols, is_aligned(kVectorBytes, y, dy, dx), [&](auto shape) {
          using Shape = decltype(shape);
          launch(context, name, Shape::grid(rows), Shape::kBlockThreads,
                 softmax_gradients<T, Shape, kLog>, rows, cols, y, dy, dx);
        });
  });
}

}  // namespace

void softmax(KernelContext& context, DType dtype, std::int64_t rows,
             std::int64_t cols, const void* x, void* y) {
  run_softmax<false>(context, "softmax", dtype, rows, cols, x, y);
}

void softmax_backward(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx) {
  run_backward<false>(context, "softmax_backward", dtype, rows, cols, y, dy,
                      dx);
}

void log_softmax(KernelContext& context, DType dtype, std::int64_t rows,
                 std::int64_t cols, const void* x, void* y) {
  run_softmax<true>(context, "log_softmax", dtype, rows, cols, x, y);
}

void log_softmax_backward(KernelContext& context, DType dtype,
                          std::int64_t rows, std::int64_t cols, const void* y,
                          const void* dy, void* dx) {
  run_backward<true>(context, "log_softmax_backward", dtype, rows, cols, y, dy,
                     dx);
}

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

void cross_entropy_backward(KernelContext& context, DType dtype,
                            std::int64_t rows, std::int64_t cols,
                            const void* logits, const std::int64_t* targets,
                            const void* logsumexp, const void* dloss, bool mean,
                            void* dlogits) {
  with_floating("cross_entropy_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    Scratch factor(context, sizeof(S));
    with_one_block(rows, [&](auto threads) {
      launch(context, "cross_entropy_backward", 1, threads(),
             loss_factor<S, threads()>, rows, targets, dloss, mean,
             factor.data());
    });
    const auto run = [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, "cross_entropy_backward", Shape::grid(rows),
             Shape::kBlockThreads, cross_entropy_gradients<T, Shape>, rows,
             cols, logits, targets, logsumexp, factor.data(), dlogits,
             cuda_state(context).error);
    };
    // Rows of both arrays meet whole vectors at the same elements, or never.
    const auto distance = reinterpret_cast<std::uintptr_t>(logits) -
                          reinterpret_cast<std::uintptr_t>(dlogits);
    if (distance % kVectorBytes == 0) {
      with_walk<kLanes<T>>(cols, run);
    } else {
      with_walk<1>(cols, run);
    }
  });
}

SHARDBOOK_CUDA_KERNEL(softmax);
SHARDBOOK_CUDA_KERNEL(softmax_backward);
SHARDBOOK_CUDA_KERNEL(log_softmax);
SHARDBOOK_CUDA_KERNEL(log_softmax_backward);
SHARDBOOK_CUDA_KERNEL(cross_entropy);
SHARDBOOK_CUDA_KERNEL(reduce_losses);
SHARDBOOK_CUDA_KERNEL(cross_entropy_backward);

}  // namespace shardbook::kernels::cuda
