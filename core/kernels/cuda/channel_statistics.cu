// A layer has at most a few thousand channels.

#include "core/kernels/batch_norm.h"

#include "core/kernels/cuda/map.h"

namespace shardbook::kernels::cuda {

namespace {

struct ShiftSquares {
  const double* count;
  __device__ double operator()(double local, double mean,
                               double squares) const {
    const double shift = local / *count - mean;
    return squares + *count * shift * shift;
  }
};

struct Rstd {
  double eps;
  __device__ double operator()(double variance) const {
    return 1.0 / sqrt(variance + eps);
  }
};

template <typename T>
struct Blend {
  double keep, share;
  __device__ T operator()(T running, double now) const {
    const double x = keep * as_double(running) + share * now;
    if constexpr (std::is_same_v<T, double>) {
      return x;
    } else {
      return narrow<T>(static_cast<float>(x));
    }
  }
};

}  // namespace

void channel_shift_squares(KernelContext& context, std::int64_t channels,
                           const double* local, const double* mean,
                           double* squares) {
  map<double>(context, "channel_shift_squares", channels,
              ShiftSquares{local + channels}, squares, local, mean, squares);
}

void channel_rstd(KernelContext& context, std::int64_t channels,
                  const double* variance, double eps, double* rstd) {
  map<double>(context, "channel_rstd", channels, Rstd{eps}, rstd, variance);
}

void channel_blend(KernelContext& context, DType dtype, std::int64_t channels,
                   double keep, double share, const double* now,
                   void* running) {
  with_floating("channel_blend", dtype, [&](auto zero) {
    using T = decltype(zero);
    map_arrays(context, "channel_blend", channels, Blend<T>{keep, share},
               static_cast<T*>(running), static_cast<const T*>(running), now);
  });
}

SHARDBOOK_CUDA_KERNEL(channel_shift_squares);
SHARDBOOK_CUDA_KERNEL(channel_rstd);
SHARDBOOK_CUDA_KERNEL(channel_blend);

}  // namespace shardbook::kernels::cuda
