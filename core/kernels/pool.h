#pragma once

// Pooling of images [n, height, width, channels].

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

struct PoolShape {
  std::int64_t n = 0;
  std::int64_t h = 0, w = 0, c = 0;
  std::int64_t size = 1;
  std::int64_t stride = 1, padding = 0;

  constexpr std::int64_t out_h() const {
    return (h + 2 * padding - size) / stride + 1;
  }
  constexpr std::int64_t out_w() const {
    return (w + 2 * padding - size) / stride + 1;
  }
};

/// y [n, out_h, out_w, c] = the largest of each window; taps, of y's shape, is
/// its place in the window: row * size + column, the first of equals. NaN wins.
SHARDBOOK_KERNEL(max_pool, void(KernelContext& context, DType dtype,
                                const PoolShape& shape, const void* x, void* y,
                                std::int32_t* taps));
/// dx[i] = sum of dy over the windows whose largest is x[i].
SHARDBOOK_KERNEL(max_pool_backward, void(KernelContext& context, DType dtype,
                                         const PoolShape& shape, const void* dy,
                                         const std::int32_t* taps, void* dx));

/// y [n, c] = mean over the `pixels` of x [n, pixels, c].
SHARDBOOK_KERNEL(average_pixels, void(KernelContext& context, DType dtype,
                                      std::int64_t n, std::int64_t pixels,
                                      std::int64_t c, const void* x, void* y));
/// dx [n, pixels, c] = dy [n, c] / pixels.
SHARDBOOK_KERNEL(average_pixels_backward,
                 void(KernelContext& context, DType dtype, std::int64_t n,
                      std::int64_t pixels, std::int64_t c, const void* dy,
                      void* dx));

}  // namespace shardbook::kernels
