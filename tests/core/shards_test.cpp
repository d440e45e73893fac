// Parts of parameters: one rank draws, copies and restores the same values as
// the whole has there.

#include "core/shards.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/check.h"
#include "core/module.h"

namespace shardbook {
namespace {

Tensor counted(const Shape& shape) {
  Tensor x = Tensor::empty(shape, {DType::kI64, Device()});
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<std::int64_t>()[i] = i;
  return x;
}

std::vector<std::int64_t> elements(const Tensor& x) {
  return {x.data<std::int64_t>(), x.data<std::int64_t>() + x.numel()};
}

TEST(Shards, ABlockOfAMatrixIsCutInBothDimensions) {
  const Tensor part = take_part(counted({4, 6}), {{0, 1, 2}, {1, 0, 3}});
  EXPECT_EQ(part.shape(), (Shape{2, 2}));
  EXPECT_EQ(elements(part), (std::vector<std::int64_t>{12, 13, 18, 19}));
}

TEST(Shards, EachCutCutsWhatTheOneBeforeHasLeft) {
  // Part 1 of 2 of three blocks of four: 2 3, 6 7, 10 11. Of these, half 0.
  const Tensor part = take_part(counted({12}), {{0, 1, 2, 3}, {0, 0, 2}});
  EXPECT_EQ(elements(part), (std::vector<std::int64_t>{2, 3, 6}));
}

TEST(Shards, PartsDoNotDependOnTheOrderOfCutsInDifferentDimensions) {
  const Tensor whole = counted({4, 12, 2});
  EXPECT_EQ(elements(take_part(whole, {{1, 1, 2, 3}, {0, 1, 4}})),
            elements(take_part(whole, {{0, 1, 4}, {1, 1, 2, 3}})));
}

// 12 rows, of which part 1 of 2 has 6, cut in 4: 2, 2, 2 and none
TEST(Shards, PartsWithALengthMayBeUneven) {
  const auto parts = [](std::int64_t i) {
    return Shards{{0, 1, 2}, {0, i, 4, 1, 6}};
  };
  EXPECT_EQ(elements(take_part(counted({12}), parts(1))),
            (std::vector<std::int64_t>{8, 9}));
  EXPECT_EQ(shape_of(parts(3), {12, 3}), (Shape{0, 3}));
  EXPECT_EQ(whole_shape(parts(3), {0, 3}), (Shape{12, 3}));
  EXPECT_THROW(shape_of(parts(0), {10}), Error);
}

// A later cut starts from what the short part has
TEST(Shards, AShortPartIsCutFurther) {
  const Shards shards = {{0, 1, 2, 1, 5}, {0, 1, 2}};
  EXPECT_EQ(elements(take_part(counted({5}), shards)),
            (std::vector<std::int64_t>{4}));
}

TEST(Shards, PartsThatArePutBackMakeTheWhole) {
  const Tensor whole = counted({4, 12, 2});
  const Tensor again = Tensor::zeros(whole.shape(), whole.options());
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      const Shards shards = {{0, i, 2, 1, 4}, {1, j, 2, 3}};
      put_part(again, take_part(whole, shards), shards);
    }
  }
  EXPECT_EQ(elements(again), elements(whole));
  EXPECT_EQ(elements(take_part(whole, {})), elements(whole));
}

TEST(Shards, APartDrawsWhatTheWholeHasThere) {
  const std::vector<Shards> parts = {
      {},
      {{0, 1, 2}},
      {{1, 2, 3}},
      {{1, 1, 2, 3}},
      {{0, 1, 2}, {1, 0, 2, 3}},
      {{0, 1, 2, 2}, {1, 1, 2, 3}},
      {{0, 0, 2}, {0, 1, 2}, {1, 1, 3}},
      {cut_columns(1, 1, 2, {{8, 4}, {2, 1}, {2, 1}})},
      {cut_columns(0, 3, 4, {{4, 4}, {2, 2}, {2, 2}})},
      {{0, 1, 2}, cut_columns(1, 1, 2, {{8, 4}, {4, 2}})},
  };
  InitOptions init;
  init.seed = 3;
  for (const Shape& shape : {Shape{8, 12}, Shape{8, 12, 5}}) {
    const Tensor whole = make_parameter("w", shape, 1, init).detach();
    const Tensor uniform = make_uniform_parameter("w", shape, 1, init).detach();
    for (const Shards& shards : parts) {
      InitOptions part = init;
      part.shards = shards;
      EXPECT_TRUE(bitwise_equal(make_parameter("w", shape, 1, part).detach(),
                                take_part(whole, shards)));
      EXPECT_TRUE(
          bitwise_equal(make_uniform_parameter("w", shape, 1, part).detach(),
                        take_part(uniform, shards)));
    }
  }
}

// [q | k | v] of 4 heads of queries and 2 of keys, each of one column: with four
// ranks, two neighbours hold the same keys
TEST(Shards, ColumnsWithFewerPartsThanRanksAreShared) {
  const std::vector<Columns> qkv = {{4, 4}, {2, 2}, {2, 2}};
  const Tensor whole = counted({8});
  const std::vector<std::vector<std::int64_t>> expected = {
      {0, 4, 6}, {1, 4, 6}, {2, 5, 7}, {3, 5, 7}};
  const Tensor again = Tensor::zeros({8}, whole.options());
  for (int r = 0; r < 4; ++r) {
    const Shards shards = {cut_columns(0, r, 4, qkv)};
    const Tensor part = take_part(whole, shards);
    EXPECT_EQ(elements(part), expected[static_cast<std::size_t>(r)]);
    EXPECT_EQ(whole_shape(shards, part.shape()), whole.shape());
    put_part(again, part, shards);
    const std::vector<IndexRun> first = first_held(shards[0]);
    ASSERT_EQ(first.size(), 1u);
    EXPECT_EQ(first[0].begin, 0);
    EXPECT_EQ(first[0].count, r % 2 == 0 ? 3 : 1);
  }
  EXPECT_EQ(elements(again), elements(whole));
  // Two ranks: heads 0 1 and key 0
  EXPECT_EQ(elements(take_part(whole, {cut_columns(0, 0, 2, qkv)})),
            (std::vector<std::int64_t>{0, 1, 4, 6}));
}

TEST(Shards, EqualColumnsAreBlocks) {
  EXPECT_EQ(cut_columns(1, 1, 2, {{6, 6}, {6, 6}}), (Shard{1, 1, 2, 2}));
  EXPECT_EQ(cut_columns(1, 1, 2, {}), (Shard{1, 1, 2}));
  EXPECT_THROW(shape_of({cut_columns(0, 0, 3, {{4, 4}, {2, 2}})}, {6}), Error);
  EXPECT_THROW(shape_of({cut_columns(0, 0, 2, {{4, 4}, {2, 2}})}, {8}), Error);
}

TEST(Shards, WhatDoesNotDivideIsRefused) {
  EXPECT_THROW(shape_of({{0, 0, 5}}, {12}), Error);
  EXPECT_THROW(shape_of({{0, 0, 2, 3}, {0, 0, 4}}, {12}), Error);
  EXPECT_THROW(shape_of({{1, 0, 2}}, {12}), Error);
  EXPECT_THROW(put_part(counted({4}), counted({4}), {{0, 0, 2}}), Error);
}

}  // namespace
}  // namespace shardbook
