// Messages of different groups on the links of one simulated world.

#include "sim/shared_network.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "comm/device_mesh.h"
#include "core/check.h"
#include "core/ops.h"
#include "sim/steady_state.h"
#include "tests/sim/sim_support.h"
#include "tests/support/errors.h"

namespace shardbook::test {
namespace {

using sim::RankTimeline;
using sim::TimelineEvent;

// Two devices of a node share each NIC; nodes have a switch.
sim::Cluster two_per_nic(int nodes) {
  sim::Cluster cluster = plain_cluster();
  cluster.num_nodes = nodes;
  cluster.nics_per_node = 2;
  return cluster;
}

// All-reduces of 1 MB over the columns {0, 4}, {1, 5}, ... of two nodes: on
// device 0 alone, or on all four.
double column_seconds(const sim::WorldOptions& options, int num_columns) {
  const auto ranks = timelines(8, options, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"node", "local"}, {2, 4}));
    if (world.rank() % 4 >= num_columns) return;
    mesh.group("node").all_reduce(Tensor::empty({250000})).wait();
  });
  return duration_s(find_event(ranks.at(0), "all_reduce"));
}

TEST(SharedNetwork, RingsOfOneNodeShareItsNics) {
  const auto options = plain_world("sim", two_per_nic(2));
  const sim::Cost price =
      options.cost->collective(CommOp::kAllReduce, 1e6, {0, 4});
  // The formula assumes that all devices of the node communicate at once
  const double latency = price.seconds - price.transfer_s;
  ASSERT_GT(price.transfer_s, 2 * latency);
  EXPECT_NEAR(column_seconds(options, 4), price.seconds, 1e-9 * price.seconds);
  // Columns 0 and 1 share a NIC; column 0 alone has the whole NIC
  EXPECT_NEAR(column_seconds(options, 2), price.seconds, 1e-9 * price.seconds);
  EXPECT_NEAR(column_seconds(options, 1), latency + price.transfer_s / 2,
              1e-9 * price.seconds);
}

TEST(SharedNetwork, OnTheTextbookClusterNothingIsShared) {
  const auto options = plain_world("sim", sim::Cluster::read("textbook"));
  const double price =
      options.cost->collective(CommOp::kAllReduce, 1e6, {0, 4}).seconds;
  EXPECT_EQ(column_seconds(options, 4), price);
  EXPECT_EQ(column_seconds(options, 1), price);
}

// Device 0 sends to the next node while its column all-reduces.
TEST(SharedNetwork, AMessageSharesTheNicWithAnAllReduce) {
  sim::Cluster cluster = two_per_nic(2);
  cluster.nics_per_node = 4;
  const auto options = plain_world("sim", cluster);
  const auto with_message = [&](bool sends) {
    return timelines(8, options, [&](ProcessGroup& world) {
      DeviceMesh mesh(world, Topology({"node", "local"}, {2, 4}));
      if (world.rank() % 4 != 0) return;
      ProcessGroup& column = mesh.group("node");
      Work reduced = column.all_reduce(Tensor::empty({1000000}));
      const Tensor x = Tensor::empty({250000});
      if (sends && world.rank() == 0) world.send(x, 4).wait();
      if (sends && world.rank() == 4) world.recv(x, 0).wait();
      reduced.wait();
    });
  };
  const double alone =
      duration_s(find_event(with_message(false).at(0), "all_reduce"));
  const auto both = with_message(true);
  const sim::Cost message = options.cost->message(1e6, 0, 4);
  const sim::Cost reduce =
      options.cost->collective(CommOp::kAllReduce, 4e6, {0, 4});
  // The message has the whole NIC until the all-reduce's latency is over, then
  // half of it: both are delayed equally
  const double longer = message.seconds - (reduce.seconds - reduce.transfer_s);
  EXPECT_NEAR(duration_s(find_event(both.at(0), "all_reduce")), alone + longer,
              1e-9 * alone);
  EXPECT_NEAR(duration_s(find_event(both.at(0), "send")),
              message.seconds + longer, 1e-9 * alone);
  EXPECT_EQ(find_event(both.at(4), "recv").end_s,
            find_event(both.at(0), "send").end_s);
}

TEST(SharedNetwork, GroupsOnOtherNodesAndPortsDoNotMeet) {
  const auto options = plain_world("sim", plain_cluster());
  const auto ranks = timelines(8, options, [](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"node", "pair", "local"}, {2, 2, 2}));
    mesh.group("local").all_reduce(Tensor::empty({250000})).wait();
  });
  const double price =
      options.cost->collective(CommOp::kAllReduce, 1e6, {0, 1}).seconds;
  for (const auto& [rank, timeline] : ranks) {
    EXPECT_EQ(find_event(timeline, "all_reduce").end_s, price) << rank;
  }
}

// --- Folded ------------------------------------------------------------------

// A data- and tensor-parallel pipeline over `stages` stages of 2 x 2 ranks: one
// layer's gradients travel while the next layer computes and its tensor group
// all-reduces, and a message to the next stage shares the NICs.
void hybrid_step(ProcessGroup& world, int stages) {
  DeviceMesh mesh(world, Topology({"pp", "dp", "tp"}, {stages, 2, 2}));
  ProcessGroup &pp = mesh.group("pp"), &dp = mesh.group("dp"),
               &tp = mesh.group("tp");
  const Tensor small = Tensor::empty({20000}), large = Tensor::empty({100000});
  std::vector<Work> works;
  for (int layer = 0; layer < 3; ++layer) {
    compute_for(20 + 30 * pp.rank());
    tp.all_reduce(small, ReduceOp::kSum, "tp").wait();
    works.push_back(dp.all_reduce(large, ReduceOp::kSum, "dp"));
    if (pp.rank() + 1 < stages) works.push_back(pp.send(large, pp.rank() + 1));
    if (pp.rank() > 0) pp.recv(large, pp.rank() - 1).wait();
  }
  for (Work& each : works) each.wait();
}

