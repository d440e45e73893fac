// Expert groups: the lists of the documents.

#include "chapters/13_moe/groups.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/support/errors.h"

namespace shardbook::moe {
namespace {

using Lists = std::vector<std::vector<int>>;

TEST(ExpertGroups, AreThoseOfDeepSpeed) {
  const ExpertGroups two = expert_groups({16, 1, 1, 2, false});
  EXPECT_EQ(two.ep, (Lists{{0, 1},
                           {2, 3},
                           {4, 5},
                           {6, 7},
                           {8, 9},
                           {10, 11},
                           {12, 13},
                           {14, 15}}));
  EXPECT_EQ(two.edp,
            (Lists{{0, 2, 4, 6, 8, 10, 12, 14}, {1, 3, 5, 7, 9, 11, 13, 15}}));
  EXPECT_EQ(two.dp.size(), 1U);

  const ExpertGroups cut = expert_groups({16, 2, 1, 4, false});
  EXPECT_EQ(
      cut.ep,
      (Lists{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}}));
  EXPECT_EQ(cut.edp, (Lists{{0, 8},
                            {1, 9},
                            {2, 10},
                            {3, 11},
                            {4, 12},
                            {5, 13},
                            {6, 14},
                            {7, 15}}));
  EXPECT_EQ(cut.dp,
            (Lists{{0, 2, 4, 6, 8, 10, 12, 14}, {1, 3, 5, 7, 9, 11, 13, 15}}));
  EXPECT_EQ(cut.replicas[0], (std::vector<int>{0, 1, 8, 9}));
}

TEST(ExpertGroups, DataBeforeExpertSwapsTheStrides) {
  const ExpertGroups swapped = expert_groups({16, 2, 1, 4, true});
  EXPECT_EQ(swapped.edp[0], (std::vector<int>{0, 2}));
  EXPECT_EQ(swapped.ep[0], (std::vector<int>{0, 4, 8, 12}));
  const ExpertGroups plain = expert_groups({8, 1, 1, 2, true});
  EXPECT_EQ(plain.edp, (Lists{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(plain.ep, (Lists{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

TEST(ExpertGroups, StayWithinAStage) {
  const ExpertGroups groups = expert_groups({16, 2, 2, 2, false});
  EXPECT_EQ(groups.ep, (Lists{{0, 2},
                              {1, 3},
                              {4, 6},
                              {5, 7},
                              {8, 10},
                              {9, 11},
                              {12, 14},
                              {13, 15}}));
  EXPECT_EQ(groups.edp[0], (std::vector<int>{0, 4}));
}

// Each kind of group has every rank once.
TEST(ExpertGroups, PartitionTheWorld) {
  for (const bool swapped : {false, true}) {
    const ExpertGroups groups = expert_groups({24, 2, 2, 3, swapped});
    for (const Lists* lists :
         {&groups.ep, &groups.edp, &groups.dp, &groups.tp, &groups.replicas}) {
      std::vector<int> seen(24, 0);
      for (const auto& group : *lists) {
        for (const int rank : group) seen[static_cast<std::size_t>(rank)] += 1;
      }
      EXPECT_EQ(seen, std::vector<int>(24, 1));
    }
  }
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
