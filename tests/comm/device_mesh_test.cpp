#include "comm/device_mesh.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/support/on_ranks.h"

namespace shardbook {
namespace {

// Sum of the world ranks in a group, by world rank.
std::vector<double> sums(const std::string& axes) {
  return on_ranks(8, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology::megatron(2, 1, 2, 2));
    const Tensor x = Tensor::full({1}, world.rank());
    mesh.group(axes).all_reduce(x).wait();
    return x.item();
  });
}

TEST(DeviceMesh, EveryAxisIsAGroup) {
  EXPECT_EQ(sums("tp"), (std::vector<double>{1, 1, 5, 5, 9, 9, 13, 13}));
  EXPECT_EQ(sums("dp"), (std::vector<double>{2, 4, 2, 4, 10, 12, 10, 12}));
  EXPECT_EQ(sums("pp"), (std::vector<double>{4, 6, 8, 10, 4, 6, 8, 10}));
  EXPECT_EQ(sums("cp"), (std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(DeviceMesh, SeveralAxesAreAGroup) {
  EXPECT_EQ(sums("dp-tp"), (std::vector<double>{6, 6, 6, 6, 22, 22, 22, 22}));
  EXPECT_EQ(sums("tp-cp-dp-pp"), std::vector<double>(8, 28));
}

TEST(DeviceMesh, GroupsKnowTheirNamesAndCoordinates) {
  on_ranks(8, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology::megatron(2, 1, 2, 2));
    for (const char* axis : {"tp", "cp", "dp", "pp"}) {
      SB_CHECK(mesh.group(axis).rank() == mesh.coordinate(axis) &&
                   mesh.group(axis).size() == mesh.size(axis) &&
                   mesh.group(axis).name() == axis,
               axis);
    }
    SB_CHECK(&mesh.group("tp-dp") == &mesh.group("dp-tp"),
             "the order of the axes does not matter");
    return 0;
  });
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
  EXPECT_EQ(
      error_on_ranks(3,
                     [](ProcessGroup& world) {
                       DeviceMesh mesh(world, Topology({"dp", "tp"}, {2, 2}));
                     }),
      "device mesh dp=2 x tp=2 needs 4 ranks, and group 'world' has 3");
}

}  // namespace
}  // namespace shardbook
