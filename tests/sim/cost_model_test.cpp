// Costs of messages; operation_cost_test.cpp has operations. Longer messages of
// published tables are in tests/validate.

#include "sim/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/validate/published_table.h"
#include "core/check.h"
#include "sim/internal/sources.h"

namespace shardbook::sim {
namespace {

std::string table_file(const std::string& name) {
  return std::string(SHARDBOOK_ROOT) + "/bench/validate/" + name;
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

double all_reduce_s(const CostModel& costs, double bytes, int ranks) {
  return costs.collective(CommOp::kAllReduce, bytes, first_ranks(ranks))
      .seconds;
}

/// A step of training sends 16 MB and more.
constexpr double kLargeBytes = 16e6;
// The messages of a DDP bucket or an FSDP layer. NCCL uses LL128 too long on
// the V100, which the rows between 4 and 12 MB show.
TEST(PublishedAllReduceBelowSixteenMegabytes, IsWithinAQuarter) {
  int count = 0;
  double sum = 0;
  for (const validate::Row& row :
       validate::open_table(table_file("nccl_allreduce_lut_a100_v100.csv"))
           .rows) {
    const double bytes = row.number("size_bytes");
    if (bytes >= kLargeBytes) continue;
    const bool is_a100 = row.text("gpu") == "A100";
    const CostModel costs(Cluster::read(is_a100 ? "dgx-a100" : "dgx-v100"));
    const int ranks = row.integer("ranks");
    const double error =
        all_reduce_s(costs, bytes, ranks) / (row.number("time_us") * 1e-6) - 1;
    EXPECT_LT(std::abs(error), is_a100 ? 0.25 : 0.10)
        << row.text("gpu") << ", " << ranks << " ranks, " << bytes << " bytes";
    ++count;
    sum += std::abs(error);
  }
  EXPECT_EQ(count, 42);
  EXPECT_LT(sum / count, 0.06);
}

TEST(CostModel, WithoutARingGoesOverPcie) {
  const CostModel costs(Cluster::read("dgx-v100"));
  EXPECT_EQ(costs.link({0, 1}).name, "nvlink");
  EXPECT_EQ(costs.link({0, 5}).name, "pcie");
  EXPECT_EQ(costs.link({0, 8}).name, "network");
  EXPECT_GT(costs.message(1e8, 0, 5).seconds, costs.message(1e8, 0, 1).seconds);
}

// --- Messages ---------------------------------------------------------------

constexpr CommOp kCollectives[] = {
    CommOp::kAllReduce, CommOp::kReduceScatter, CommOp::kAllGather,
    CommOp::kBroadcast, CommOp::kReduce,        CommOp::kScatter,
    CommOp::kGather,    CommOp::kAllToAll,      CommOp::kAllToAllV,
    CommOp::kSend,      CommOp::kRecv,          CommOp::kBarrier};

TEST(CostModel, EveryCollectiveTakesTimeAndMoreBytesMore) {
  for (const std::string& preset : internal::names_in("clusters")) {
    const CostModel costs(Cluster::read(preset));
    for (const int size : {2, 3, 4, 8, 16}) {
      if (size > costs.cluster().num_devices()) continue;
      for (const CommOp op : kCollectives) {
        double last = 0;
        for (const double bytes : {0.0, 1e3, 1e5, 1e7, 1e9}) {
          const Cost cost = costs.collective(op, bytes, first_ranks(size));
          EXPECT_TRUE(std::isfinite(cost.seconds));
          EXPECT_GT(cost.seconds, 1e-6);
          EXPECT_GE(cost.seconds, last)
              << preset << ": " << comm_op_name(op) << " over " << size;
          EXPECT_STRNE(cost.setup, "");
          last = cost.seconds;
        }
        EXPECT_TRUE(op == CommOp::kBarrier || last > 1e-3);
      }
    }
  }
}

TEST(CostModel, NobodyBeatsTheLinks) {
  for (const std::string& preset : internal::names_in("clusters")) {
    const CostModel costs(Cluster::read(preset));
    const Cluster& cluster = costs.cluster();
    double out = cluster.intra_node.bytes_per_s;
    if (!cluster.mesh.empty()) out *= 6;
    const int size = cluster.devices_per_node;
    constexpr double kBytes = 1e9;
    for (const CommOp op : {CommOp::kReduceScatter, CommOp::kAllGather,
                            CommOp::kScatter, CommOp::kAllToAll}) {
      EXPECT_GT(costs.collective(op, kBytes, first_ranks(size)).seconds,
                kBytes * (size - 1) / size / out)
          << preset << ": " << comm_op_name(op);
    }
  }
}

TEST(CostModel, AllReduceIsReduceScatterAndAllGather) {
  const CostModel costs(Cluster::read("dgx-a100"));
  constexpr double kBytes = 4e9;
  const double parts =
      costs.collective(CommOp::kReduceScatter, kBytes, first_ranks(8)).seconds +
      costs.collective(CommOp::kAllGather, kBytes, first_ranks(8)).seconds;
  EXPECT_NEAR(parts / all_reduce_s(costs, kBytes, 8), 1, 0.01);
}

TEST(CostModel, GroupsShareTheirNodesNetwork) {
  const CostModel costs(Cluster::read("dgx-a100"));
  constexpr double kBytes = 8e9;
  // A group of one device per node has one NIC; a whole node has eight.
  std::vector<int> rail;
  for (int node = 0; node < 8; ++node) rail.push_back(8 * node);
  const double alone =
      costs.collective(CommOp::kAllGather, kBytes, rail).seconds;
  const double whole =
      costs.collective(CommOp::kAllGather, kBytes, first_ranks(64)).seconds;
  EXPECT_NEAR(kBytes * 7 / 8 / alone, 24e9, 1e9);
  EXPECT_NEAR(kBytes * 63 / 64 / whole, 192e9, 8e9);
  // The same for messages: four devices per NIC pair on the DGX-1.
  const CostModel dgx1(Cluster::read("dgx-v100"));
  EXPECT_NEAR(1e9 / dgx1.message(1e9, 0, 8).seconds, 6e9, 0.1e9);
}

TEST(CostModel, ChoosesAsNcclDoes) {
  const CostModel a100(Cluster::read("dgx-a100"));
  auto setup = [](const CostModel& costs, double bytes, int ranks) {
    return std::string(
        costs.collective(CommOp::kAllReduce, bytes, first_ranks(ranks)).setup);
  };
  EXPECT_EQ(setup(a100, 1e3, 8), "ring, LL");
  EXPECT_EQ(setup(a100, 4e6, 8), "ring, LL128");
  EXPECT_EQ(setup(a100, 1e9, 8), "ring, Simple");
  EXPECT_EQ(setup(a100, 1e3, 1024), "tree, LL");
  EXPECT_EQ(setup(a100, 8e9, 1024), "ring, Simple");
  EXPECT_EQ(setup(CostModel(Cluster::read("dgx-h100")), 1e9, 8),
            "in the switch");
}

TEST(CostModel, LatencyGrowsWithTheRing) {
  const CostModel costs(Cluster::read("selene"));
  auto gather = [&](int ranks) {
    return costs.collective(CommOp::kAllGather, 1e9, first_ranks(ranks));
  };
  const double bandwidth_s = 1e9 / 192e9;
  EXPECT_NEAR(gather(16).seconds / bandwidth_s, 1, 0.05);
  EXPECT_GT(gather(2048).seconds / bandwidth_s, 1.4);
  // Lists of tensors are slower still: ZeRO-3's collapse at scale.
  const CostModel listed(Cluster::read("selene+deepspeed-2021"));
  EXPECT_GT(
      listed.collective(CommOp::kAllGather, 1e9, first_ranks(2048)).seconds,
      10 * bandwidth_s);
}

TEST(CostModel, SaysHowFarItIsToBeTrusted) {
  const CostModel costs(Cluster::read("dgx-a100"));
  auto trust = [&](CommOp op, double bytes, int ranks) {
    return costs.collective(op, bytes, first_ranks(ranks)).trust;
  };
  EXPECT_EQ(trust(CommOp::kAllReduce, 1e8, 8), Trust::kCalibrated);
  EXPECT_EQ(trust(CommOp::kAllReduce, 1e2, 8), Trust::kInterpolated);
  EXPECT_EQ(trust(CommOp::kAllToAll, 1e8, 8), Trust::kInterpolated);
  EXPECT_EQ(trust(CommOp::kAllReduce, 1e8, 64), Trust::kInterpolated);
  EXPECT_EQ(trust(CommOp::kAllReduce, 1e8, 1024), Trust::kExtrapolated);
}

TEST(CostModel, RanksBeyondTheClusterAreErrors) {
  const CostModel costs(Cluster::read("kaggle-t4x2"));
  EXPECT_THROW(costs.collective(CommOp::kAllReduce, 1, {0, 2}), Error);
  EXPECT_THROW(costs.collective(CommOp::kAllReduce, 1, {-1, 0}), Error);
  EXPECT_THROW(costs.message(1, 0, 7), Error);
  EXPECT_EQ(costs.collective(CommOp::kAllReduce, 1e9, {1}).seconds, 0);
}

TEST(CostModel, FaultsSlowTheirRank) {
  Cluster cluster = Cluster::read("dgx-a100");
  cluster.faults = {{3, 1.5, 2}, {4, 1, 3}};
  const CostModel costs(cluster);
  EXPECT_DOUBLE_EQ(costs.compute_slowdown(3), 1.5);
  EXPECT_DOUBLE_EQ(costs.compute_slowdown(2), 1);
  EXPECT_DOUBLE_EQ(costs.link_slowdown({0, 3}), 2);
  EXPECT_DOUBLE_EQ(costs.link_slowdown({3, 4}), 3);
  EXPECT_DOUBLE_EQ(costs.link_slowdown({0, 1}), 1);
}

// --- The textbook's cluster --------------------------------------------------

TEST(Textbook, MessagesTakeLatencyPlusBytesOverBandwidth) {
  const CostModel costs(Cluster::read("textbook"));
  constexpr double kAlpha = 5e-6, kBeta = 1e11;
  const double bytes = 8e6;
  EXPECT_DOUBLE_EQ(costs.message(bytes, 0, 1023).seconds,
                   kAlpha + bytes / kBeta);
  EXPECT_EQ(costs.message(bytes, 3, 3).seconds, 0);
  for (const int n : {2, 4, 8}) {
    std::vector<int> ranks;
    for (int r = 0; r < n; ++r) ranks.push_back(100 * r);
    const auto seconds = [&](CommOp op) {
      return costs.collective(op, bytes, ranks).seconds;
    };
    const double part = kAlpha + bytes / n / kBeta;
    EXPECT_DOUBLE_EQ(seconds(CommOp::kAllReduce), 2 * (n - 1) * part);
    EXPECT_DOUBLE_EQ(seconds(CommOp::kAllGather), (n - 1) * part);
    EXPECT_DOUBLE_EQ(seconds(CommOp::kReduceScatter), (n - 1) * part);
    EXPECT_DOUBLE_EQ(seconds(CommOp::kAllToAll), (n - 1) * part);
    EXPECT_DOUBLE_EQ(seconds(CommOp::kBroadcast),
                     std::log2(n) * (kAlpha + bytes / kBeta));
    EXPECT_DOUBLE_EQ(seconds(CommOp::kBarrier), 2 * (n - 1) * kAlpha);
  }
  EXPECT_EQ(costs.collective(CommOp::kAllReduce, bytes, {5}).seconds, 0);
}

}  // namespace
}  // namespace shardbook::sim
