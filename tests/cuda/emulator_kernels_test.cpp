// Right kernels give right results, whatever runs first.

#include <mma.h>

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
    if (t < half) partial[t] += partial[t + half];
  }
  if (t == 0) sums[blockIdx.x] = partial[0];
}

TEST_P(Kernels, BlockReduction) {
  const Device<int> x(numbers(300)), sums(std::vector<int>(3));
  EXPECT_EQ(run("sums", 3, 128, block_sums, x.data(), 300, sums.data()), "");
  EXPECT_EQ(sums.values(), (std::vector<int>{8256, 24640, 12254}));
}

__global__ void warp_sums(const int* x, int* sums, int* masks) {
  const int i = static_cast<int>(threadIdx.x);
  int sum = x[i];
  for (int half = 16; half > 0; half /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, half);
  }
  int up = x[i];
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, up, step);
    if (i % 32 >= step) up += before;
  }
  const unsigned odd = __ballot_sync(0xffffffffu, x[i] % 2);
  sums[i] = sum == __shfl_sync(0xffffffffu, up, 31) ? up : -1;
  masks[i] = static_cast<int>(odd);
}

TEST_P(Kernels, WarpReductionAndScan) {
  const Device<int> x(numbers(64)), sums(std::vector<int>(64)),
      masks(std::vector<int>(64));
  EXPECT_EQ(run("warps", 1, 64, warp_sums, x.data(), sums.data(), masks.data()),
            "");
  std::vector<int> expected(64);
  for (int i = 0, sum = 0; i < 64; ++i) {
    if (i == 32) sum = 0;
    expected[i] = sum += i + 1;
  }
  EXPECT_EQ(sums.values(), expected);
  EXPECT_EQ(masks.values(), std::vector<int>(64, 0x55555555));
}

__global__ void histogram(const int* x, int n, int* counts) {
  __shared__ SharedArray<int, 8> mine;
  const int t = static_cast<int>(threadIdx.x);
  if (t < 8) mine[t] = 0;
  __syncthreads();
  for (int i = static_cast<int>(blockIdx.x) * 64 + t; i < n; i += 256) {
    atomicAdd(&mine[x[i] % 8], 1);
  }
  __syncthreads();
  if (t < 8) atomicAdd(&counts[t], mine[t]);
}

TEST_P(Kernels, HistogramByAtomics) {
  const Device<int> x(numbers(1000)), counts(std::vector<int>(8));
  EXPECT_EQ(run("histogram", 4, 64, histogram, x.data(), 1000, counts.data()),
            "");
  EXPECT_EQ(counts.values(), std::vector<int>(8, 125));
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

// c = a b for 32 x 32 matrices: a warp for each 16 x 16 of c, tiles of a and b
// by way of shared memory.
template <typename T>
__global__ void tiled_product(const T* a, const T* b, float* c) {
  using namespace nvcuda;
  __shared__ SharedArray<T, 256> tile_a;
  __shared__ SharedArray<T, 256> tile_b;
  const int row = static_cast<int>(blockIdx.y) * 16;
  const int col = static_cast<int>(blockIdx.x) * 16;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 0.0f);
  for (int k = 0; k < 32; k += 16) {
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) {
      tile_a[i] = a[(row + i / 16) * 32 + k + i % 16];
      tile_b[i] = b[(k + i / 16) * 32 + col + i % 16];
    }
    __syncwarp();
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> right;
    wmma::load_matrix_sync(left, &tile_a[0], 16);
    wmma::load_matrix_sync(right, &tile_b[0], 16);
    wmma::mma_sync(sum, left, right, sum);
  }
  for (int i = 0; i < sum.num_elements; ++i) sum.x[i] *= 0.5f;
  wmma::store_matrix_sync(c + row * 32 + col, sum, 32, wmma::mem_row_major);
}

template <typename T>
void expect_product() {
  std::vector<T> a(1024), b(1024);
  std::vector<float> expected(1024);
  for (int i = 0; i < 1024; ++i) {
    a[i] = T(static_cast<float>(i % 7 - 3));
    b[i] = T(static_cast<float>(i % 5 - 2));
  }
  for (int i = 0; i < 32; ++i) {
    for (int j = 0; j < 32; ++j) {
      for (int k = 0; k < 32; ++k) {
        expected[i * 32 + j] +=
            0.5f * static_cast<float>(a[i * 32 + k]) * b[k * 32 + j];
      }
    }
  }
  const Device<T> on_a(a), on_b(b);
  const Device<float> c(std::vector<float>(1024));
  EXPECT_EQ(run("product", dim3(2, 2), 32, tiled_product<T>, on_a.data(),
                on_b.data(), c.data()),
            "");
  EXPECT_EQ(c.values(), expected);  // small integers: exact
}

TEST_P(Kernels, TiledProductOnTensorCores) {
  expect_product<__half>();
  expect_product<__nv_bfloat16>();
}

TEST(Elements, SixteenBitsSurviveTheWayToF32AndBack) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<unsigned short>(bits);
    const float f16 = __half2float(__ushort_as_half(b));
    const float bf16 = __bfloat162float(__ushort_as_bfloat16(b));
    ASSERT_EQ(__half_as_ushort(__float2half_rn(f16)), f16 == f16 ? b : 0x7fff);
    ASSERT_EQ(__bfloat16_as_ushort(__float2bfloat16_rn(bf16)),
              bf16 == bf16 ? b : 0x7fff);
  }
}

TEST(Elements, RoundingIsToNearestEven) {
  const auto f16 = [](float x) { return __half_as_ushort(__float2half_rn(x)); };
  EXPECT_EQ(f16(1.0f + 0x1p-11f), 0x3c00);  // half way: to even
  EXPECT_EQ(f16(1.0f + 0x1p-11f + 0x1p-20f), 0x3c01);
  EXPECT_EQ(f16(1.0f + 3 * 0x1p-11f), 0x3c02);
  EXPECT_EQ(f16(65519.0f), 0x7bff);
  EXPECT_EQ(f16(65520.0f), 0x7c00);  // infinity
  EXPECT_EQ(f16(0x1p-25f), 0x0000);  // half of the smallest
  EXPECT_EQ(f16(0x1.8p-25f), 0x0001);
  const auto bf16 = [](float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  };
  EXPECT_EQ(bf16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(bf16(1.0f + 3 * 0x1p-8f), 0x3f82);
  // From f64 in one step: f32 in between would end half way, then go to even.
  EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(1.0 + 0x1p-8 + 0x1p-40)),
            0x3f81);
}

}  // namespace
}  // namespace emulator
