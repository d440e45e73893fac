// The kernels' vectors without AVX-512, on machines that have it as well: e^x
// over all of its range, and rows of 16 bits. A program of its own, since one
// program must not hold the same functions for two kinds of vectors.

#include <cmath>
#include <cstdio>
#include <limits>

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
  test_16_bits<BF16>("bf16");
  test_16_bits<F16>("f16");
  if (failures == 0) std::printf("vectors of %zu floats\n", Vec<float>::size);
  return failures == 0 ? 0 : 1;
}
