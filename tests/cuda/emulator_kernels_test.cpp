// Right kernels give right results, whatever runs first.

#include <numeric>

#include "tests/cuda/test_support.h"

namespace emulator {
namespace {

class Kernels : public OverSeeds {};
INSTANTIATE_TEST_SUITE_P(Seeds, Kernels, testing::Values(0, 1, 2, 3, 4));

std::vector<int> numbers(int n) {
  std::vector<int> values(n);
  std::iota(values.begin(), values.end(), 1);
  return values;
}

__global__ void block_sums(const int* x, int n, int* sums) {
  __shared__ SharedArray<int, 128> partial;
  const int t = static_cast<int>(threadIdx.x);
  const int i = static_cast<int>(blockIdx.x) * 128 + t;
  partial[t] = i < n ? x[i] : 0;
  for (int half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) partial[t] = partial[t] + partial[t + half];
  }
  if (t == 0) sums[blockIdx.x] = partial[0];
}

TEST_P(Kernels, BlockReduction) {
  const Device<int> x(numbers(300)), sums(std::vector<int>(3));
  EXPECT_EQ(run("sums", 3, 128, block_sums, x.data(), 300, sums.data()), "");
  EXPECT_EQ(sums.values(), (std::vector<int>{8256, 24640, 12254}));
}

__global__ void warp_sums(const int* x, int* sums) {
  const int i = static_cast<int>(threadIdx.x);
  int sum = x[i];
  for (int half = 16; half > 0; half /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, half);
  }
  sums[i] = sum;
}

TEST_P(Kernels, WarpReduction) {
  const Device<int> x(numbers(64)), sums(std::vector<int>(64));
  EXPECT_EQ(run("warps", 1, 64, warp_sums, x.data(), sums.data()), "");
  std::vector<int> expected(64, 528);
  std::fill(expected.begin() + 32, expected.end(), 1552);
  EXPECT_EQ(sums.values(), expected);
}

__global__ void transpose(const int* x, int rows, int cols, int* y) {
  __shared__ SharedArray<int, 16 * 17> tile;
  const int tx = static_cast<int>(threadIdx.x),
            ty = static_cast<int>(threadIdx.y);
  const int c = static_cast<int>(blockIdx.x) * 16 + tx;
  const int r = static_cast<int>(blockIdx.y) * 16 + ty;
  if (r < rows && c < cols) tile[ty * 17 + tx] = x[r * cols + c];
  __syncthreads();
  const int to_r = static_cast<int>(blockIdx.x) * 16 + ty;
  const int to_c = static_cast<int>(blockIdx.y) * 16 + tx;
  if (to_r < cols && to_c < rows) y[to_r * rows + to_c] = tile[tx * 17 + ty];
}

TEST_P(Kernels, TranspositionThroughSharedMemory) {
  const Device<int> x(numbers(20 * 37)), y(std::vector<int>(20 * 37));
  EXPECT_EQ(run("transpose", dim3(3, 2), dim3(16, 16), transpose, x.data(), 20,
                37, y.data()),
            "");
  const std::vector<int> found = y.values();
  for (int r = 0; r < 20; ++r) {
    for (int c = 0; c < 37; ++c) {
      ASSERT_EQ(found[c * 20 + r], r * 37 + c + 1);
    }
  }
}

}  // namespace
}  // namespace emulator
