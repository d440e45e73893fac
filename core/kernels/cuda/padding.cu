// Copies between matrices of different sizes.

#include "core/kernels/cuda/padding.h"

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

namespace {

// A block per row. Each thread has several elements on the way at a time, which
// memory's bandwidth needs.
__global__ void resize_kernel(Extent from, const std::uint16_t* x, Extent to,
                              std::uint16_t* y) {
  constexpr int kAtOnce = 8;
  for (std::int64_t row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const std::int64_t cols = row < from.rows ? from.cols : 0;
    for (std::int64_t at = threadIdx.x; at < to.cols; at += kBlock * kAtOnce) {
      std::uint16_t values[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const std::int64_t col = at + j * kBlock;
        values[j] = col < cols ? x[row * from.cols + col] : 0;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const std::int64_t col = at + j * kBlock;
        if (col < to.cols) y[row * to.cols + col] = values[j];
      }
    }
  }
}

}  // namespace

void copy_resized(KernelContext& context, Extent from, const void* x, Extent to,
                  void* y) {
  const auto blocks =
      static_cast<unsigned>(std::min(to.rows, std::int64_t{1} << 20));
  launch(context, "copy_resized", dim3(blocks), kBlock, resize_kernel, from,
         static_cast<const std::uint16_t*>(x), to,
         static_cast<std::uint16_t*>(y));
}

}  // namespace shardbook::kernels::cuda
