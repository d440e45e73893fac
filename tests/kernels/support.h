#pragma once

// Arrays of any dtype seen as doubles, and the sizes that tests of a kernel on
// the CPU and on CUDA share. The oracles are xtensor expressions.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>
#include <xtensor/xarray.hpp>
#include <xtensor/xmanipulation.hpp>
#include <xtensor/xmath.hpp>
#include <xtensor/xview.hpp>

#ifdef SHARDBOOK_HAVE_OPENMP
#include <omp.h>
#endif

#include "core/kernels/elementwise.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/random.h"
#include "tests/support/dtypes.h"

namespace shardbook::kernels {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline constexpr double kInf = std::numeric_limits<double>::infinity();

using Values = xt::xarray<double>;

/// An array of `dtype` in memory.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::int64_t n)
      : dtype_(dtype), n_(n), bytes_(n * dtype_bytes(dtype)) {}
  Array(DType dtype, const std::vector<double>& values)
      : Array(dtype, static_cast<std::int64_t>(values.size())) {
    KernelContext context;
    cast(context, DType::kF64, values.data(), dtype, bytes_.data(), n_);
  }

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  std::int64_t size() const { return n_; }
  DType dtype() const { return dtype_; }

  std::vector<double> values() const {
    std::vector<double> out(n_);
    KernelContext context;
    cast(context, dtype_, bytes_.data(), DType::kF64, out.data(), n_);
    return out;
  }
  Values as(const Dims& shape) const {
    Values out(Values::shape_type(shape.begin(), shape.end()));
    const std::vector<double> flat = values();
    std::copy(flat.begin(), flat.end(), out.begin());
    return out;
  }

  bool operator==(const Array& other) const { return bytes_ == other.bytes_; }

 private:
  DType dtype_ = DType::kF64;
  std::int64_t n_ = 0;
  std::vector<char> bytes_;
};

inline std::int64_t shape_size(const Dims& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1},
                         std::multiplies<>());
}

/// Numbers without pattern in [-1, 1], exact in every floating dtype's f64 view
/// only after rounding: use `rounded` for reference computations.
inline std::vector<double> noise(std::int64_t n, std::uint64_t seed = 1) {
  std::vector<double> out(n);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  for (double& x : out) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    x = static_cast<double>(state >> 11) * 0x1p-52 - 1.0;
  }
  return out;
}

/// Relative error of one rounding (and a few operations) in a dtype.
inline double tolerance(DType dtype) {
  return by_dtype(dtype, 1e-13, 2e-6, 1.2e-2, 1.5e-3);
}

/// |a - b| <= tolerance * (1 + |b|) everywhere.
inline void expect_close(const std::vector<double>& a,
                         const std::vector<double>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_NEAR(a[i], b[i], tolerance * (1.0 + std::fabs(b[i]))) << "at " << i;
  }
}

inline void expect_close(const Array& a, const Values& b, double tolerance) {
  expect_close(a.values(), std::vector<double>(b.begin(), b.end()), tolerance);
}

inline DType stat_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

/// Runs body with a number of OpenMP threads.
inline void with_threads(int threads, const std::function<void()>& body) {
#ifdef SHARDBOOK_HAVE_OPENMP
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  body();
  omp_set_num_threads(before);
#else
  (void)threads;
  body();
#endif
}

/// Suites over dtypes: TEST_P bodies see `dtype` and `context`.
class KernelTest : public testing::TestWithParam<DType> {
 protected:
  DType dtype = GetParam();
  KernelContext context;

  Array array(const std::vector<double>& values) const {
    return Array(dtype, values);
  }
  Array array(std::int64_t n) const { return Array(dtype, n); }
};

// --- What tests on the CPU (tests/kernels) and on CUDA (tests/cuda) run over

inline constexpr BinaryOp kBinaryOps[] = {BinaryOp::kAdd, BinaryOp::kSub,
                                          BinaryOp::kMul, BinaryOp::kDiv};
