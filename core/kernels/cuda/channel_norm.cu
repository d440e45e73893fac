// The pieces of batch normalisation on [batch, channels, inner]: images with
// the channels before the pixels. batch_norm.cu has [rows, channels].
//
// Statistics add in f64, in two stages: each of a channel's kSplits blocks adds
// a share of its elements, then one warp adds the shares of a channel.

#include <cmath>

#include "core/kernels/cuda/reduce_block.h"
#include "core/kernels/norm.h"

namespace shardbook::kernels::cuda {

namespace {

constexpr std::int64_t kSplits = 32;

struct Terms {
  double first, second;
};

/// The terms of channel_sums: of one element at `i` in channel `c`.
template <typename T>
struct Values {
  const T* x;
  __device__ Terms operator()(std::int64_t i, std::int64_t) const {
    return {static_cast<double>(widen(x[i])), 0.0};
  }
};

template <typename T>
struct CenteredSquares {
  const T* x;
  const double* mean;
  __device__ Terms operator()(std::int64_t i, std::int64_t c) const {
    const double d = widen(x[i]) - mean[c];
    return {d * d, 0.0};
  }
};

template <typename T>
struct ChannelGradientTerms {
  const T* x;
  const T* dy;
  const double* mean;
  const double* rstd;
  __device__ Terms operator()(std::int64_t i, std::int64_t c) const {
    const double g = widen(dy[i]);
    return {g, g * (widen(x[i]) - mean[c]) * rstd[c]};
  }
};

/// Block (split, c): partials [channels, kSplits, 2].
template <typename Fn>
__global__ void channel_partials(ChannelShape shape, Fn terms,
                                 double* partials) {
  __shared__ SharedArray<double, 32> parts;
  const std::int64_t c = blockIdx.y + std::int64_t{blockIdx.z} * gridDim.y;
  if (c >= shape.channels) return;
  const std::int64_t n = shape.batch * shape.inner;
  double first = 0.0, second = 0.0;
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const std::int64_t image = i / shape.inner;
    const Terms t =
        terms(i + (image * (shape.channels - 1) + c) * shape.inner, c);
    first += t.first;
    second += t.second;
  }
  first = join_block<kBlock>(first, Sum(), parts);
  second = join_block<kBlock>(second, Sum(), parts);
  if (threadIdx.x == 0) {
    double* const mine = partials + (c * kSplits + blockIdx.x) * 2;
    mine[0] = first;
    mine[1] = second;
  }
}

/// A warp for a channel; `second` may be null.
__global__ void channel_totals(std::int64_t channels, std::int64_t splits,
                               const double* partials, double* first,
                               double* second) {
  const std::int64_t c = first_index() / kWarp;
  if (c >= channels) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const double* const mine = partials + (c * kSplits + lane) * 2;
  const double a = join_lanes(lane < splits ? mine[0] : 0.0, Sum());
  const double b = join_lanes(lane < splits ? mine[1] : 0.0, Sum());
  if (lane != 0) return;
  first[c] = a;
  if (second != nullptr) second[c] = b;
}

template <typename Fn>
void channel_reduce(KernelContext& context, const char* name,
                    const ChannelShape& shape, Fn terms, double* first,
                    double* second) {
  static_assert(kSplits == kWarp, "a thread for each share");
  const std::int64_t channels = shape.channels;
  const std::int64_t n = shape.batch * shape.inner;
  // A thread adds at least 8 elements
  const std::int64_t splits = std::min(kSplits, ceil_div(n, 8 * kBlock));
  constexpr std::int64_t kMostY = 32768;
  Scratch scratch(context, channels * kSplits * 2 * sizeof(double));
  launch(context, name,
         dim3(blocks_of(splits), blocks_of(std::min(channels, kMostY)),
              blocks_of(channels, kMostY)),
         kBlock, channel_partials<Fn>, shape, terms, scratch.data());
  launch(context, name, blocks_of(channels, kBlock / kWarp), kBlock,
         channel_totals, channels, splits, scratch.data(), first, second);
}

/// y = (x - center) * factor + shift, with the numbers of the element's channel.
template <typename T>
__global__ void normalize_channels(ChannelShape shape, const T* x,
                                   const double* mean, const double* rstd,
                                   const T* gamma, const T* beta, T* y) {
  using S = Compute<T>;
  const std::int64_t n = shape.batch * shape.channels * shape.inner;
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const std::int64_t c = i / shape.inner % shape.channels;
    const S factor =
        static_cast<S>(rstd[c] * (gamma == nullptr ? 1.0 : widen(gamma[c])));
    const S center = static_cast<S>(mean[c]);
    const S shift = beta == nullptr ? S(0) : widen(beta[c]);
    y[i] = narrow<T>(std::fma(widen(x[i]) - center, factor, shift));
  }
}

