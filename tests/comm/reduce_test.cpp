#include "comm/internal/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace shardbook::internal {
namespace {

template <typename T>
std::vector<T> reduce(DType dtype, ReduceOp op,
                      const std::vector<std::vector<T>>& inputs) {
  std::vector<T> result(inputs[0].size());
  std::vector<const void*> addresses;
  for (const auto& input : inputs) addresses.push_back(input.data());
  reduce_buffers(dtype, op, addresses, {result.data()},
                 static_cast<std::int64_t>(result.size()));
  return result;
}

// bf16 keeps the upper half of the bits.
std::uint16_t bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}

TEST(ReduceBuffers, AddsFromTheFirstToTheLast) {
  // (1e8 + 1) - 1e8 is 0 in f32; any other order gives 1.
  EXPECT_EQ(reduce<float>(DType::kF32, ReduceOp::kSum, {{1e8f}, {1}, {-1e8f}}),
            (std::vector<float>{0}));
  EXPECT_EQ(reduce<float>(DType::kF32, ReduceOp::kSum, {{1e8f}, {-1e8f}, {1}}),
            (std::vector<float>{1}));
}

TEST(ReduceBuffers, HalvesAreSummedInF32AndRoundedOnce) {
  // 256 + 1 is 256 in bf16; 256 + 1 + 1 is 258 when rounded once.
  const std::uint16_t big = bf16(256);
  const std::uint16_t one = bf16(1);
  EXPECT_EQ(reduce<std::uint16_t>(DType::kBF16, ReduceOp::kSum,
                                  {{big}, {one}, {one}}),
            (std::vector<std::uint16_t>{bf16(258)}));
  EXPECT_EQ(reduce<std::uint16_t>(DType::kBF16, ReduceOp::kSum, {{big}, {one}}),
            (std::vector<std::uint16_t>{bf16(256)}));
  // The same for f16: 2048 + 1 + 1 = 2050.
  EXPECT_EQ(reduce<std::uint16_t>(DType::kF16, ReduceOp::kSum,
                                  {{0x6800}, {0x3c00}, {0x3c00}}),
            (std::vector<std::uint16_t>{0x6801}));
}

TEST(ReduceBuffers, RoundsBf16TiesToEven) {
  // 256 + 1 lies between 256 (even) and 258; 258 + 1 between 258 and 260.
  EXPECT_EQ(reduce<std::uint16_t>(DType::kBF16, ReduceOp::kSum,
                                  {{bf16(256), bf16(258)}, {bf16(1), bf16(1)}}),
            (std::vector<std::uint16_t>{bf16(256), bf16(260)}));
}

TEST(ReduceBuffers, KeepsInfinitiesAndNaNs) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto sum = reduce<float>(DType::kF32, ReduceOp::kSum,
                                 {{inf, inf, NAN}, {1, -inf, 1}});
  EXPECT_EQ(sum[0], inf);
  EXPECT_TRUE(std::isnan(sum[1]));
  EXPECT_TRUE(std::isnan(sum[2]));
  const auto half = reduce<std::uint16_t>(DType::kBF16, ReduceOp::kSum,
                                          {{0x7f80, 0x7fff}, {0xff80, 0}});
  EXPECT_GT(half[0] & 0x7fff, 0x7f80) << "inf - inf is no number";
  EXPECT_GT(half[1] & 0x7fff, 0x7f80) << "a NaN stays one";
}

TEST(ReduceBuffers, IntegersWrapAndCompareWithTheirSign) {
  const std::int32_t most = std::numeric_limits<std::int32_t>::max();
  const std::int32_t least = std::numeric_limits<std::int32_t>::min();
  EXPECT_EQ(reduce<std::int32_t>(DType::kI32, ReduceOp::kSum, {{most}, {1}}),
            (std::vector<std::int32_t>{least}));
  EXPECT_EQ(reduce<std::int64_t>(DType::kI64, ReduceOp::kMax, {{-5}, {3}}),
            (std::vector<std::int64_t>{3}));
  EXPECT_EQ(reduce<std::int64_t>(DType::kI64, ReduceOp::kMin, {{-5}, {3}}),
            (std::vector<std::int64_t>{-5}));
}

TEST(ReduceBuffers, WritesEveryOutputAlsoInPlace) {
  std::vector<double> a(5000, 1), b(5000, 2), c(5000, 4);
  reduce_buffers(DType::kF64, ReduceOp::kSum, {a.data(), b.data(), c.data()},
                 {a.data(), b.data(), c.data()}, 5000);
  EXPECT_EQ(a, std::vector<double>(5000, 7));
  EXPECT_EQ(b, a);
  EXPECT_EQ(c, a);
}

}  // namespace
}  // namespace shardbook::internal
