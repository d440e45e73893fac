#include "core/kernels/norm.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"

namespace shardbook::kernels::cpu {

namespace {

template <typename T>
struct LayerNormRow {
  using S = Compute<T>;
  using V = VecOf<T>;

  static void forward(std::int64_t cols, S eps, const T* x, const T* gamma,
                      const T* beta, T* y, S* mean, S* rstd) {
    const S count = static_cast<S>(cols);
    *mean = sum_row(x, cols) / count;
    const V center(*mean);
    const S squares =
        sum_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
          const V d = load_up_to(x + i, size, *mean) - center;
          return d * d;
        });
    *rstd = S(1) / std::sqrt(squares / count + eps);
    const V factor(*rstd);
    const auto vectors = [&](std::int64_t i, std::int64_t size) {
      V v = (load_up_to(x + i, size) - center) * factor;
      if (gamma != nullptr) v = v * load_up_to(gamma + i, size);
      if (beta != nullptr) v = v + load_up_to(beta + i, size);
      store_up_to(y + i, v, size);
    };
    std::int64_t i = 0;
    for (; i + kLanes<T> <= cols; i += kLanes<T>) vectors(i, kLanes<T>);
    if (i < cols) vectors(i, cols - i);
  }

  // Adds to dgamma and dbeta; writes dx unless it is null.
  static void backward(std::int64_t cols, const T* x, const T* gamma, S mean,
                       S rstd, const T* dy, T* dx, S* dgamma, S* dbeta) {
    const V center(mean), factor(rstd);
    V sum(S(0)), sum_xhat(S(0));
    const auto gather = [&](std::int64_t i, std::int64_t size) {
      const V xhat = (load_up_to(x + i, size, mean) - center) * factor;
      const V g = load_up_to(dy + i, size);
      const V scaled = gamma == nullptr ? g : g * load_up_to(gamma + i, size);
      sum = sum + scaled;
      sum_xhat = xsimd::fma(scaled, xhat, sum_xhat);
      // The partial sums are padded to whole vectors.
      store(dgamma + i, xsimd::fma(g, xhat, load(dgamma + i)));
      store(dbeta + i, g + load(dbeta + i));
    };
    std::int64_t i = 0;
    for (; i + kLanes<T> <= cols; i += kLanes<T>) gather(i, kLanes<T>);
    if (i < cols) gather(i, cols - i);
    if (dx == nullptr) return;

    const S count = static_cast<S>(cols);
    const V shift(sum_lanes(sum) / count), slope(sum_lanes(sum_xhat) / count);
    const auto spread = [&](std::int64_t i, std::int64_t size) {
      const V xhat = (load_up_to(x + i, size, mean) - center) * factor;
      V g = load_up_to(dy + i, size);
      if (gamma != nullptr) g = g * load_up_to(gamma + i, size);
      store_up_to(dx + i, factor * (g - shift - xhat * slope), size);
    };
    for (i = 0; i + kLanes<T> <= cols; i += kLanes<T>) spread(i, kLanes<T>);
    if (i < cols) spread(i, cols - i);
  }
};

// Adds the partial sums of the blocks, in order.
template <typename T>
void add_partials(const Compute<T>* partials, std::int64_t blocks,
                  std::int64_t block_stride, std::int64_t cols, T* out,
                  bool accumulate) {
  for (std::int64_t c = 0; c < cols; ++c) {
    Compute<T> sum(0);
    for (std::int64_t b = 0; b < blocks; ++b) {
      sum += partials[b * block_stride + c];
    }
    out[c] = narrow<T>(accumulate ? widen(out[c]) + sum : sum);
  }
}

// Sum of fn(i) over [0, n) in f64, as a fixed number of interleaved sums that
// the compiler makes vectors of.
template <typename Fn>
double sum_f64(std::int64_t n, const Fn& fn) {
  constexpr std::int64_t kSums = 16;
  double sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (std::int64_t j = 0; j < kSums; ++j) sums[j] += fn(i + j);
  }
  for (; i < n; ++i) sums[i % kSums] += fn(i);
  double sum = 0.0;
  for (const double s : sums) sum += s;
  return sum;
}

