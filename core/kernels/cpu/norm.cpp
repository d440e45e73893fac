#include "core/kernels/norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

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

template <typename T>
struct RmsNormRow {
  using S = Compute<T>;
  using V = VecOf<T>;

  static void forward(std::int64_t cols, S eps, const T* x, const T* weight,
                      T* y, S* rstd) {
    *rstd = S(1) / std::sqrt(dot_row(x, x, cols) / static_cast<S>(cols) + eps);
    const V factor(*rstd);
    for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
      const V xhat = rounded<T>(load_up_to(x + i, size) * factor);
      store_up_to(y + i, xhat * load_up_to(weight + i, size), size);
    });
  }

  // Adds to dweight; writes dx unless it is null.
  static void backward(std::int64_t cols, const T* x, const T* weight, S rstd,
                       const T* dy, T* dx, S* dweight) {
    const V factor(rstd);
    V sum(S(0));
    for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
      const V xhat = load_up_to(x + i, size) * factor;
      const V g = load_up_to(dy + i, size);
      sum = xsimd::fma(g * load_up_to(weight + i, size), xhat, sum);
      // The partial sums are padded to whole vectors.
      store(dweight + i, xsimd::fma(g, rounded<T>(xhat), load(dweight + i)));
    });
    if (dx == nullptr) return;

    const V slope(sum_lanes(sum) / static_cast<S>(cols));
    for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
      const V xhat = load_up_to(x + i, size) * factor;
      const V g = load_up_to(dy + i, size) * load_up_to(weight + i, size);
      store_up_to(dx + i, factor * (g - xhat * slope), size);
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

// Calls add_row(r, sums) for all rows; it adds to kOuts arrays of sums, each
// padded to whole vectors. Then each out [cols], unless it is null, becomes the
// sum over all rows.
template <typename T, std::size_t kOuts, typename AddRow>
void sum_over_rows(KernelContext& context, std::int64_t rows, std::int64_t cols,
                   const std::array<void*, kOuts>& outs,
                   const AddRow& add_row) {
  using S = Compute<T>;
  const std::int64_t padded = (cols + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  const std::int64_t stride = static_cast<std::int64_t>(kOuts) * padded;
  const std::int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  Scratch scratch(context,
                  std::max<std::int64_t>(blocks, 1) * stride * sizeof(S));
  S* const partials = scratch.as<S>();
  parallel_for(0, blocks, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t block = from; block < to; ++block) {
      std::array<S*, kOuts> sums;
      for (std::size_t i = 0; i < kOuts; ++i) {
        sums[i] = partials + block * stride + i * padded;
      }
      std::fill(sums[0], sums[0] + stride, S(0));
      const std::int64_t end = std::min(rows, (block + 1) * kRowBlock);
      for (std::int64_t r = block * kRowBlock; r < end; ++r) add_row(r, sums);
    }
  });
  for (std::size_t i = 0; i < kOuts; ++i) {
    if (outs[i] == nullptr) continue;
    add_partials<T>(partials + i * padded, blocks, stride, cols,
                    static_cast<T*>(outs[i]));
  }
}

// Row r of a matrix that may be missing.
template <typename T>
T* row_of(void* x, std::int64_t r, std::int64_t cols) {
  return x == nullptr ? nullptr : static_cast<T*>(x) + r * cols;
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
    sum_over_rows<T, 2>(context, rows, cols, {dgamma, dbeta},
                        [&](std::int64_t r, const std::array<S*, 2>& sums) {
                          LayerNormRow<T>::backward(
                              cols, static_cast<const T*>(x) + r * cols,
                              static_cast<const T*>(gamma),
                              static_cast<const S*>(mean)[r],
                              static_cast<const S*>(rstd)[r],
                              static_cast<const T*>(dy) + r * cols,
                              row_of<T>(dx, r, cols), sums[0], sums[1]);
                        });
  });
}

void rms_norm(KernelContext&, DType dtype, std::int64_t rows, std::int64_t cols,
              double eps, const void* x, const void* weight, void* y,
              void* rstd) {
  SB_CHECK(cols >= 1, "rms_norm: rows of ", cols, " elements; at least 1");
  dispatch_floating("rms_norm", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      RmsNormRow<T>::forward(
          cols, static_cast<S>(eps), static_cast<const T*>(x) + r * cols,
          static_cast<const T*>(weight), static_cast<T*>(y) + r * cols,
          static_cast<S*>(rstd) + r);
    });
  });
}

void rms_norm_backward(KernelContext& context, DType dtype, std::int64_t rows,
                       std::int64_t cols, const void* x, const void* weight,
                       const void* rstd, const void* dy, void* dx,
                       void* dweight) {
  dispatch_floating("rms_norm_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    sum_over_rows<T, 1>(context, rows, cols, {dweight},
                        [&](std::int64_t r, const std::array<S*, 1>& sums) {
                          RmsNormRow<T>::backward(
                              cols, static_cast<const T*>(x) + r * cols,
                              static_cast<const T*>(weight),
                              static_cast<const S*>(rstd)[r],
                              static_cast<const T*>(dy) + r * cols,
                              row_of<T>(dx, r, cols), sums[0]);
                        });
  });
}

}  // namespace shardbook::kernels::cpu
