// Pooling. A thread makes one vector of channels of one pixel: of the output on
// the way forward, of the input on the way back, where it gathers from the
// windows that cover its pixel, in order.

#include "core/kernels/pool.h"

#include <limits>

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

namespace {

/// A pixel of [n, height, width, channels] and a vector of its channels.
struct Pixel {
  std::int64_t image, y, x, channel;
  __device__ Pixel(std::int64_t i, std::int64_t height, std::int64_t width,
                   std::int64_t vectors, int lanes) {
    const std::int64_t pixel = i / vectors, row = pixel / width;
    channel = (i - pixel * vectors) * lanes;
    x = pixel - row * width;
    image = row / height;
    y = row - image * height;
  }
};

template <typename T, int kWidth>
__global__ void largest_of_windows(PoolShape s, std::int64_t n, const T* x,
                                   T* y, std::int32_t* taps) {
  using S = Compute<T>;
  const std::int64_t oh = s.out_h(), ow = s.out_w();
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const Pixel p(i, oh, ow, s.c / kWidth, kWidth);
    const std::int64_t y0 = p.y * s.stride - s.padding;
    const std::int64_t x0 = p.x * s.stride - s.padding;
    // Places of the window that lie inside the image
    const auto first_y = static_cast<int>(std::max(std::int64_t{0}, -y0));
    const auto last_y = static_cast<int>(std::min(s.size, s.h - y0));
    const auto first_x = static_cast<int>(std::max(std::int64_t{0}, -x0));
    const auto last_x = static_cast<int>(std::min(s.size, s.w - x0));
    const auto size = static_cast<int>(s.size);
    AlignedVector<T, kWidth> best;
    AlignedVector<std::int32_t, kWidth> tap;
    S most[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      most[j] = -std::numeric_limits<S>::infinity();
      tap[j] = first_y * size + first_x;
    }
    const T* const image = x + p.image * s.h * s.w * s.c + p.channel;
    for (int dy = first_y; dy < last_y; ++dy) {
      for (int dx = first_x; dx < last_x; ++dx) {
        const auto v =
            load_vector<kWidth>(image + ((y0 + dy) * s.w + x0 + dx) * s.c);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const S value = widen(v[j]);
          const bool wins = value > most[j] || value != value;
          most[j] = wins ? value : most[j];
          tap[j] = wins ? dy * size + dx : tap[j];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) best[j] = narrow<T>(most[j]);
    const std::int64_t at = i * kWidth;
    store_vector(y + at, best);
    store_vector(taps + at, tap);
  }
}

/// Windows that see place `at` of an image: [first, last) of `count`.
struct Windows {
  std::int64_t first, last;
  __device__ Windows(std::int64_t at, const PoolShape& s, std::int64_t count) {
    const std::int64_t before = at + s.padding - s.size;
    first = before < 0 ? 0 : before / s.stride + 1;
    last = std::min(count, (at + s.padding) / s.stride + 1);
  }
};

template <typename T, int kWidth>
__global__ void gather_windows(PoolShape s, std::int64_t n, const T* dy,
                               const std::int32_t* taps, T* dx) {
  using S = Compute<T>;
  const std::int64_t oh = s.out_h(), ow = s.out_w();
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const Pixel p(i, s.h, s.w, s.c / kWidth, kWidth);
    const Windows rows(p.y, s, oh), cols(p.x, s, ow);
    S sums[kWidth] = {};
    for (std::int64_t wy = rows.first; wy < rows.last; ++wy) {
      for (std::int64_t wx = cols.first; wx < cols.last; ++wx) {
        const std::int64_t at =
            ((p.image * oh + wy) * ow + wx) * s.c + p.channel;
        const auto tap = static_cast<std::int32_t>(
            (p.y + s.padding - wy * s.stride) * s.size +
            (p.x + s.padding - wx * s.stride));
        const auto g = load_vector<kWidth>(dy + at);
        const auto largest = load_vector<kWidth>(taps + at);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (largest[j] == tap) sums[j] += widen(g[j]);
        }
      }
    }
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = narrow<T>(sums[j]);
    store_vector(dx + i * kWidth, out);
  }
}

