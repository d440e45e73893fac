#include "core/kernels/random.h"

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

// The vectors published with Random123 (kat_vectors, philox 4x32, 10 rounds).
TEST(Philox, KnownAnswers) {
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                       {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, StreamsAndSeedsDiffer) {
  EXPECT_NE(random_bits({1, 1}, 5), random_bits({1, 2}, 5));
  EXPECT_NE(random_bits({1, 1}, 5), random_bits({2, 1}, 5));
  EXPECT_NE(random_bits({1, 1}, 5), random_bits({1, 1}, 6));
}

// Runs of many blocks equal single draws, also where 32 bits of counter end.
TEST(Philox, RunsEqualSingleDraws) {
  KernelContext context;
  const std::int64_t large = std::int64_t{1} << 40;
  for (const std::int64_t start :
       {std::int64_t{0}, std::int64_t{3}, (std::int64_t{1} << 34) - 30}) {
    std::vector<double> x(200);
    fill_uniform(context, DType::kF64, {{200}, {large}, {start}, {}}, kKey, 0.0,
                 1.0, x.data());
    for (std::int64_t i = 0; i < 200; ++i) {
      ASSERT_EQ(x[i], (random_bits(kKey, start + i) >> 8) * 0x1p-24) << i;
    }
  }
}

class Random : public KernelTest {};

// Draws of every kind for one view.
struct Draws {
  std::vector<double> uniform, normal, dropped;
};

Draws draw(KernelContext& context, DType dtype, const GlobalView& view) {
  std::int64_t n = 1;
  for (const std::int64_t s : view.shape) n *= s;
  Array uniform(dtype, n), normal(dtype, n);
  Array dropped(dtype, std::vector<double>(n, 3.0));
  Draws draws;
  fill_uniform(context, dtype, view, kKey, -1.0, 1.0, uniform.data());
  fill_normal(context, dtype, view, kKey, 0.5, 2.0, normal.data());
  dropout(context, dtype, view, kKey, 0.25, dropped.data(), dropped.data());
  draws.uniform = uniform.values();
  draws.normal = normal.values();
  draws.dropped = dropped.values();
  return draws;
}

TEST_P(Random, ShardsDrawWhatTheWholeDraws) {
  const Dims global = {6, 10, 14};
  const Draws whole = draw(context, dtype, whole_view(global));
  for (const GlobalView& view : parts_of_a_tensor()) {
    const Draws part = draw(context, dtype, view);
    std::int64_t local = 0;
    const auto offset = [&](int d) {
      return view.offset.empty() ? 0 : view.offset[d];
    };
    const auto step = [&](int d) {
      return view.step.empty() ? 1 : view.step[d];
    };
    for (std::int64_t i = 0; i < view.shape[0]; ++i) {
      for (std::int64_t j = 0; j < view.shape[1]; ++j) {
        for (std::int64_t k = 0; k < view.shape[2]; ++k, ++local) {
          const std::int64_t at = ((offset(0) + step(0) * i) * global[1] +
                                   offset(1) + step(1) * j) *
                                      global[2] +
                                  offset(2) + step(2) * k;
          ASSERT_EQ(part.uniform[local], whole.uniform[at]);
          ASSERT_EQ(part.normal[local], whole.normal[at]);
          ASSERT_EQ(part.dropped[local], whole.dropped[at]);
        }
      }
    }
  }
}

TEST_P(Random, MomentsAreRight) {
  const Draws draws = draw(context, dtype, whole_view({200000}));
  double u1 = 0, u2 = 0, n1 = 0, n2 = 0, n4 = 0, kept = 0;
  for (int i = 0; i < 200000; ++i) {
    ASSERT_GE(draws.uniform[i], -1.0);
    ASSERT_LT(draws.uniform[i], 1.0);
    const double z = (draws.normal[i] - 0.5) / 2.0;
    u1 += draws.uniform[i], u2 += draws.uniform[i] * draws.uniform[i];
    n1 += z, n2 += z * z, n4 += z * z * z * z;
    kept += draws.dropped[i] != 0.0;
  }
  const double n = 200000;
  EXPECT_NEAR(u1 / n, 0.0, 0.01);
  EXPECT_NEAR(u2 / n, 1.0 / 3.0, 0.01);
  EXPECT_NEAR(n1 / n, 0.0, 0.01);
  EXPECT_NEAR(n2 / n, 1.0, 0.02);
  EXPECT_NEAR(n4 / n, 3.0, 0.1);
  EXPECT_NEAR(kept / n, 0.75, 0.005);
}

TEST_P(Random, DropoutScalesWhatItKeeps) {
  Array x = array({1, 1, 1, 1, 1, 1, 1, 1});
  dropout(context, dtype, whole_view({8}), kKey, 0.5, x.data(), x.data());
  for (const double v : x.values()) EXPECT_TRUE(v == 0.0 || v == 2.0);
  Array y = array({1, -2, 3});
  dropout(context, dtype, whole_view({3}), kKey, 0.0, y.data(), y.data());
  EXPECT_EQ(y.values(), (std::vector<double>{1, -2, 3}));
}

SB_OVER_FLOATING_DTYPES(Random);

TEST(RandomDraws, AgreeAcrossDtypesUpToRounding) {
  KernelContext context;
  const GlobalView view = whole_view({1000});
  const Draws wide = draw(context, DType::kF64, view);
  const Draws narrow = draw(context, DType::kF32, view);
  EXPECT_EQ(wide.uniform, narrow.uniform);
  expect_close(narrow.dropped, wide.dropped, 1e-7);
  expect_close(narrow.normal, wide.normal, 1e-7);
}

TEST(RandomErrors, ViewsThatLeaveTheWhole) {
  KernelContext context;
  double x[8];
  const auto fill = [&](const GlobalView& view) {
    fill_uniform(context, DType::kF64, view, kKey, 0, 1, x);
  };
  EXPECT_THROW(fill({{4}, {4}, {1}, {}}), Error);
  EXPECT_THROW(fill({{3}, {4}, {0}, {2}}), Error);
  EXPECT_THROW(fill({{2}, {4, 4}, {}, {}}), Error);
  EXPECT_THROW(fill({{2}, {4}, {-1}, {}}), Error);
}

}  // namespace
}  // namespace shardbook::kernels
