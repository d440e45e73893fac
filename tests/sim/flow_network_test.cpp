// Flows that share links by max-min fairness.

#include "sim/flow_network.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace shardbook::test {
namespace {

using sim::Flow;
using sim::FlowNetwork;
using sim::FlowRef;
using sim::LinkUse;
using sim::use_links;

// Rounding of sums of a few rates and times.
constexpr double kTolerance = 1e-12;

// A flow of `bytes` over these links at up to `max_rate`, from `ready_s` on.
Flow flow(double ready_s, double bytes, double max_rate,
          std::vector<LinkUse> uses, double latency_s = 0) {
  Flow result;
  result.ready_s = ready_s;
  result.transfer_s = bytes / max_rate;
  result.seconds = latency_s + result.transfer_s;
  result.max_rate = max_rate;
  result.uses = use_links(std::move(uses));
  return result;
}

void run_out(FlowNetwork& network) {
  while (network.advance() != nullptr) {
  }
}

// Adds the flows and runs until all have ended; returns their ends.
std::vector<double> ends(FlowNetwork& network, const std::vector<Flow>& flows) {
  std::vector<FlowRef> added;
  for (const Flow& each : flows) added.push_back(network.add(each));
  run_out(network);
  std::vector<double> result;
  for (const FlowRef& each : added) {
    EXPECT_TRUE(each->is_over);
    result.push_back(each->end_s);
  }
  return result;
}

class FlowsOverOneNic : public testing::Test {
 protected:
  FlowNetwork network;
  const int nic = network.add_link(10);
};

TEST_F(FlowsOverOneNic, AFlowThatIsAloneTakesItsTimeExactly) {
  const Flow alone = flow(0.1, 7, 3, {{nic, 1}}, 0.3);
  EXPECT_EQ(ends(network, {alone})[0], 0.1 + alone.seconds);
}

TEST_F(FlowsOverOneNic, TwoFlowsOverOneNicGetHalfEachWhileTheyOverlap) {
  // 5 bytes alone, then half the speed until the first ends at 0.5 + 1, then 5
  // bytes alone
  const auto end = ends(
      network, {flow(0, 10, 10, {{nic, 1}}), flow(0.5, 10, 10, {{nic, 1}})});
  EXPECT_NEAR(end[0], 1.5, kTolerance);
  EXPECT_NEAR(end[1], 2.0, kTolerance);
}

TEST_F(FlowsOverOneNic, LatencyDoesNotLoadALink) {
  const auto end = ends(
      network, {flow(0, 10, 10, {{nic, 1}}), flow(0, 10, 10, {{nic, 1}}, 1)});
  EXPECT_EQ(end[0], 1);
  EXPECT_EQ(end[1], 2);
}

TEST_F(FlowsOverOneNic, UnequalDemandsGetTheirMaxMinShares) {
  std::vector<FlowRef> flows;
  for (const double demand : {2.0, 4.0, 9.0}) {
    flows.push_back(network.add(flow(0, 100, demand, {{nic, 1}})));
  }
  // The rates 2, 4, 4; then 4, 6 when the second has ended: 4 + 6, then 2 + 8
  std::vector<double> end;
  while (network.advance() != nullptr) {
    EXPECT_LE(network.load(nic), network.capacity(nic) * (1 + kTolerance));
  }
  for (const FlowRef& each : flows) end.push_back(each->end_s);
  EXPECT_NEAR(end[0], 50, kTolerance * 100);
  EXPECT_NEAR(end[1], 25, kTolerance * 100);
  EXPECT_NEAR(end[2], 25, kTolerance * 100);
}

// Bertsekas and Gallager, Data Networks, section 6.5: a flow that crosses a
// narrow link leaves more of the wide link to others.
TEST(FlowNetwork, AFlowThatIsHeldUpElsewhereLeavesTheRestToTheOthers) {
  FlowNetwork network;
  const int narrow = network.add_link(2), wide = network.add_link(10);
  const auto end = ends(
      network, {flow(0, 10, 10, {{narrow, 1}, {wide, 1}}),
                flow(0, 10, 10, {{narrow, 1}}), flow(0, 90, 10, {{wide, 1}})});
  EXPECT_NEAR(end[0], 10, 1e-10);  // half of the narrow link: 1
  EXPECT_NEAR(end[1], 10, 1e-10);
  EXPECT_NEAR(end[2], 10, 1e-10);  // 10 - 1 = 9
}

TEST_F(FlowsOverOneNic, StreamsCountOnTheirLink) {
  // Seven groups in lock-step, represented by one flow, and an eighth flow
  const auto end =
      ends(network, {flow(0, 10, 10, {{nic, 7}}), flow(0, 10, 10, {{nic, 1}})});
  EXPECT_NEAR(end[0], 8, kTolerance * 10);
  EXPECT_NEAR(end[1], 8, kTolerance * 10);
}

TEST(FlowNetwork, DisjointLinksAreNotShared) {
  FlowNetwork network;
  const int up = network.add_link(10), down = network.add_link(10);
  const Flow first = flow(0, 10, 9, {{up, 1}}, 0.1);
  const Flow second = flow(0.25, 10, 9, {{down, 1}}, 0.1);
  const auto end = ends(network, {first, second});
  EXPECT_EQ(end[0], first.seconds);
  EXPECT_EQ(end[1], 0.25 + second.seconds);
}

TEST_F(FlowsOverOneNic, AFlowFollowsTheOneBeforeItOnItsQueue) {
  const FlowRef first = network.add(flow(0, 10, 10, {{nic, 1}}));
  const FlowRef second = network.add(flow(0, 10, 10, {{nic, 1}}), first);
  const FlowRef third = network.add(flow(5, 10, 10, {{nic, 1}}), second);
  run_out(network);
  EXPECT_EQ(second->begin_s, 1);
  EXPECT_EQ(second->end_s, 2);
  EXPECT_EQ(third->end_s, 6);
}

TEST_F(FlowsOverOneNic, ALateFlowHasRunAloneUntilNow) {
  network.add(flow(0, 10, 10, {{nic, 1}}));
  const FlowRef other = network.add(flow(1, 20, 10, {{nic, 1}}));
  network.advance();  // it is 1 s
  const FlowRef late = network.add(flow(0.5, 10, 10, {{nic, 1}}));
  run_out(network);
  EXPECT_NEAR(late->end_s, 2, kTolerance);  // 5 bytes at half
  EXPECT_NEAR(other->end_s, 3.5, kTolerance);
}

TEST_F(FlowsOverOneNic, ShiftedFlowsEndAsMuchLater) {
  network.add(flow(0, 5, 10, {{nic, 1}}));
  const FlowRef a = network.add(flow(0, 10, 10, {{nic, 1}}));
  const FlowRef b = network.add(flow(0, 10, 10, {{nic, 1}}), a);
  network.advance();
  network.shift(100);
  run_out(network);
  EXPECT_NEAR(a->end_s, 101.5, 1e-10);
  EXPECT_NEAR(b->end_s, 102.5, 1e-10);
}

// --- Random networks ---------------------------------------------------------

std::vector<Flow> random_flows(std::mt19937& random, int num_links) {
  const auto draw = [&random](int most) {
    return static_cast<int>(random() % static_cast<unsigned>(most));
  };
  std::vector<Flow> flows;
  for (int i = 0; i < 30; ++i) {
    std::vector<LinkUse> uses;
    for (int link = 0; link < num_links; ++link) {
      if (draw(3) == 0) uses.push_back({link, 1.0 + draw(3)});
    }
    flows.push_back(
        flow(draw(6), 1 + draw(50), 1 + draw(12), uses, draw(2) * 0.5));
  }
  return flows;
}

TEST(FlowNetwork, TheOrderOfFlowsOfOneInstantDoesNotMatter) {
  std::mt19937 random(1);
  for (int run = 0; run < 50; ++run) {
    const std::vector<Flow> flows = random_flows(random, 6);
    std::vector<std::size_t> order(flows.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::vector<double> expected;
    for (int shuffle = 0; shuffle < 5; ++shuffle) {
      FlowNetwork network;
      for (int link = 0; link < 6; ++link) network.add_link(5 + link);
      std::vector<Flow> shuffled;
      for (const std::size_t i : order) shuffled.push_back(flows[i]);
      const std::vector<double> end = ends(network, shuffled);
      std::vector<double> sorted(end.size());
      for (std::size_t i = 0; i < end.size(); ++i) sorted[order[i]] = end[i];
      if (expected.empty()) expected = sorted;
      for (std::size_t i = 0; i < end.size(); ++i) {
        EXPECT_NEAR(sorted[i], expected[i], 1e-9 * expected[i]) << run;
      }
      std::shuffle(order.begin(), order.end(), random);
    }
  }
}

// Between two events no link exceeds its capacity, no flow exceeds its own
// limit, and each flow either runs at that limit or crosses a full link on
// which no other flow is faster.
TEST(FlowNetwork, LinksAreNeverOverloadedAndRatesAreMaxMinFair) {
  std::mt19937 random(2);
  for (int run = 0; run < 100; ++run) {
    const int num_links = 1 + run % 7;
    FlowNetwork network;
    for (int link = 0; link < num_links; ++link) network.add_link(3 + 2 * link);
    const std::vector<Flow> flows = random_flows(random, num_links);
    std::vector<FlowRef> added;
    for (const Flow& each : flows) added.push_back(network.add(each));
    double now = 0;
    do {
      for (int link = 0; link < num_links; ++link) {
        EXPECT_LE(network.load(link), network.capacity(link) * (1 + 1e-9));
      }
      EXPECT_GE(network.now_s(), now);
      now = network.now_s();
      for (const FlowRef& each : added) {
        if (!each->is_under_way()) continue;
        const Flow& of = flows[static_cast<std::size_t>(
            std::find(added.begin(), added.end(), each) - added.begin())];
        const double rate = each->rate;
        EXPECT_GT(rate, 0);
        EXPECT_LE(rate, of.max_rate);
        if (rate == of.max_rate) continue;
        bool is_held = false;
        for (const LinkUse& use : *of.uses) {
          if (network.load(use.link) <
              network.capacity(use.link) * (1 - 1e-9)) {
            continue;
          }
          bool is_fastest = true;
          for (std::size_t i = 0; i < added.size(); ++i) {
            if (!added[i]->is_under_way()) continue;
            for (const LinkUse& theirs : *flows[i].uses) {
              is_fastest &= theirs.link != use.link ||
                            added[i]->rate <= rate * (1 + 1e-9);
            }
          }
          is_held |= is_fastest;
        }
        EXPECT_TRUE(is_held) << run;
      }
    } while (network.advance() != nullptr);
    // All bytes were sent, in no less time than the links need
    for (int link = 0; link < num_links; ++link) {
      double bytes = 0;
      for (const Flow& each : flows) {
        for (const LinkUse& use : *each.uses) {
          if (use.link != link) continue;
          bytes += use.streams * each.max_rate * each.transfer_s;
        }
      }
      EXPECT_LE(bytes / network.capacity(link), now * (1 + 1e-9));
    }
  }
}

}  // namespace
}  // namespace shardbook::test
