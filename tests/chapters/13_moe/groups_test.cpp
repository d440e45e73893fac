// Expert groups: the lists of the documents.

#include "chapters/13_moe/groups.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/support/errors.h"

namespace shardbook::moe {
namespace {

using Lists = std::vector<std::vector<int>>;

Lists ep(const GroupSizes& sizes) {
  return expert_topology(sizes).groups({"ep"});
}
Lists edp(const GroupSizes& sizes) {
  return expert_topology(sizes).groups({"edp"});
}
Lists dp(const GroupSizes& sizes) {
  return expert_topology(sizes).groups({"edp", "ep"});
}

TEST(ExpertGroups, AreThoseOfDeepSpeed) {
  const Lists odd_and_even = {{0, 2, 4, 6, 8, 10, 12, 14},
                              {1, 3, 5, 7, 9, 11, 13, 15}};
  const GroupSizes two{16, 1, 1, 2, false};
  ASSERT_EQ(ep(two).size(), 8U);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(ep(two)[static_cast<std::size_t>(i)],
              (std::vector<int>{2 * i, 2 * i + 1}));
  }
  EXPECT_EQ(edp(two), odd_and_even);
  EXPECT_EQ(dp(two).size(), 1U);

  const GroupSizes cut{16, 2, 1, 4, false};
  EXPECT_EQ(
      ep(cut),
      (Lists{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}}));
  ASSERT_EQ(edp(cut).size(), 8U);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(edp(cut)[static_cast<std::size_t>(i)],
              (std::vector<int>{i, i + 8}));
  }
  EXPECT_EQ(dp(cut), odd_and_even);
  EXPECT_EQ(expert_topology(cut).groups({"edp", "tp"})[0],
            (std::vector<int>{0, 1, 8, 9}));
}

TEST(ExpertGroups, DataBeforeExpertSwapsTheStrides) {
  const GroupSizes swapped{16, 2, 1, 4, true};
  EXPECT_EQ(edp(swapped)[0], (std::vector<int>{0, 2}));
  EXPECT_EQ(ep(swapped)[0], (std::vector<int>{0, 4, 8, 12}));
  const GroupSizes plain{8, 1, 1, 2, true};
  EXPECT_EQ(edp(plain), (Lists{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(ep(plain), (Lists{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

TEST(ExpertGroups, StayWithinAStage) {
  const GroupSizes sizes{16, 2, 2, 2, false};
  EXPECT_EQ(ep(sizes)[1], (std::vector<int>{1, 3}));
  EXPECT_EQ(ep(sizes)[4], (std::vector<int>{8, 10}));
  EXPECT_EQ(edp(sizes)[0], (std::vector<int>{0, 4}));
}

TEST(ExpertGroups, NameSizesThatDoNotDivide) {
  const auto text_of = [](const GroupSizes& sizes) -> std::string {
    return error_of([&] { expert_topology(sizes); });
  };
  expect_text(text_of({6, 1, 1, 4, false}), {"--ep 4"});
  expect_text(text_of({6, 4, 1, 1, false}), {"--tp 4"});
}

TEST(DrawGroups, HasARowPerRank) {
  const std::string text = draw_groups({4, 1, 1, 2, false}, 8);
  expect_text(text, {"   2  0-3        2 3              0 2"});
}

}  // namespace
}  // namespace shardbook::moe
