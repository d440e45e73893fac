// One thread per channel: a layer has at most a few thousand.

#include "core/kernels/batch_norm.h"

#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

namespace {

__global__ void shift_squares_kernel(std::int64_t channels, const double* local,
                                     const double* mean, double* squares) {
  const double count = local[channels];
  for (std::int64_t c = first_index(); c < channels; c += index_step()) {
    const double shift = local[c] / count - mean[c];
    squares[c] += count * shift * shift;
  }
}

__global__ void rstd_kernel(std::int64_t channels, const double* variance,
                            double eps, double* rstd) {
  for (std::int64_t c = first_index(); c < channels; c += index_step()) {
    rstd[c] = 1.0 / sqrt(variance[c] + eps);
  }
}

template <typename T>
__device__ T rounded(double x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return narrow<T>(static_cast<float>(x));
  }
}

template <typename T>
__global__ void blend_kernel(std::int64_t channels, double keep, double share,
                             const double* now, T* running) {
  for (std::int64_t c = first_index(); c < channels; c += index_step()) {
    running[c] = rounded<T>(keep * as_double(running[c]) + share * now[c]);
  }
}

}  // namespace

void channel_shift_squares(KernelContext& context, std::int64_t channels,
                           const double* local, const double* mean,
                           double* squares) {
  launch(context, "channel_shift_squares", blocks_for(channels), kBlock,
         shift_squares_kernel, channels, local, mean, squares);
}

void channel_rstd(KernelContext& context, std::int64_t channels,
                  const double* variance, double eps, double* rstd) {
  launch(context, "channel_rstd", blocks_for(channels), kBlock, rstd_kernel,
         channels, variance, eps, rstd);
}

void channel_blend(KernelContext& context, DType dtype, std::int64_t channels,
                   double keep, double share, const double* now,
                   void* running) {
  with_floating("channel_blend", dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(context, "channel_blend", blocks_for(channels), kBlock,
           blend_kernel<T>, channels, keep, share, now,
           static_cast<T*>(running));
  });
}

SHARDBOOK_CUDA_KERNEL(channel_shift_squares);
SHARDBOOK_CUDA_KERNEL(channel_rstd);
SHARDBOOK_CUDA_KERNEL(channel_blend);

}  // namespace shardbook::kernels::cuda