// Up to two sums per channel of fn(offset, c); fn returns the terms.
template <typename Fn>
void channel_reduce(const ChannelShape& shape, double* first, double* second,
                    const Fn& fn) {
  const std::int64_t channels = shape.channels, inner = shape.inner;
  const auto run = [&](std::int64_t from, std::int64_t to) {
    std::fill(first + from, first + to, 0.0);
    if (second != nullptr) std::fill(second + from, second + to, 0.0);
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t c = from; c < to; ++c) {
        const std::int64_t at = (b * channels + c) * inner;
        first[c] +=
            sum_f64(inner, [&](std::int64_t i) { return fn(at + i, c).first; });
        if (second != nullptr) {
          second[c] += sum_f64(
              inner, [&](std::int64_t i) { return fn(at + i, c).second; });
        }
      }
    }
  };
  const auto run_flat = [&](std::int64_t from, std::int64_t to) {
    std::fill(first + from, first + to, 0.0);
    if (second != nullptr) std::fill(second + from, second + to, 0.0);
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t c = from; c < to; ++c) {
        const auto terms = fn(b * channels + c, c);
        first[c] += terms.first;
        if (second != nullptr) second[c] += terms.second;
      }
    }
  };
  const std::int64_t grain = row_grain(shape.batch * inner);
  if (inner == 1) {
    parallel_for(0, channels, std::max<std::int64_t>(grain, 16), run_flat);
  } else {
    parallel_for(0, channels, grain, run);
  }
}

struct Terms {
  double first;
  double second;
};

// Runs fn(offset, size, c) on stretches of one channel.
template <typename Fn>
void for_channels(const ChannelShape& shape, const Fn& fn) {
  parallel_for(0, shape.batch * shape.channels, row_grain(shape.inner),
               [&](std::int64_t from, std::int64_t to) {
                 std::int64_t c = from % shape.channels;
                 for (std::int64_t row = from; row < to; ++row) {
                   fn(row * shape.inner, c);
                   if (++c == shape.channels) c = 0;
                 }
               });
}

}  // namespace

void layer_norm(KernelContext&, DType dtype, std::int64_t rows,
                std::int64_t cols, double eps, const void* x, const void* gamma,
                const void* beta, void* y, void* mean, void* rstd) {
  SB_CHECK(cols >= 1, "layer_norm: rows of ", cols, " elements; at least 1");
  dispatch_floating("layer_norm", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    parallel_for(
        0, rows, row_grain(cols), [&](std::int64_t from, std::int64_t to) {
          for (std::int64_t r = from; r < to; ++r) {
            LayerNormRow<T>::forward(
                cols, static_cast<S>(eps), static_cast<const T*>(x) + r * cols,
                static_cast<const T*>(gamma), static_cast<const T*>(beta),
                static_cast<T*>(y) + r * cols, static_cast<S*>(mean) + r,
                static_cast<S*>(rstd) + r);
          }
        });
  });
}

void layer_norm_backward(KernelContext& context, DType dtype, std::int64_t rows,
                         std::int64_t cols, const void* x, const void* gamma,
                         const void* mean, const void* rstd, const void* dy,
                         void* dx, void* dgamma, void* dbeta, bool accumulate) {
  SB_CHECK(cols >= 1, "layer_norm_backward: rows of ", cols,
           " elements; at least 1");
  dispatch_floating("layer_norm_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const std::int64_t padded = (cols + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
    const std::int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
    Scratch scratch(context,
                    std::max<std::int64_t>(blocks, 1) * 2 * padded * sizeof(S));
    S* const partials = scratch.as<S>();
    parallel_for(0, blocks, 1, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t block = from; block < to; ++block) {
        S* const mine = partials + block * 2 * padded;
        std::fill(mine, mine + 2 * padded, S(0));
        const std::int64_t end = std::min(rows, (block + 1) * kRowBlock);
        for (std::int64_t r = block * kRowBlock; r < end; ++r) {
          LayerNormRow<T>::backward(
              cols, static_cast<const T*>(x) + r * cols,
              static_cast<const T*>(gamma), static_cast<const S*>(mean)[r],
              static_cast<const S*>(rstd)[r],
              static_cast<const T*>(dy) + r * cols,
              dx == nullptr ? nullptr : static_cast<T*>(dx) + r * cols, mine,
              mine + padded);
        }
      }
    });
    if (dgamma != nullptr) {
      add_partials<T>(partials, blocks, 2 * padded, cols,
                      static_cast<T*>(dgamma), accumulate);
    }
    if (dbeta != nullptr) {
      add_partials<T>(partials + padded, blocks, 2 * padded, cols,
                      static_cast<T*>(dbeta), accumulate);
    }
  });
}

