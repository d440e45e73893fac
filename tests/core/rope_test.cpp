// Rotary positions: against their definition, and what they are for.

#include "core/rope.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

#include "tests/core/support.h"

namespace shardbook {
namespace {

using Positions = std::vector<std::int64_t>;

RopeScaling llama3() {
  RopeScaling scaling;
  scaling.kind = RopeScaling::Kind::kLlama3;
  scaling.factor = 8;
  scaling.low_freq_factor = 1;
  scaling.high_freq_factor = 4;
  scaling.original_positions = 64;
  return scaling;
}

/// The row of one head of width 2 n, turned at `position`.
std::vector<double> turned(const std::vector<double>& head, double theta,
                           double position) {
  const std::size_t half = head.size() / 2;
  std::vector<double> out(head.size());
  for (std::size_t i = 0; i < half; ++i) {
    const double angle =
        position * std::pow(theta, -2.0 * static_cast<double>(i) /
                                       static_cast<double>(head.size()));
    out[i] = head[i] * std::cos(angle) - head[i + half] * std::sin(angle);
    out[i + half] =
        head[i + half] * std::cos(angle) + head[i] * std::sin(angle);
  }
  return out;
}

TEST(RopeFrequencies, AreAGeometricSequence) {
  const std::vector<double> f = rope_frequencies(8, 10000, {});
  expect_close(f, {1, 0.1, 0.01, 0.001}, 1e-15);
}

TEST(RopeFrequencies, LinearScalingDividesAll) {
  RopeScaling scaling;
  scaling.kind = RopeScaling::Kind::kLinear;
  scaling.factor = 4;
  expect_close(rope_frequencies(4, 100, scaling), {0.25, 0.025}, 1e-15);
}

// Wavelengths of 6.3, 63, 628, 6283 positions, of 64 at first: shorter than 16
// stay, longer than 64 are stretched, one is between.
TEST(RopeFrequencies, Llama3TakesAllThreeBranches) {
  const std::vector<double> f = rope_frequencies(8, 10000, llama3());
  const double wavelength = 2 * std::numbers::pi / 0.1;
  const double share = (64 / wavelength - 1) / (4 - 1);
  EXPECT_GT(share, 0);
  EXPECT_LT(share, 0.01);  // hardly faster than the slow ones
  expect_close(f, {1, (1 - share) * 0.1 / 8 + share * 0.1, 0.01 / 8, 0.001 / 8},
               1e-15);
}

// Llama 3.1: pair i has a wavelength of 2 pi 500000^(i / 64). Those up to 28 are
// shorter than 2048 positions, those from 35 on longer than 8192.
TEST(RopeFrequencies, Llama3OfAPublishedModel) {
  RopeScaling scaling = llama3();
  scaling.original_positions = 8192;
  const std::vector<double> f = rope_frequencies(128, 500000, scaling);
  for (int i = 0; i < 64; ++i) {
    const double plain = std::pow(500000, -i / 64.0);
    if (i <= 28) {
      EXPECT_EQ(f[i], plain) << i;
    } else if (i >= 35) {
      EXPECT_EQ(f[i], plain / 8) << i;
    } else {
      EXPECT_LT(f[i], plain) << i;
      EXPECT_GT(f[i], plain / 8) << i;
    }
  }
}

TEST(RopeTable, HasCosinesThenSinesOfItsPositions) {
  const Tensor table = rope_table({7, 0, 3}, 4, 100, {}, kOfF64);
  std::vector<double> expected;
  for (const double p : {7, 0, 3}) {
    for (const double angle : {p, p / 10}) expected.push_back(std::cos(angle));
    for (const double angle : {p, p / 10}) expected.push_back(std::sin(angle));
  }
  EXPECT_EQ(table.shape(), (Shape{3, 4}));
  expect_close(values(table), expected, 1e-15);
  EXPECT_FALSE(table.requires_grad());
}

// Far positions: an angle of 100000 has two digits behind its point in f32.
TEST(RopeTable, ComputesAnglesInF32AndRoundsOnce) {
  const std::int64_t p = 99991;
  const auto frequency = static_cast<float>(std::pow(10000, -0.25));
  const float angle = static_cast<float>(p) * frequency;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor table = rope_table({p}, 8, 10000, {}, {dtype, Device()});
    const Tensor expected = to_dtype(
        Tensor::from_values<float>({std::cos(angle), std::sin(angle)}, {2}),
        dtype);
    const std::vector<double> found = values(table);
    EXPECT_EQ((std::vector<double>{found[1], found[5]}), values(expected));
  }
  const std::vector<double> wide =
      values(rope_table({p}, 8, 10000, {}, kOfF64));
  EXPECT_NEAR(wide[1], std::cos(p * std::pow(10000, -0.25)), 1e-9);
  EXPECT_GT(std::fabs(wide[1] - std::cos(angle)), 1e-5);
}

TEST(Rope, EqualsItsDefinitionAndCopiesTheRest) {
  constexpr double kTheta = 50;
  const Positions positions = {4, 9, 0, -3, 100};
  for (const std::int64_t dim : {2, 10, 16, 18, 64, 80, 96}) {
    constexpr std::int64_t kBatch = 2, kHeads = 3;
    const std::int64_t width = kHeads * dim + 7;
    const Tensor x = noise({kBatch, 5, width});
    const Tensor y =
        rope(x, rope_table(positions, dim, kTheta, {}, kOfF64), kHeads, dim);
    std::vector<double> expected = values(x);
    for (std::int64_t row = 0; row < kBatch * 5; ++row) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        const auto head = expected.begin() + row * width + h * dim;
        const std::vector<double> now =
            turned({head, head + dim}, kTheta,
                   static_cast<double>(positions[row % 5]));
        std::copy(now.begin(), now.end(), head);
      }
    }
    expect_close(values(y), expected, 1e-13);
    EXPECT_TRUE(bitwise_equal(slice(y, 2, kHeads * dim, width),
                              slice(x, 2, kHeads * dim, width)));
  }
}

