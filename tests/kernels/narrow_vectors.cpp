// The kernels' vectors without AVX-512, on machines that have it as well: e^x
// over all of its range, and rows of 16 bits. A program of its own, since one
// program must not hold the same functions for two kinds of vectors.

#include <cmath>
#include <cstdio>
#include <limits>

#include "core/kernels/cpu/transpose_block.h"
#include "core/kernels/cpu/vector_math.h"

namespace {

using namespace shardbook::kernels::cpu;
constexpr int kNoSuchProcessor = 77;  // what Meson takes for a skipped test

int failures = 0;

void expect(bool is_true, const char* what, double at) {
  if (is_true) return;
  std::printf("%s: wrong at %.9g\n", what, at);
  ++failures;
}

void test_exponential() {
  for (float x = -100; x < 100; x += 0.0371f) {
    alignas(64) float lanes[Vec<float>::size];
    exp_vec(Vec<float>(x)).store_aligned(lanes);
    const double exact = std::exp(static_cast<double>(x));
    const bool is_tiny = exact < std::numeric_limits<float>::min();
    const bool is_large = exact > std::numeric_limits<float>::max();
    expect(is_tiny    ? lanes[0] <= std::numeric_limits<float>::min()
           : is_large ? std::isinf(lanes[0])
                      : std::abs(lanes[0] - exact) < 3e-7 * exact,
           "exp", x);
  }
}

// What a softmax takes has the bits of e^x up to 88.
void test_exponential_of_softmax() {
  const float nothing = -std::numeric_limits<float>::infinity();
  for (float x = nothing; x < 88; x = std::isinf(x) ? -100 : x + 0.0371f) {
    alignas(64) float lanes[2][Vec<float>::size];
    exp_vec(Vec<float>(x)).store_aligned(lanes[0]);
    exp_vec_small(Vec<float>(x)).store_aligned(lanes[1]);
    expect(lanes[0][0] == lanes[1][0], "exp of a softmax", x);
  }
}

// Rows and columns left over by blocks of eight, too.
void test_transpose() {
  constexpr int kRows = 19, kCols = 21;
  float x[kRows * kCols], y[kCols * kRows];
  for (int i = 0; i < kRows * kCols; ++i) x[i] = static_cast<float>(i);
  transpose_into(x, kCols, kRows, kCols, y, kRows);
  for (int i = 0; i < kRows * kCols; ++i) {
    expect(y[i % kCols * kRows + i / kCols] == x[i], "transpose", i);
  }
}

// The order of sums over lanes is that of halves, and NaN is the largest.
void test_lanes() {
  alignas(64) float x[Vec<float>::size];
  for (std::size_t i = 0; i < Vec<float>::size; ++i) {
    x[i] = std::ldexp(1.0f + 0.1f * static_cast<float>(i), static_cast<int>(i));
  }
  const Vec<float> v = Vec<float>::load_aligned(x);
  expect(max_lanes(v) == x[Vec<float>::size - 1], "max of lanes", 0);
  float sums[Vec<float>::size];
  for (std::size_t i = 0; i < Vec<float>::size; ++i) sums[i] = x[i];
  for (std::size_t n = Vec<float>::size / 2; n > 0; n /= 2) {
    for (std::size_t i = 0; i < n; ++i) sums[i] += sums[i + n];
  }
  expect(sum_lanes(v) == sums[0], "sum of lanes", 0);
  for (std::size_t i = 0; i < Vec<float>::size; ++i) {
    alignas(64) float y[Vec<float>::size];
    v.store_aligned(y);
    y[i] = std::numeric_limits<float>::quiet_NaN();
    expect(std::isnan(max_lanes(Vec<float>::load_aligned(y))), "max with NaN",
           static_cast<double>(i));
  }
}

template <typename T>
void test_16_bits(const char* type) {
  for (int bits = 0; bits < 1 << 16; ++bits) {
    T x[kLanes<T>], y[kLanes<T>];
    for (T& each : x) each.bits = static_cast<std::uint16_t>(bits);
    const Vec<float> wide = load(x);
    store(y, wide);
    const float value = widen(x[0]);
    expect(std::isnan(value) ? std::isnan(widen(y[0])) : y[0].bits == bits,
           type, value);
  }
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx2")) return kNoSuchProcessor;
  test_exponential();
  test_exponential_of_softmax();
  test_transpose();
  test_lanes();
  test_16_bits<BF16>("bf16");
  test_16_bits<F16>("f16");
  if (failures == 0) std::printf("vectors of %zu floats\n", Vec<float>::size);
  return failures == 0 ? 0 : 1;
}
