#include "comm/topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/check.h"

namespace shardbook {
namespace {

using Groups = std::vector<std::vector<int>>;

TEST(Topology, TheMegatronExampleHasItsGroups) {
  // 16 ranks, t = 2, p = 4, so that d = 2.
  const Topology megatron = Topology::megatron(2, 1, 2, 4);
  EXPECT_EQ(megatron.world_size(), 16);
  const Groups dp = megatron.groups({"dp"});
  EXPECT_EQ(dp, (Groups{{0, 2},
                        {1, 3},
                        {4, 6},
                        {5, 7},
                        {8, 10},
                        {9, 11},
                        {12, 14},
                        {13, 15}}));
  EXPECT_EQ(megatron.groups({"tp"}), (Groups{{0, 1},
                                             {2, 3},
                                             {4, 5},
                                             {6, 7},
                                             {8, 9},
                                             {10, 11},
                                             {12, 13},
                                             {14, 15}}));
  EXPECT_EQ(
      megatron.groups({"pp"}),
      (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
}

TEST(Topology, EveryOrderFollowsItsFormula) {
  const int t = 2;
  const int c = 3;
  const int d = 4;
  const int p = 5;
  const Topology megatron = Topology::megatron(t, c, d, p);
  const Topology option = Topology::megatron_pp_before_dp(t, c, p, d);
  const Topology deepspeed_2d = Topology::deepspeed_2d(p, d);
  const Topology deepspeed_3d = Topology::deepspeed_3d(p, d, t);
  const Topology colossal = Topology::colossal_ai(d, p, t);
  for (int tp = 0; tp < t; ++tp) {
    for (int cp = 0; cp < c; ++cp) {
      for (int dp = 0; dp < d; ++dp) {
        for (int pp = 0; pp < p; ++pp) {
          const Coord all{{"tp", tp}, {"cp", cp}, {"dp", dp}, {"pp", pp}};
          const Coord three{{"tp", tp}, {"dp", dp}, {"pp", pp}};
          const Coord two{{"dp", dp}, {"pp", pp}};
          EXPECT_EQ(megatron.get_rank(all), tp + t * (cp + c * (dp + d * pp)));
          EXPECT_EQ(option.get_rank(all), tp + t * (cp + c * (pp + p * dp)));
          EXPECT_EQ(deepspeed_2d.get_rank(two), dp + d * pp);
          EXPECT_EQ(deepspeed_3d.get_rank(three), tp + t * (dp + d * pp));
          EXPECT_EQ(colossal.get_rank(three), tp + t * (pp + p * dp));
        }
      }
    }
  }
}

TEST(Topology, ADeviceMeshIsRowMajor) {
  const Topology mesh({"replicate", "shard"}, {2, 3});
  EXPECT_EQ(mesh.get_rank({{"replicate", 1}, {"shard", 2}}), 5);
  EXPECT_EQ(mesh.groups({"shard"}), (Groups{{0, 1, 2}, {3, 4, 5}}));
}

TEST(Topology, CoordinatesAndRanksAreInverse) {
  const Topology grid = Topology::megatron(2, 3, 2, 2);
  for (int rank = 0; rank < grid.world_size(); ++rank) {
    EXPECT_EQ(grid.get_rank(grid.get_coord(rank)), rank);
  }
}

TEST(Topology, GroupsOfAnyAxesPartitionTheWorld) {
  const Topology grid = Topology::megatron(2, 3, 2, 2);
  const std::vector<std::string>& axes = grid.axes();
  for (unsigned subset = 0; subset < 1u << axes.size(); ++subset) {
    std::vector<std::string> chosen;
    int size = 1;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      if ((subset >> i & 1u) == 0) continue;
      chosen.push_back(axes[i]);
      size *= grid.sizes()[i];
    }
    std::set<int> seen;
    for (const std::vector<int>& group : grid.groups(chosen)) {
      EXPECT_EQ(static_cast<int>(group.size()), size);
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      seen.insert(group.begin(), group.end());
    }
    EXPECT_EQ(static_cast<int>(seen.size()), grid.world_size());
  }
}

TEST(Topology, SeveralAxesMakeOneGroup) {
  const Topology grid({"pp", "dp", "tp"}, {2, 2, 2});
  EXPECT_EQ(grid.groups({"tp", "pp"}), (Groups{{0, 1, 4, 5}, {2, 3, 6, 7}}));
}

TEST(Topology, RejectsWhatMakesNoSense) {
  EXPECT_THROW(Topology({"a", "b"}, {2}), Error);
  EXPECT_THROW(Topology({"a", "a"}, {2, 2}), Error);
  EXPECT_THROW(Topology({"a"}, {0}), Error);
  EXPECT_THROW(Topology({"a-b"}, {2}), Error);
  EXPECT_THROW(Topology({"a", "b"}, {1 << 20, 1 << 20}), Error);
  EXPECT_THROW(Topology::from_order("tp-dp", {{"tp", 2}}), Error);
  EXPECT_THROW(Topology::from_order("tp", {{"tp", 2}, {"dp", 2}}), Error);
  const Topology grid({"a", "b"}, {2, 3});
  EXPECT_THROW(grid.get_rank({{"a", 2}, {"b", 0}}), Error);
  EXPECT_THROW(grid.get_rank({{"a", 1}}), Error);
  EXPECT_THROW(grid.get_coord(6), Error);
  EXPECT_THROW(grid.size("c"), Error);
  EXPECT_THROW(grid.groups({"a", "a"}), Error);
}

}  // namespace
}  // namespace shardbook