/// dx = factor * (dy - shift - (x - center) * slope)
template <typename T>
__global__ void channel_gradients(ChannelShape shape, const T* x, const T* dy,
                                  const double* mean, const double* rstd,
                                  const T* gamma, const double* sum_dy,
                                  const double* sum_dy_xhat, double count,
                                  T* dx) {
  using S = Compute<T>;
  const std::int64_t n = shape.batch * shape.channels * shape.inner;
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const std::int64_t c = i / shape.inner % shape.channels;
    const S factor =
        static_cast<S>(rstd[c] * (gamma == nullptr ? 1.0 : widen(gamma[c])));
    const S center = static_cast<S>(mean[c]);
    const S shift = static_cast<S>(sum_dy[c] / count);
    const S slope = static_cast<S>(rstd[c] * sum_dy_xhat[c] / count);
    dx[i] = narrow<T>(factor *
                      (widen(dy[i]) - shift - (widen(x[i]) - center) * slope));
  }
}

}  // namespace

void channel_sums(KernelContext& context, DType dtype,
                  const ChannelShape& shape, const void* x, double* sums) {
  with_floating("channel_sums", dtype, [&](auto zero) {
    using T = decltype(zero);
    channel_reduce(context, "channel_sums", shape,
                   Values<T>{static_cast<const T*>(x)}, sums, nullptr);
  });
}

void channel_centered_squares(KernelContext& context, DType dtype,
                              const ChannelShape& shape, const void* x,
                              const double* mean, double* sums) {
  with_floating("channel_centered_squares", dtype, [&](auto zero) {
    using T = decltype(zero);
    channel_reduce(context, "channel_centered_squares", shape,
                   CenteredSquares<T>{static_cast<const T*>(x), mean}, sums,
                   nullptr);
  });
}

void channel_normalize(KernelContext& context, DType dtype,
                       const ChannelShape& shape, const void* x,
                       const double* mean, const double* rstd,
                       const void* gamma, const void* beta, void* y) {
  with_floating("channel_normalize", dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t n = shape.batch * shape.channels * shape.inner;
    launch(context, "channel_normalize", blocks_for(n), kBlock,
           normalize_channels<T>, shape, x, mean, rstd, gamma, beta, y);
  });
}

void channel_backward_sums(KernelContext& context, DType dtype,
                           const ChannelShape& shape, const void* x,
                           const void* dy, const double* mean,
                           const double* rstd, double* sum_dy,
                           double* sum_dy_xhat) {
  with_floating("channel_backward_sums", dtype, [&](auto zero) {
    using T = decltype(zero);
    channel_reduce(
        context, "channel_backward_sums", shape,
        ChannelGradientTerms<T>{static_cast<const T*>(x),
                                static_cast<const T*>(dy), mean, rstd},
        sum_dy, sum_dy_xhat);
  });
}

void channel_backward(KernelContext& context, DType dtype,
                      const ChannelShape& shape, const void* x, const void* dy,
                      const double* mean, const double* rstd, const void* gamma,
                      const double* sum_dy, const double* sum_dy_xhat,
                      double count, void* dx) {
  with_floating("channel_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t n = shape.batch * shape.channels * shape.inner;
    launch(context, "channel_backward", blocks_for(n), kBlock,
           channel_gradients<T>, shape, x, dy, mean, rstd, gamma, sum_dy,
           sum_dy_xhat, count, dx);
  });
}

SHARDBOOK_CUDA_KERNEL(channel_sums);
SHARDBOOK_CUDA_KERNEL(channel_centered_squares);
SHARDBOOK_CUDA_KERNEL(channel_normalize);
SHARDBOOK_CUDA_KERNEL(channel_backward_sums);
SHARDBOOK_CUDA_KERNEL(channel_backward);

}  // namespace shardbook::kernels::cuda