template <typename T, int kWidth>
__global__ void mean_of_pixels(std::int64_t n, std::int64_t pixels,
                               std::int64_t c, const T* x, T* y) {
  using S = Compute<T>;
  const std::int64_t vectors = c / kWidth;
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const std::int64_t image = i / vectors;
    const T* const first =
        x + image * pixels * c + (i - image * vectors) * kWidth;
    S sums[kWidth] = {};
#pragma unroll 4
    for (std::int64_t p = 0; p < pixels; ++p) {
      const auto v = load_vector<kWidth>(first + p * c);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[j] += widen(v[j]);
    }
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      out[j] = narrow<T>(sums[j] / static_cast<S>(pixels));
    }
    store_vector(y + i * kWidth, out);
  }
}

template <typename T, int kWidth>
__global__ void spread_over_pixels(std::int64_t n, std::int64_t pixels,
                                   std::int64_t c, const T* dy, T* dx) {
  using S = Compute<T>;
  const std::int64_t vectors = c / kWidth;
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    const std::int64_t pixel = i / vectors;
    const std::int64_t image = pixel / pixels;
    auto v =
        load_vector<kWidth>(dy + image * c + (i - pixel * vectors) * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      v[j] = narrow<T>(widen(v[j]) / static_cast<S>(pixels));
    }
    store_vector(dx + i * kWidth, v);
  }
}

/// The taps of one vector's channels are wider than kVectorBytes.
constexpr int kTapBytes = 32;

}  // namespace

void max_pool(KernelContext& context, DType dtype, const PoolShape& shape,
              const void* x, void* y, std::int32_t* taps) {
  with_floating("max_pool", dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned =
        is_aligned(kVectorBytes, x, y) && is_aligned(kTapBytes, taps);
    with_width<T>(shape.c, aligned, [&](auto width) {
      const std::int64_t n =
          shape.n * shape.out_h() * shape.out_w() * (shape.c / width());
      launch(context, "max_pool", blocks_for(n), kBlock,
             largest_of_windows<T, width()>, shape, n, x, y, taps);
    });
  });
}

void max_pool_backward(KernelContext& context, DType dtype,
                       const PoolShape& shape, const void* dy,
                       const std::int32_t* taps, void* dx) {
  with_floating("max_pool_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned =
        is_aligned(kVectorBytes, dy, dx) && is_aligned(kTapBytes, taps);
    with_width<T>(shape.c, aligned, [&](auto width) {
      const std::int64_t n = shape.n * shape.h * shape.w * (shape.c / width());
      launch(context, "max_pool_backward", blocks_for(n), kBlock,
             gather_windows<T, width()>, shape, n, dy, taps, dx);
    });
  });
}

void average_pixels(KernelContext& context, DType dtype, std::int64_t n,
                    std::int64_t pixels, std::int64_t c, const void* x,
                    void* y) {
  with_floating("average_pixels", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_width<T>(c, is_aligned(kVectorBytes, x, y), [&](auto width) {
      const std::int64_t vectors = n * (c / width());
      launch(context, "average_pixels", blocks_for(vectors), kBlock,
             mean_of_pixels<T, width()>, vectors, pixels, c, x, y);
    });
  });
}

void average_pixels_backward(KernelContext& context, DType dtype,
                             std::int64_t n, std::int64_t pixels,
                             std::int64_t c, const void* dy, void* dx) {
  with_floating("average_pixels_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_width<T>(c, is_aligned(kVectorBytes, dy, dx), [&](auto width) {
      const std::int64_t vectors = n * pixels * (c / width());
      launch(context, "average_pixels_backward", blocks_for(vectors), kBlock,
             spread_over_pixels<T, width()>, vectors, pixels, c, dy, dx);
    });
  });
}

SHARDBOOK_CUDA_KERNEL(max_pool);
SHARDBOOK_CUDA_KERNEL(max_pool_backward);
SHARDBOOK_CUDA_KERNEL(average_pixels);
SHARDBOOK_CUDA_KERNEL(average_pixels_backward);

}  // namespace shardbook::kernels::cuda