void channel_sums(KernelContext&, DType dtype, const ChannelShape& shape,
                  const void* x, double* sums) {
  dispatch_floating("channel_sums", dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* in = static_cast<const T*>(x);
    channel_reduce(shape, sums, nullptr, [in](std::int64_t i, std::int64_t) {
      return Terms{static_cast<double>(widen(in[i])), 0.0};
    });
  });
}

void channel_centered_squares(KernelContext&, DType dtype,
                              const ChannelShape& shape, const void* x,
                              const double* mean, double* sums) {
  dispatch_floating("channel_centered_squares", dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* in = static_cast<const T*>(x);
    channel_reduce(shape, sums, nullptr,
                   [in, mean](std::int64_t i, std::int64_t c) {
                     const double d = widen(in[i]) - mean[c];
                     return Terms{d * d, 0.0};
                   });
  });
}

void channel_normalize(KernelContext&, DType dtype, const ChannelShape& shape,
                       const void* x, const double* mean, const double* rstd,
                       const void* gamma, const void* beta, void* y) {
  dispatch_floating("channel_normalize", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const T* scales = static_cast<const T*>(gamma);
    const T* shifts = static_cast<const T*>(beta);
    for_channels(shape, [&](std::int64_t at, std::int64_t c) {
      const S factor = static_cast<S>(
          rstd[c] * (scales == nullptr ? 1.0 : widen(scales[c])));
      const S center = static_cast<S>(mean[c]);
      const S shift = shifts == nullptr ? S(0) : widen(shifts[c]);
      if (shape.inner == 1) {
        out[at] = narrow<T>((widen(in[at]) - center) * factor + shift);
        return;
      }
      map_range(shape.inner, in + at, out + at, [&](const V& v) {
        return xsimd::fma(v - V(center), V(factor), V(shift));
      });
    });
  });
}

void channel_backward_sums(KernelContext&, DType dtype,
                           const ChannelShape& shape, const void* x,
                           const void* dy, const double* mean,
                           const double* rstd, double* sum_dy,
                           double* sum_dy_xhat) {
  dispatch_floating("channel_backward_sums", dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* in = static_cast<const T*>(x);
    const T* grad = static_cast<const T*>(dy);
    channel_reduce(shape, sum_dy, sum_dy_xhat,
                   [=](std::int64_t i, std::int64_t c) {
                     const double g = widen(grad[i]);
                     return Terms{g, g * (widen(in[i]) - mean[c]) * rstd[c]};
                   });
  });
}

void channel_backward(KernelContext&, DType dtype, const ChannelShape& shape,
                      const void* x, const void* dy, const double* mean,
                      const double* rstd, const void* gamma,
                      const double* sum_dy, const double* sum_dy_xhat,
                      double count, void* dx) {
  dispatch_floating("channel_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    const T* in = static_cast<const T*>(x);
    const T* grad = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const T* scales = static_cast<const T*>(gamma);
    for_channels(shape, [&](std::int64_t at, std::int64_t c) {
      // dx = factor * (dy - shift - (x - center) * slope)
      const S factor = static_cast<S>(
          rstd[c] * (scales == nullptr ? 1.0 : widen(scales[c])));
      const S center = static_cast<S>(mean[c]);
      const S shift = static_cast<S>(sum_dy[c] / count);
      const S slope = static_cast<S>(rstd[c] * sum_dy_xhat[c] / count);
      if (shape.inner == 1) {
        out[at] = narrow<T>(factor * (widen(grad[at]) - shift -
                                      (widen(in[at]) - center) * slope));
        return;
      }
      map_range(shape.inner, in + at, grad + at, out + at,
                [&](const V& v, const V& g) {
                  return V(factor) *
                         (g - V(shift) - (v - V(center)) * V(slope));
                });
    });
  });
}

}  // namespace shardbook::kernels::cpu
