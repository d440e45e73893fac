#include "core/kernels/pool.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/kernels/cpu/simd.h"

namespace shardbook::kernels::cpu {

namespace {

/// Places of a window that lie inside an image of `length`, for a window that
/// begins at `begin`.
struct Places {
  std::int64_t from, to;
};
Places places_inside(std::int64_t begin, std::int64_t size,
                     std::int64_t length) {
  return {std::max<std::int64_t>(0, -begin), std::min(size, length - begin)};
}

/// Windows that see place `at` of an image (from zero to `count`).
Places windows_over(std::int64_t at, const PoolShape& s, std::int64_t count) {
  const std::int64_t last = (at + s.padding) / s.stride;
  const std::int64_t before = at + s.padding - s.size;
  const std::int64_t first = before < 0 ? 0 : before / s.stride + 1;
  return {first, std::min(count, last + 1)};
}

// One output pixel, all channels.
template <typename T>
void largest(const PoolShape& s, const T* image, std::int64_t y0,
             std::int64_t x0, T* out, std::int32_t* taps, Compute<T>* best) {
  std::fill_n(best, s.c, -std::numeric_limits<Compute<T>>::infinity());
  const Places rows = places_inside(y0, s.size, s.h);
  const Places cols = places_inside(x0, s.size, s.w);
  std::fill_n(taps, s.c,
              static_cast<std::int32_t>(rows.from * s.size + cols.from));
  for (std::int64_t i = rows.from; i < rows.to; ++i) {
    for (std::int64_t j = cols.from; j < cols.to; ++j) {
      const T* pixel = image + ((y0 + i) * s.w + x0 + j) * s.c;
      const auto tap = static_cast<std::int32_t>(i * s.size + j);
      for (std::int64_t c = 0; c < s.c; ++c) {
        const Compute<T> v = widen(pixel[c]);
        const bool wins = v > best[c] || v != v;
        best[c] = wins ? v : best[c];
        taps[c] = wins ? tap : taps[c];
      }
    }
  }
  for (std::int64_t c = 0; c < s.c; ++c) out[c] = narrow<T>(best[c]);
}

}  // namespace

void max_pool(KernelContext&, DType dtype, const PoolShape& s, const void* x,
              void* y, std::int32_t* taps) {
  const std::int64_t oh = s.out_h(), ow = s.out_w();
  dispatch_floating("max_pool", dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(0, s.n * oh, row_grain(ow * s.c * s.size),
                 [&](std::int64_t from, std::int64_t to) {
                   std::vector<Compute<T>> best(s.c);
                   for (std::int64_t row = from; row < to; ++row) {
                     const T* image =
                         static_cast<const T*>(x) + row / oh * s.h * s.w * s.c;
                     for (std::int64_t ox = 0; ox < ow; ++ox) {
                       const std::int64_t at = (row * ow + ox) * s.c;
                       largest(s, image, row % oh * s.stride - s.padding,
                               ox * s.stride - s.padding,
                               static_cast<T*>(y) + at, taps + at, best.data());
                     }
                   }
                 });
  });
}

void max_pool_backward(KernelContext&, DType dtype, const PoolShape& s,
                       const void* dy, const std::int32_t* taps, void* dx) {
  const std::int64_t oh = s.out_h(), ow = s.out_w();
  dispatch_floating("max_pool_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* grad = static_cast<const T*>(dy);
    // Each pixel sums over the windows that cover it: nothing is written twice.
    // A few channels at a time keep their sums in registers.
    constexpr std::int64_t kChannels = 32;
    const auto pixel = [&](std::int64_t image, std::int64_t y, std::int64_t x,
                           std::int64_t first, std::int64_t size, T* out) {
      const Places rows = windows_over(y, s, oh), cols = windows_over(x, s, ow);
      Compute<T> sums[kChannels] = {};
      for (std::int64_t i = rows.from; i < rows.to; ++i) {
        for (std::int64_t j = cols.from; j < cols.to; ++j) {
          const std::int64_t at = ((image * oh + i) * ow + j) * s.c + first;
          const auto tap = static_cast<std::int32_t>(
              (y + s.padding - i * s.stride) * s.size +
              (x + s.padding - j * s.stride));
          const auto add = [&](std::int64_t c) {
            const Compute<T> g = widen(grad[at + c]);
            sums[c] += taps[at + c] == tap ? g : Compute<T>(0);
          };
          if (size == kChannels) {
            for (std::int64_t c = 0; c < kChannels; ++c) add(c);
          } else {
            for (std::int64_t c = 0; c < size; ++c) add(c);
          }
        }
      }
      for (std::int64_t c = 0; c < size; ++c) out[c] = narrow<T>(sums[c]);
    };
    for_rows(s.n * s.h * s.w, s.c, [&](std::int64_t at) {
      for (std::int64_t c = 0; c < s.c; c += kChannels) {
        pixel(at / s.w / s.h, at / s.w % s.h, at % s.w, c,
              std::min(kChannels, s.c - c), static_cast<T*>(dx) + at * s.c + c);
      }
    });
  });
}

void average_pixels(KernelContext&, DType dtype, std::int64_t n,
                    std::int64_t pixels, std::int64_t c, const void* x,
                    void* y) {
  dispatch_floating("average_pixels", dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(
        0, n, row_grain(pixels * c), [&](std::int64_t from, std::int64_t to) {
          std::vector<Compute<T>> sums(c);
          for (std::int64_t i = from; i < to; ++i) {
            std::fill(sums.begin(), sums.end(), Compute<T>(0));
            const T* image = static_cast<const T*>(x) + i * pixels * c;
            for (std::int64_t p = 0; p < pixels; ++p) {
              for (std::int64_t j = 0; j < c; ++j) {
                sums[j] += widen(image[p * c + j]);
              }
            }
            T* out = static_cast<T*>(y) + i * c;
            for (std::int64_t j = 0; j < c; ++j) {
              out[j] = narrow<T>(sums[j] / static_cast<Compute<T>>(pixels));
            }
          }
        });
  });
}

void average_pixels_backward(KernelContext&, DType dtype, std::int64_t n,
                             std::int64_t pixels, std::int64_t c,
                             const void* dy, void* dx) {
  dispatch_floating("average_pixels_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    for_rows(n * pixels, c, [&](std::int64_t i) {
      const T* in = static_cast<const T*>(dy) + i / pixels * c;
      T* out = static_cast<T*>(dx) + i * c;
      for (std::int64_t j = 0; j < c; ++j) {
        out[j] = narrow<T>(widen(in[j]) / static_cast<Compute<T>>(pixels));
      }
    });
  });
}

}  // namespace shardbook::kernels::cpu