TEST(Rope, ThereAndBackIsTheIdentity) {
  const Tensor x = noise({2, 3, 40});
  const auto table = [](const Positions& positions) {
    return rope_table(positions, 20, 10000, {}, kOfF64);
  };
  const Tensor there = rope(x, table({2, 70, 11}), 2, 20);
  EXPECT_GT(max_abs_difference(there, x), 0.1);
  expect_close(rope(there, table({-2, -70, -11}), 2, 20), x, 1e-14);
}

TEST(Rope, ProductsDependOnTheDistanceAlone) {
  const Tensor q = noise({1, 1, 16}, 1), k = noise({1, 1, 16}, 2);
  const auto product = [&](std::int64_t m, std::int64_t n) {
    const auto at = [](const Tensor& x, std::int64_t position) {
      return rope(x, rope_table({position}, 16, 100, llama3(), kOfF64), 1, 16);
    };
    return sum(mul(at(q, m), at(k, n))).item();
  };
  EXPECT_NEAR(product(5, 2), product(103, 100), 1e-12);
  EXPECT_NEAR(product(0, 9), product(-9, 0), 1e-12);
  EXPECT_GT(std::fabs(product(5, 2) - product(2, 5)), 1e-3);
}

TEST(Rope, KeepsTheTableAlone) {
  const OwnDevice own;
  const Tensor table = rope_table({0, 1, 2}, 8, 100, {}, kOfF32);
  Tensor x = leaf({1, 3, 8}, 1, -1, 1, kOfF32);
  Tensor y = rope(scale(x, 2), table, 1, 8);
  EXPECT_EQ(own.device.memory().current_total,
            x.bytes() + table.bytes() + y.bytes());
  sum(y).backward();
  EXPECT_FALSE(table.grad().defined());
}

TEST(Rope, SaysWhatDoesNotFit) {
  const Tensor x = noise({1, 3, 16});
  const Tensor table = rope_table({0, 1, 2}, 8, 100, {}, kOfF64);
  expect_error([&] { rope(x, table, 3, 8); }, {"3 heads of 8", "[1, 3, 16]"});
  expect_error([&] { rope(x, table, 1, 16); }, {"[3, 8]", "heads of 16"});
  expect_error([&] { rope(noise({1, 2, 16}), table, 2, 8); }, {"2 tokens"});
  expect_error([&] { rope(noise({3, 16}), table, 2, 8); }, {"[3, 16]"});
  expect_error([&] { rope(x, to_dtype(table, DType::kF32), 2, 8); },
               {"f64", "f32"});
  expect_error([&] { rope_frequencies(5, 100, {}); }, {"5 columns", "even"});
  expect_error([&] { rope_frequencies(4, 0, {}); }, {"theta"});
  RopeScaling scaling = llama3();
  scaling.factor = 0;
  expect_error([&] { rope_frequencies(4, 100, scaling); }, {"factor of 0"});
  scaling = llama3();
  scaling.original_positions = 0;
  expect_error([&] { rope_frequencies(4, 100, scaling); },
               {"original positions"});
  scaling = llama3();
  scaling.low_freq_factor = 4;
  expect_error([&] { rope_frequencies(4, 100, scaling); },
               {"low_freq_factor 4", "high_freq_factor 4"});
}

}  // namespace
}  // namespace shardbook
