#include "sim/rings.h"

#include <gtest/gtest.h>

#include <vector>

#include "sim/cost_model.h"

namespace shardbook::sim {
namespace {

TEST(NumRings, OfTheDgx1AreNcclsOwn) {
  const std::vector<MeshLink> mesh = Cluster::read("dgx-v100").mesh;
  EXPECT_EQ(num_rings(mesh, {0, 1, 2, 3, 4, 5, 6, 7}), 6);
  EXPECT_EQ(num_rings(mesh, {0, 1, 2, 3}), 4);
  EXPECT_EQ(num_rings(mesh, {0, 1}), 1);
  EXPECT_EQ(num_rings(mesh, {0, 3}), 2);
  EXPECT_EQ(num_rings(mesh, {0, 1, 2}), 2);
}

// Of 0 to 4, device 4 has links to 0 only: 3-7-4 and 4-5-1 close rings.
TEST(NumRings, OfTheDgx1MayPassThroughADeviceOutside) {
  const Cluster cluster = Cluster::read("dgx-v100");
  EXPECT_EQ(num_rings(cluster.mesh, {0, 1, 2, 3, 4}), 4);
  const CostModel costs(cluster);
  EXPECT_EQ(costs.link({0, 1, 2, 3, 4}).name, "nvlink");
  // Four rings as among 0 to 3, with a little more to send
  const double four =
      costs.collective(CommOp::kAllReduce, 1e9, {0, 1, 2, 3}).seconds;
  const double five =
      costs.collective(CommOp::kAllReduce, 1e9, {0, 1, 2, 3, 4}).seconds;
  EXPECT_GT(five, four);
  EXPECT_LT(five, 1.1 * four);
  // One link from each end to a device outside: one ring
  const std::vector<MeshLink> around = {
      {0, 1, 2}, {1, 2, 2}, {2, 3, 1}, {3, 0, 1}};
  EXPECT_EQ(num_rings(around, {0, 1, 2}), 2);
}

TEST(NumRings, AreNoneWhereTheRoundDoesNotClose) {
  const std::vector<MeshLink> chain = {{0, 1, 2}, {1, 2, 2}};
  EXPECT_EQ(num_rings(chain, {0, 1, 2}), 0);
  EXPECT_EQ(num_rings(chain, {0, 2}), 0);
  EXPECT_EQ(num_rings(chain, {1}), 0);
  // Two devices are enough for one ring: out and back.
  EXPECT_EQ(num_rings(chain, {1, 2}), 2);
}

TEST(NumRings, FollowTheThinnestLink) {
  // The picture of rings.h.
  const std::vector<MeshLink> square = {
      {0, 1, 2}, {1, 3, 1}, {3, 2, 2}, {2, 0, 1}};
  EXPECT_EQ(num_rings(square, {0, 1, 2, 3}), 2);
}

}  // namespace
}  // namespace shardbook::sim
