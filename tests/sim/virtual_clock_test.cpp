// One rank's queues: dependencies and overlap.

#include "sim/virtual_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/ops.h"
#include "core/stream.h"
#include "tests/sim/sim_support.h"

namespace shardbook::test {
namespace {

using sim::ClockScope;
using sim::CostModel;

class VirtualClock : public ::testing::Test {
 protected:
  void SetUp() override { start(); }
  void start(const sim::Cluster& cluster = plain_cluster(), int rank = 0) {
    // A second start ends the scopes of the first one, the innermost first
    clock_scope_.reset();
    scope_.reset();
    model_ = std::make_unique<CostModel>(cluster);
    context_ = std::make_unique<RankContext>(Device::meta(rank), rank);
    scope_ = std::make_unique<RankContext::Scope>(*context_);
    clock_scope_ = std::make_unique<ClockScope>(*model_, rank, true);
  }
  sim::TimeSummary summary() { return clock().main().summary(); }
  sim::VirtualClock& clock() { return clock_scope_->clock(); }
  double now_us() { return clock().now_s() * 1e6; }

  std::unique_ptr<CostModel> model_;
  std::unique_ptr<RankContext> context_;
  std::unique_ptr<RankContext::Scope> scope_;
  std::unique_ptr<ClockScope> clock_scope_;
};

TEST_F(VirtualClock, OneQueueRunsOneAfterAnother) {
  compute_for(10);
  compute_for(5);
  EXPECT_NEAR(now_us(), 15, 1e-6);
  EXPECT_EQ(clock().main().timeline().events.size(), 2u);
}

TEST_F(VirtualClock, StreamsRunSideBySide) {
  compute_for(10);
  {
    StreamScope side(kUnshardStream);
    compute_for(8);
  }
  EXPECT_NEAR(now_us(), 10, 1e-6);
}

TEST_F(VirtualClock, AnEventOrdersTwoStreams) {
  compute_for(10);
  Event computed;
  computed.record();
  {
    StreamScope side(kUnshardStream);
    computed.wait();
    compute_for(8);
  }
  EXPECT_NEAR(now_us(), 18, 1e-6);
}

TEST_F(VirtualClock, TheHostRunsAheadUntilLaunchesAreTheLimit) {
  start(plain_cluster(/*launch_s=*/3e-6));
  for (int i = 0; i < 4; ++i) compute_for(10);
  EXPECT_NEAR(now_us(), 3 + 4 * 10, 1e-6);
  for (int i = 0; i < 100; ++i)
    compute_for(1);  // launches take longer than work
  EXPECT_NEAR(now_us(), 3 * 104 + 1, 1e-6);
}

TEST_F(VirtualClock, ReadingAValueHoldsTheHostBack) {
  start(plain_cluster(/*launch_s=*/3e-6));
  const Tensor x = Tensor::zeros({1});
  compute_for(10);
  x.item();
  const double read = now_us();
  compute_for(10);
  EXPECT_NEAR(now_us(), read + 3 + 10, 1e-6);
}

TEST_F(VirtualClock, AnEventMayHoldTheHostBack) {
  start(plain_cluster(/*launch_s=*/1e-6));
  Event freed;
  compute_for(20);
  freed.record();
  freed.synchronize();
  StreamScope side(kUnshardStream);
  compute_for(5);
  EXPECT_NEAR(now_us(), 1 + 20 + 1 + 5, 1e-6);
}

// A checkpoint is loaded before the first step.
TEST_F(VirtualClock, EventsOfBeforeTheFirstStepHavePassed) {
  Event loaded;
  compute_for(100);
  loaded.record();
  clock().begin_steps();
  loaded.wait();
  loaded.synchronize();
  compute_for(7);
  EXPECT_NEAR(now_us(), 7, 1e-6);
}

TEST_F(VirtualClock, ACopyToTheHostTakesTheHostsLink) {
  const Tensor x = Tensor::empty({250});
  const Tensor y = Tensor::empty({250}, {DType::kF32, context_->host()});
  y.copy_from(x);  // 1000 bytes at 100 MB/s and a latency of 1 us
  EXPECT_NEAR(now_us(), 11, 1e-6);
  const auto links = summary().links;
  EXPECT_TRUE(links.empty());  // no step has ended
  clock().end_step();
  ASSERT_EQ(summary().links.size(), 1u);
  EXPECT_EQ(summary().links[0].link, "pcie");
  EXPECT_EQ(summary().links[0].bytes, 1000);
}

TEST_F(VirtualClock, StepsAreCountedFromTheirBegin) {
  compute_for(100);  // before the first step
  clock().begin_steps();
  compute_for(7);
  clock().end_step();
  compute_for(10);
  {
    StreamScope side(kUnshardStream);
    compute_for(40);
  }
  clock().end_step();
  EXPECT_NEAR(summary().step_s * 1e6, 40, 1e-6);
  EXPECT_NEAR(summary().idle_share, 0.75, 1e-9);
}

TEST_F(VirtualClock, AStragglerTakesItsTimes) {
  sim::Cluster cluster = plain_cluster();
  cluster.faults.push_back({/*rank=*/1, /*compute_slowdown=*/3, 1});
  start(cluster, 1);
  compute_for(10);
  EXPECT_NEAR(now_us(), 30, 1e-6);
}

TEST_F(VirtualClock, JitterDependsOnSeedRankAndOperationOnly) {
  const auto run = [this](std::uint64_t seed, int rank) {
    sim::Cluster cluster = plain_cluster();
    cluster.jitter = 0.5;
    cluster.jitter_seed = seed;
    start(cluster, rank);
    for (int i = 0; i < 10; ++i) compute_for(10);
    return now_us();
  };
  EXPECT_EQ(run(1, 0), run(1, 0));
  EXPECT_NE(run(1, 0), run(2, 0));
  EXPECT_NE(run(1, 0), run(1, 1));
  EXPECT_GT(run(1, 0), 100);
  EXPECT_LT(run(1, 0), 150);
}

TEST_F(VirtualClock, AWaitIsABubbleUntilTheMessageIsSent) {
  compute_for(10);
  clock().wait_message(14e-6, 17e-6);
  compute_for(3);
  clock().end_step();
  EXPECT_NEAR(summary().bubble_s * 1e6, 4, 1e-6);
  EXPECT_NEAR(summary().exposed_comm_s * 1e6, 3, 1e-6);
  EXPECT_NEAR(summary().idle_share, 7.0 / 20, 1e-9);
}

TEST_F(VirtualClock, AMessageThatWasSentEarlyIsExposedForItsRestOnly) {
  compute_for(10);
  clock().wait_message(2e-6, 12e-6);
  clock().wait_message(3e-6, 9e-6);  // has arrived
  clock().end_step();
  EXPECT_EQ(summary().bubble_s, 0);
  EXPECT_NEAR(summary().exposed_comm_s * 1e6, 2, 1e-6);
}

TEST_F(VirtualClock, AQueueThatWaitsForAQueueThatWaitsForAMessageWaitsForIt) {
  Event gathered;
  {
    StreamScope side(kUnshardStream);
    clock().wait_message(4e-6, 9e-6);
    gathered.record();
  }
  compute_for(2);
  gathered.wait();
  clock().end_step();
  EXPECT_NEAR(summary().bubble_s * 1e6, 2, 1e-6);
  EXPECT_NEAR(summary().exposed_comm_s * 1e6, 5, 1e-6);
}

TEST_F(VirtualClock, StepsWithoutAForwardAreNotSummedUp) {
  clock().begin_steps();
  compute_for(10);
  clock().end_step();
  {
    const PhaseScope backward(Phase::kBackward);
    compute_for(4);
  }
  clock().end_step();
  EXPECT_NEAR(summary().step_s * 1e6, 10, 1e-6);
}

// Memory for records does not grow with the run: it holds the first steps, the
// last ones, and the sums of the last.
TEST_F(VirtualClock, LongRunsKeepTheirFirstAndLastSteps) {
  using sim::DeviceClock;
  const auto run = [&](int num_steps, int ops) {
    start();
    clock().begin_steps();
    for (int step = 0; step < num_steps; ++step) {
      const sim::ActivityScope activity(std::to_string(step));
      for (int i = 0; i < ops; ++i) compute_for(1);
      clock().end_step();
    }
  };
  for (const int ops : {1, 40, 3000}) {
    SCOPED_TRACE(std::to_string(ops) + " operations");
    // Kept completely, in part, and in part
    for (const int num_steps : {20, ops == 3000 ? 60 : 1000, 1200}) {
      if (ops == 3000 && num_steps > 1000) continue;
      run(num_steps, ops);
      const sim::RankTimeline& timeline = clock().main().timeline();
      EXPECT_LE(timeline.events.size(),
                (2 + DeviceClock::kFirstSteps) * ops +
                    std::max<std::size_t>(2 * DeviceClock::kLastEvents,
                                          2 * DeviceClock::kLastSteps * ops));
      EXPECT_LE(timeline.steps.size(),
                3 + DeviceClock::kFirstSteps + 2 * DeviceClock::kMostSteps);
      EXPECT_LE(timeline.memory.size(), 3 * timeline.events.size());
      // Numbers of the recorded steps
      std::vector<int> labels;
      for (const sim::TimelineEvent& each : timeline.events) {
        const int label = std::stoi(each.label);
        if (labels.empty() || labels.back() != label) labels.push_back(label);
      }
      const auto left_out = static_cast<std::size_t>(timeline.num_left_out);
      EXPECT_EQ(labels.size() + left_out, num_steps);
      EXPECT_EQ(left_out > 0, num_steps > 20);
      for (std::size_t i = 0; i < labels.size(); ++i) {
        const bool is_first = i < DeviceClock::kFirstSteps;
        EXPECT_EQ(labels[i], i + (is_first ? 0 : left_out));
      }
      EXPECT_GE(labels.size(),
                std::min<std::size_t>(
                    20, DeviceClock::kFirstSteps + DeviceClock::kLastSteps));
      EXPECT_NEAR(timeline.steps.back() * 1e6, num_steps * ops, 1e-3);
      EXPECT_NEAR(summary().step_s * 1e6, ops, 1e-3);
      EXPECT_NEAR(summary().idle_share, 0, 1e-6);
      // The samples of the recorded steps, and one before
      const double shown_s =
          timeline.steps[timeline.steps.size() - 1 - DeviceClock::kLastSteps];
      EXPECT_TRUE(std::any_of(
          timeline.memory.begin(), timeline.memory.end(),
          [&](const auto& sample) { return sample.time_s <= shown_s; }));
    }
  }
}

// A stage that drains for many steps keeps the last step with a forward.
TEST_F(VirtualClock, DrainingKeepsTheLastForward) {
  clock().begin_steps();
  for (int step = 0; step < 1500; ++step) {
    const PhaseScope phase(step < 600 ? Phase::kForward : Phase::kBackward);
    compute_for(step < 600 ? 10 : 4);
    clock().end_step();
  }
  EXPECT_NEAR(summary().step_s * 1e6, 10, 1e-6);
}

TEST_F(VirtualClock, OperationsSayWhatTheyAreFor) {
  {
    const sim::ActivityScope activity("micro-batch 3");
    compute_for(1);
  }
  compute_for(1);
  EXPECT_EQ(clock().main().timeline().events[0].label, "micro-batch 3");
  EXPECT_EQ(clock().main().timeline().events[1].label, "");
}

// Memory that is allocated and freed at one time counts for the peak.
TEST_F(VirtualClock, TheTopOfTheCurveIsThePeak) {
  RankContext::current().device.reset_peak_memory();
  clock().begin_steps();
  const Tensor kept = Tensor::empty({100}, {DType::kF32, Device()});
  compute_for(10);
  { const Tensor gone = Tensor::empty({5000}, {DType::kF32, Device()}); }
  compute_for(10);
  std::int64_t most = 0;
  for (const sim::MemorySample& sample : clock().main().timeline().memory) {
    most = std::max(most, sample.total());
  }
  EXPECT_EQ(most, RankContext::current().device.memory().peak_total);
  EXPECT_EQ(clock().main().timeline().memory.back().total(), 400);
}

TEST_F(VirtualClock, MemoryIsSampledByKindInVirtualTime) {
  compute_for(10);
  const auto& samples = clock().main().timeline().memory;
  ASSERT_GE(samples.size(), 2u);
  const auto kind = static_cast<std::size_t>(MemoryKind::kActivation);
  EXPECT_EQ(samples.front().bytes[kind], 10000);
  EXPECT_EQ(samples.back().bytes[kind], 0);
  EXPECT_NEAR(samples.back().time_s * 1e6, 10, 1e-6);
}

}  // namespace
}  // namespace shardbook::test
