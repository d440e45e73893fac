#include "core/how_many.h"

#include <gtest/gtest.h>

namespace shardbook {
namespace {

TEST(HowMany, TheNounFollowsTheNumber) {
  EXPECT_EQ(how_many(0, "step"), "0 steps");
  EXPECT_EQ(how_many(1, "step"), "1 step");
  EXPECT_EQ(how_many(2, "step"), "2 steps");
  EXPECT_EQ(how_many(1, "micro-batch"), "1 micro-batch");
  EXPECT_EQ(how_many(3, "micro-batch"), "3 micro-batches");
  EXPECT_EQ(how_many(4, "process"), "4 processes");
}

TEST(HowMany, CommasPartThousands) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(999.7), "1,000");
  EXPECT_EQ(with_commas(12345678), "12,345,678");
  EXPECT_EQ(with_commas(4e15), "4,000,000,000,000,000");
}

}  // namespace
}  // namespace shardbook