inline constexpr UnaryOp kUnaryOps[] = {
    UnaryOp::kNeg,     UnaryOp::kAbs,  UnaryOp::kRelu,    UnaryOp::kGeluTanh,
    UnaryOp::kGeluErf, UnaryOp::kTanh, UnaryOp::kSigmoid, UnaryOp::kSquare,
    UnaryOp::kSqrt,    UnaryOp::kExp,  UnaryOp::kLog};

/// Two shapes that broadcast.
inline const std::vector<std::pair<Dims, Dims>> kBroadcasts = {
    {{37}, {37}},
    {{5, 37}, {37}},
    {{37}, {5, 37}},
    {{5, 37}, {5, 1}},
    {{5, 1}, {1, 37}},
    {{}, {4, 20}},
    {{4, 20}, {1}},
    {{70, 64}, {64}},
    {{64}, {70, 64}},
    {{70, 64}, {70, 1}},
    {{2, 3, 4, 5}, {3, 1, 5}},
    {{2, 1, 4, 1}, {3, 1, 5}},
    {{2, 3, 1, 16}, {1, 4, 16}},
    {{1}, {1}},
    {{}, {}},
    {{3, 0, 2}, {1, 2}},
    {{2, 3, 1, 5, 6}, {2, 1, 4, 5, 1}},
    {{2, 1, 2, 1, 2, 1, 2, 1}, {1, 3, 1, 2, 1, 3, 1, 2}}};

/// A shape, and one that it is summed to.
inline const std::vector<std::pair<Dims, Dims>> kReductions = {
    {{4, 5}, {5}},
    {{4, 5}, {4, 1}},
    {{4, 5}, {}},
    {{4, 5}, {4, 5}},
    {{2, 3, 4}, {3, 1}},
    {{2, 3, 4}, {2, 1, 4}},
    {{2, 3, 4, 5}, {3, 1, 5}},
    {{2, 3, 4, 5}, {2, 1, 4, 1}},
    {{3, 2, 3, 4, 5, 2}, {2, 1, 4, 1, 2}},
    {{1, 1}, {1}},
    {{0, 3}, {3}},
    {{3, 20, 70}, {1, 70}},
    {{20, 333}, {20, 1}},
    {{4, 8, 9, 9}, {8, 1, 1}},
    {{9, 1000}, {9, 1}},
    {{2, 1025}, {2, 1}},
    {{5, 2048}, {5, 1}},
    {{600, 3}, {600, 1}},
    {{1, 30001}, {}},
    {{3, 20000}, {3, 1}},
    {{4, 0}, {4, 1}}};

inline constexpr RandomKey kKey{0x123456789abcdef0ull, 77};

/// Parts of a tensor of [6, 10, 14].
inline std::vector<GlobalView> parts_of_a_tensor() {
  const Dims global = {6, 10, 14};
  return {{{6, 10, 14}, global, {}, {}},
          {{3, 10, 14}, global, {3, 0, 0}, {}},
          {{6, 5, 14}, global, {0, 5, 0}, {}},
          {{6, 10, 7}, global, {0, 0, 7}, {}},
          {{6, 10, 8}, global, {0, 0, 4}, {}},
          {{2, 3, 5}, global, {1, 2, 3}, {}},
          {{6, 10, 7}, global, {0, 0, 1}, {1, 1, 2}},
          {{2, 5, 14}, global, {1, 0, 0}, {3, 2, 1}},
          {{3, 10, 14}, global, {1, 0, 0}, {2, 1, 1}},
          {{1, 1, 1}, global, {5, 9, 13}, {}},
          {{0, 10, 14}, global, {0, 0, 0}, {}}};
}

/// 0, 37, 74, ... below 127, so that every dtype holds them.
inline std::vector<double> counting(std::int64_t n) {
  std::vector<double> values(n);
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] = static_cast<double>(i * 37 % 127);
  }
  return values;
}

}  // namespace shardbook::kernels
