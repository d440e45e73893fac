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
    for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
      const V xhat = (load_up_to(x + i, size) - center) * factor;
      const V v = xhat * load_up_to(gamma + i, size);
      store_up_to(y + i, v + load_up_to(beta + i, size), size);
    });
  }

  // Adds to dgamma and dbeta; writes dx unless it is null.
  static void backward(std::int64_t cols, const T* x, const T* gamma, S mean,
                       S rstd, const T* dy, T* dx, S* dgamma, S* dbeta) {
    const V center(mean), factor(rstd);
    V sum(S(0)), sum_xhat(S(0));
    for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
      const V xhat = (load_up_to(x + i, size, mean) - center) * factor;
      const V g = load_up_to(dy + i, size);
      const V scaled = g * load_up_to(gamma + i, size);
      sum = sum + scaled;
      sum_xhat = xsimd::fma(scaled, xhat, sum_xhat);
      // The partial sums are padded to whole vectors.
      store(dgamma + i, xsimd::fma(g, xhat, load(dgamma + i)));
      store(dbeta + i, g + load(dbeta + i));
    });
    if (dx == nullptr) return;

    const S count = static_cast<S>(cols);
    const V shift(sum_lanes(sum) / count), slope(sum_lanes(sum_xhat) / count);
    for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
      const V xhat = (load_up_to(x + i, size, mean) - center) * factor;
      const V g = load_up_to(dy + i, size) * load_up_to(gamma + i, size);
      store_up_to(dx + i, factor * (g - shift - xhat * slope), size);
    });
  }
};

// Adds the partial sums of the blocks, in order.
template <typename T>
void add_partials(const Compute<T>* partials, std::int64_t blocks,
                  std::int64_t block_stride, std::int64_t cols, T* out) {
  for (std::int64_t c = 0; c < cols; ++c) {
    Compute<T> sum(0);
    for (std::int64_t b = 0; b < blocks; ++b) {
      sum += partials[b * block_stride + c];
    }
    out[c] = narrow<T>(sum);
  }
}

}  // namespace

void layer_norm(KernelContext&, DType dtype, std::int64_t rows,
                std::int64_t cols, double eps, const void* x, const void* gamma,
                const void* beta, void* y, void* mean, void* rstd) {
  SB_CHECK(cols >= 1, "layer_norm: rows of ", cols, " elements; at least 1");
  dispatch_floating("layer_norm", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      LayerNormRow<T>::forward(
          cols, static_cast<S>(eps), static_cast<const T*>(x) + r * cols,
          static_cast<const T*>(gamma), static_cast<const T*>(beta),
          static_cast<T*>(y) + r * cols, static_cast<S*>(mean) + r,
          static_cast<S*>(rstd) + r);
    });
  });
}

void layer_norm_backward(KernelContext& context, DType dtype, std::int64_t rows,
                         std::int64_t cols, const void* x, const void* gamma,
                         const void* mean, const void* rstd, const void* dy,
                         void* dx, void* dgamma, void* dbeta) {
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
    if (dgamma == nullptr) return;
    add_partials<T>(partials, blocks, 2 * padded, cols,
                    static_cast<T*>(dgamma));
    add_partials<T>(partials + padded, blocks, 2 * padded, cols,
                    static_cast<T*>(dbeta));
  });
}

}  // namespace shardbook::kernels::cpu
