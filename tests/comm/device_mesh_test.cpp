#include "comm/device_mesh.h"

#include <gtest/gtest.h>

#include "comm/launch.h"
#include "core/check.h"

namespace shardbook {
namespace {

// Sum of the world ranks in a group, by world rank.
std::vector<double> sums(int world_size, const Topology& topology,
                         const std::string& axes) {
  std::vector<double> result(static_cast<std::size_t>(world_size));
  run_ranks(world_size, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, topology);
    const Tensor x = Tensor::full({1}, world.rank());
    mesh.group(axes).all_reduce(x).wait();
    result[static_cast<std::size_t>(world.rank())] = x.item();
  });
  return result;
}

TEST(DeviceMesh, EveryAxisIsAGroup) {
  const Topology grid = Topology::megatron(2, 1, 2, 2);
  EXPECT_EQ(sums(8, grid, "tp"),
            (std::vector<double>{1, 1, 5, 5, 9, 9, 13, 13}));
  EXPECT_EQ(sums(8, grid, "dp"),
            (std::vector<double>{2, 4, 2, 4, 10, 12, 10, 12}));
  EXPECT_EQ(sums(8, grid, "pp"),
            (std::vector<double>{4, 6, 8, 10, 4, 6, 8, 10}));
  EXPECT_EQ(sums(8, grid, "cp"), (std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(DeviceMesh, SeveralAxesAreAGroup) {
  const Topology grid = Topology::megatron(2, 1, 2, 2);
  EXPECT_EQ(sums(8, grid, "dp-tp"),
            (std::vector<double>{6, 6, 6, 6, 22, 22, 22, 22}));
  EXPECT_EQ(sums(8, grid, "tp-cp-dp-pp"), std::vector<double>(8, 28));
}

TEST(DeviceMesh, GroupsKnowTheirNamesAndCoordinates) {
  std::vector<int> right(8, 0);
  run_ranks(8, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology::megatron(2, 1, 2, 2));
    bool same = true;
    for (const char* axis : {"tp", "cp", "dp", "pp"}) {
      same = same && mesh.group(axis).rank() == mesh.coordinate(axis) &&
             mesh.group(axis).size() == mesh.size(axis) &&
             mesh.group(axis).name() == axis;
    }
    // However the axes are ordered, it is one group.
    same = same && &mesh.group("tp-dp") == &mesh.group("dp-tp");
    right[static_cast<std::size_t>(world.rank())] = same ? 1 : 0;
  });
  EXPECT_EQ(right, std::vector<int>(8, 1));
}

TEST(DeviceMesh, ItsCallsAreInTheLedgerOfTheWorld) {
  run_ranks(4, [](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"dp", "tp"}, {2, 2}));
    mesh.group("tp").all_reduce(Tensor::zeros({6})).wait();
    SB_CHECK(world.records().size() == 1, "one record");
    SB_CHECK(world.records()[0].group == "tp", "of the tp group");
  });
}

TEST(DeviceMesh, NeedsAsManyRanksAsTheTopology) {
  try {
    run_ranks(3, [](ProcessGroup& world) {
      DeviceMesh mesh(world, Topology({"dp", "tp"}, {2, 2}));
    });
    FAIL() << "3 ranks are no mesh of 4";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "device mesh dp=2 x tp=2 needs 4 ranks, and group 'world' has "
                 "3");
  }
}

}  // namespace
}  // namespace shardbook