void expect_folded_equals_all(int stages, sim::Cluster cluster) {
  sim::WorldOptions options = plain_world("sim", cluster);
  const int size = 4 * stages;
  options.num_recorded_ranks = size;
  const auto body = [&](ProcessGroup& world) { hybrid_step(world, stages); };
  const auto all = timelines(size, options, body);
  options.fold_class = [](int rank) { return rank / 4; };
  const auto folded = timelines(size, options, body);
  ASSERT_EQ(all.size(), static_cast<std::size_t>(size));
  ASSERT_EQ(folded.size(), static_cast<std::size_t>(stages));
  options.shares_links = false;
  const auto alone = timelines(size, options, body);
  bool differs = false;
  for (const auto& [rank, timeline] : folded) {
    const auto& events = all.at(rank).events;
    ASSERT_EQ(events.size(), timeline.events.size());
    for (std::size_t i = 0; i < events.size(); ++i) {
      EXPECT_EQ(events[i].name, timeline.events[i].name);
      EXPECT_NEAR(events[i].begin_s, timeline.events[i].begin_s, 1e-12);
      EXPECT_NEAR(events[i].end_s, timeline.events[i].end_s, 1e-12);
      differs |=
          std::abs(alone.at(rank).events[i].end_s - events[i].end_s) > 1e-6;
    }
    for (const auto& [other, all_of_it] : all) {
      if (other / 4 != rank / 4) continue;
      EXPECT_NEAR(all_of_it.steps[1], timeline.steps[1], 1e-12) << other;
    }
  }
  EXPECT_TRUE(differs) << "nothing was shared";
}

TEST(SimWorld, RecordsRanksFromTheFirstToTheLastThatStandForOthers) {
  sim::WorldOptions options = plain_world("sim", plain_cluster());
  options.fold_class = [](int rank) { return rank % 5; };
  options.num_recorded_ranks = 3;
  const auto ranks =
      timelines(8, options, [](ProcessGroup&) { compute_for(1); });
  ASSERT_EQ(ranks.size(), 5u);
  for (const auto& [rank, timeline] : ranks) {
    EXPECT_EQ(timeline.events.empty(), rank % 2 == 1) << rank;
  }
  EXPECT_EQ(ranks.at(0).alike, (std::vector<int>{5}));
  EXPECT_EQ(ranks.at(4).alike, (std::vector<int>{}));
  EXPECT_EQ(ranks.at(4).world_size, 8);
}

TEST(SharedNetwork, FoldedRanksTakeTheTimeOfAll) {
  // A stage per node, where tensor and data groups share ports
  expect_folded_equals_all(2, two_per_nic(2));
  expect_folded_equals_all(4, two_per_nic(4));
  // A stage over two nodes of two devices: data groups cross nodes
  sim::Cluster narrow = two_per_nic(8);
  narrow.devices_per_node = 2;
  narrow.nics_per_node = 1;
  expect_folded_equals_all(2, narrow);
  expect_folded_equals_all(4, narrow);
  narrow.nics_per_node = 2;
  expect_folded_equals_all(4, narrow);
}

// --- Worlds ------------------------------------------------------------------

// Rank 0 sends when the network has moved on to the end of another message.
TEST(SharedNetwork, ALateMessageHasSharedItsNicWithItsClass) {
  auto options = plain_world("sim", two_per_nic(3));
  options.fold_class = [](int rank) { return rank / 4 * 4; };
  const auto ranks = timelines(12, options, [](ProcessGroup& world) {
    const Tensor x = Tensor::empty({250000}), large = Tensor::empty({2500000});
    if (world.rank() == 8) world.send(large, 4).wait();
    if (world.rank() == 4) world.recv(large, 8).wait();
    world.exchange("");
    if (world.rank() == 0) world.send(x, 8).wait();
    if (world.rank() == 8) world.recv(x, 0).wait();
  });
  const TimelineEvent& late = find_event(ranks.at(0), "send");
  ASSERT_LT(late.end_s, find_event(ranks.at(8), "send").end_s);
  const double price = options.cost->message(1e6, 0, 8).seconds;
  EXPECT_NEAR(duration_s(late), price, 1e-9 * price);
}

TEST(SharedNetwork, RepeatedWorkTakesAsLongAsAllOfIt) {
  const auto options = plain_world("sim", two_per_nic(4));
  const auto step_s = [&](bool repeats) {
    const auto ranks = timelines(16, options, [&](ProcessGroup& world) {
      const auto body = [&](std::int64_t) { hybrid_step(world, 4); };
      if (repeats) {
        sim::repeat(world, 40, body);
      } else {
        for (int i = 0; i < 40; ++i) body(i);
      }
      world.all_reduce(Tensor::empty({1000})).wait();
    });
    return ranks.at(0).steps[1];
  };
  EXPECT_NEAR(step_s(true), step_s(false), 1e-9 * step_s(false));
}

TEST(SharedNetwork, ARankThatFailsStopsThoseThatWaitForMessages) {
  const auto options = plain_world("sim", two_per_nic(2));
  const std::string error = error_of([&] {
    timelines(8, options, [](ProcessGroup& world) {
      DeviceMesh mesh(world, Topology({"node", "local"}, {2, 4}));
      mesh.group("node").all_reduce(Tensor::empty({250000})).wait();
      SB_CHECK(world.rank() != 3, "rank 3 has had enough");
      mesh.group("local").all_reduce(Tensor::empty({250000})).wait();
      world.barrier();
    });
  });
  expect_text(error, {"had enough"});
}

}  // namespace
}  // namespace shardbook::test
