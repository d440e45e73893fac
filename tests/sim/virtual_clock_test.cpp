// One rank's queues: what waits for what, and what runs side by side.

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

// An operation that reads and writes 1000 bytes: 1 us at 1 GB/s (and 1 us is
// also the shortest operation).
void work(int microseconds) {
  const Tensor x = Tensor::empty({250 * microseconds}, {DType::kF32, Device()});
  x.zero();
}

class VirtualClock : public ::testing::Test {
 protected:
  void start(double launch_s = 0) {
    // A second start ends the scopes of the first one, the innermost first
    clock_scope_.reset();
    scope_.reset();
    model_ = std::make_unique<CostModel>(plain_cluster(launch_s));
    context_ = std::make_unique<RankContext>(Device::meta(0));
    scope_ = std::make_unique<RankContext::Scope>(*context_);
    clock_scope_ = std::make_unique<ClockScope>(*model_, 0, 1);
  }
  sim::VirtualClock& clock() { return clock_scope_->clock(); }
  double now_us() { return clock().now_s() * 1e6; }

  std::unique_ptr<CostModel> model_;
  std::unique_ptr<RankContext> context_;
  std::unique_ptr<RankContext::Scope> scope_;
  std::unique_ptr<ClockScope> clock_scope_;
};

TEST_F(VirtualClock, OneQueueRunsOneAfterAnother) {
  start();
  work(10);
  work(5);
  EXPECT_NEAR(now_us(), 15, 1e-6);
  EXPECT_EQ(clock().main().timeline().events.size(), 2u);
}

TEST_F(VirtualClock, StreamsRunSideBySide) {
  start();
  work(10);
  {
    StreamScope side(kUnshardStream);
    work(8);
  }
  EXPECT_NEAR(now_us(), 10, 1e-6);
}

TEST_F(VirtualClock, AnEventOrdersTwoStreams) {
  start();
  work(10);
  Event computed;
  computed.record();
  {
    StreamScope side(kUnshardStream);
    computed.wait();
    work(8);
  }
  EXPECT_NEAR(now_us(), 18, 1e-6);
}

TEST_F(VirtualClock, TheHostRunsAheadUntilLaunchesAreTheLimit) {
  start(/*launch_s=*/3e-6);
  for (int i = 0; i < 4; ++i) work(10);
  EXPECT_NEAR(now_us(), 3 + 4 * 10, 1e-6);
  for (int i = 0; i < 100; ++i) work(1);  // launches take longer than work
  EXPECT_NEAR(now_us(), 3 * 104 + 1, 1e-6);
}

TEST_F(VirtualClock, ReadingAValueHoldsTheHostBack) {
  start(/*launch_s=*/3e-6);
  const Tensor x = Tensor::zeros({1});
  work(10);
  x.item();
  const double read = now_us();
  work(10);
  EXPECT_NEAR(now_us(), read + 3 + 10, 1e-6);
}

TEST_F(VirtualClock, AnEventMayHoldTheHostBack) {
  start(/*launch_s=*/1e-6);
  Event freed;
  work(20);
  freed.record();
  freed.synchronize();
  StreamScope side(kUnshardStream);
  work(5);
  EXPECT_NEAR(now_us(), 1 + 20 + 1 + 5, 1e-6);
}

// A checkpoint is loaded before the first step.
TEST_F(VirtualClock, EventsOfBeforeTheFirstStepHavePassed) {
  start();
  Event loaded;
  work(100);
  loaded.record();
  clock().begin_steps();
  loaded.wait();
  loaded.synchronize();
  work(7);
  EXPECT_NEAR(now_us(), 7, 1e-6);
}

TEST_F(VirtualClock, ACopyToTheHostTakesTheHostsLink) {
  start();
  const Tensor x = Tensor::empty({250});
  const Tensor y = Tensor::empty({250}, {DType::kF32, context_->host()});
  y.copy_from(x);  // 1000 bytes at 100 MB/s and a latency of 1 us
  EXPECT_NEAR(now_us(), 11, 1e-6);
  const auto links = clock().main().summary().links;
  EXPECT_TRUE(links.empty());  // no step has ended
  clock().end_step();
  ASSERT_EQ(clock().main().summary().links.size(), 1u);
  EXPECT_EQ(clock().main().summary().links[0].link, "pcie");
  EXPECT_EQ(clock().main().summary().links[0].bytes, 1000);
}

TEST_F(VirtualClock, StepsAreCountedFromTheirBegin) {
  start();
  work(100);  // before the first step
  clock().begin_steps();
  work(7);
  clock().end_step();
  work(10);
  {
    StreamScope side(kUnshardStream);
    work(40);
  }
  clock().end_step();
  const sim::TimeSummary summary = clock().main().summary();
  EXPECT_NEAR(summary.step_s * 1e6, 40, 1e-6);
  EXPECT_NEAR(summary.idle_share, 0.75, 1e-9);
}

TEST_F(VirtualClock, AStragglerTakesItsTimes) {
  sim::Cluster cluster = plain_cluster();
  cluster.faults.push_back({/*rank=*/1, /*compute_slowdown=*/3, 1});
  const CostModel model(cluster);
  RankContext context(Device::meta(1), 1);
  RankContext::Scope scope(context);
  ClockScope clock(model, 1, 2);
  work(10);
  EXPECT_NEAR(clock.clock().now_s() * 1e6, 30, 1e-6);
}

TEST_F(VirtualClock, JitterDependsOnSeedRankAndOperationOnly) {
  const auto run = [](std::uint64_t seed, int rank) {
    sim::Cluster cluster = plain_cluster();
    cluster.jitter = 0.5;
    cluster.jitter_seed = seed;
    const CostModel model(cluster);
    RankContext context(Device::meta(rank), rank);
    RankContext::Scope scope(context);
    ClockScope clock(model, rank, 4);
    for (int i = 0; i < 10; ++i) work(10);
    return clock.clock().now_s() * 1e6;
  };
  EXPECT_EQ(run(1, 0), run(1, 0));
  EXPECT_NE(run(1, 0), run(2, 0));
  EXPECT_NE(run(1, 0), run(1, 1));
  EXPECT_GT(run(1, 0), 100);
  EXPECT_LT(run(1, 0), 150);
}

TEST_F(VirtualClock, AWaitIsABubbleUntilTheMessageIsSent) {
  start();
  work(10);
  clock().wait_message(14e-6, 17e-6);
  work(3);
  clock().end_step();
  const sim::TimeSummary summary = clock().main().summary();
  EXPECT_NEAR(summary.bubble_s * 1e6, 4, 1e-6);
  EXPECT_NEAR(summary.exposed_comm_s * 1e6, 3, 1e-6);
  EXPECT_NEAR(summary.idle_share, 7.0 / 20, 1e-9);
}

TEST_F(VirtualClock, AMessageThatWasSentEarlyIsExposedForItsRestOnly) {
  start();
  work(10);
  clock().wait_message(2e-6, 12e-6);
  clock().wait_message(3e-6, 9e-6);  // has arrived
  clock().end_step();
  EXPECT_EQ(clock().main().summary().bubble_s, 0);
  EXPECT_NEAR(clock().main().summary().exposed_comm_s * 1e6, 2, 1e-6);
}

TEST_F(VirtualClock, AQueueThatWaitsForAQueueThatWaitsForAMessageWaitsForIt) {
  start();
  Event gathered;
  {
    StreamScope side(kUnshardStream);
    clock().wait_message(4e-6, 9e-6);
    gathered.record();
  }
  work(2);
  gathered.wait();
  clock().end_step();
  EXPECT_NEAR(clock().main().summary().bubble_s * 1e6, 2, 1e-6);
  EXPECT_NEAR(clock().main().summary().exposed_comm_s * 1e6, 5, 1e-6);
}

TEST_F(VirtualClock, StepsWithoutAForwardAreNotSummedUp) {
  start();
  clock().begin_steps();
  work(10);
  clock().end_step();
  {
    const PhaseScope backward(Phase::kBackward);
    work(4);
  }
  clock().end_step();
  EXPECT_NEAR(clock().main().summary().step_s * 1e6, 10, 1e-6);
}

// What is kept of a run does not grow with it: the first steps, the last ones,
// and the sums of the last.
TEST_F(VirtualClock, LongRunsKeepTheirFirstAndLastSteps) {
  using sim::DeviceClock;
  struct Kept {
    std::size_t events, samples, steps;
    sim::RankTimeline timeline;
    sim::TimeSummary summary;
  };
  const auto after = [&](int num_steps, int ops) {
    start();
    clock().begin_steps();
    for (int step = 0; step < num_steps; ++step) {
      const sim::ActivityScope activity(std::to_string(step));
      for (int i = 0; i < ops; ++i) work(1);
      clock().end_step();
    }
    const sim::RankTimeline& all = clock().main().timeline();
    return Kept{all.events.size(), all.memory.size(), all.steps.size(), all,
                clock().main().summary()};
  };
  for (const int ops : {1, 40, 3000}) {
    SCOPED_TRACE(std::to_string(ops) + " operations");
    // Whole, in part, and in part
    std::size_t most = 0;
    for (const int num_steps : {20, ops == 3000 ? 60 : 1000, 1200}) {
      if (ops == 3000 && num_steps > 1000) continue;
      const Kept kept = after(num_steps, ops);
      const sim::RankTimeline& timeline = kept.timeline;
      EXPECT_LE(kept.events,
                (2 + DeviceClock::kFirstSteps) * ops +
                    std::max<std::size_t>(2 * DeviceClock::kLastEvents,
                                          2 * DeviceClock::kLastSteps * ops));
      EXPECT_LE(kept.steps,
                3 + DeviceClock::kFirstSteps + 2 * DeviceClock::kMostSteps);
      EXPECT_LE(kept.samples, 3 * kept.events);
      most = std::max(most, kept.events);
      // Numbers of the steps that are known
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
      EXPECT_NEAR(kept.summary.step_s * 1e6, ops, 1e-3);
      EXPECT_NEAR(kept.summary.idle_share, 0, 1e-6);
      // The samples of the steps that are shown, and one before
      const double shown_s =
          timeline.steps[timeline.steps.size() - 1 - DeviceClock::kLastSteps];
      EXPECT_TRUE(std::any_of(
          timeline.memory.begin(), timeline.memory.end(),
          [&](const auto& sample) { return sample.time_s <= shown_s; }));
    }
    EXPECT_GT(most, 0u);
  }
}

// A stage that drains for many steps keeps the last one that counts.
TEST_F(VirtualClock, DrainingKeepsTheLastForward) {
  start();
  clock().begin_steps();
  for (int step = 0; step < 1500; ++step) {
    const PhaseScope phase(step < 600 ? Phase::kForward : Phase::kBackward);
    work(step < 600 ? 10 : 4);
    clock().end_step();
  }
  EXPECT_NEAR(clock().main().summary().step_s * 1e6, 10, 1e-6);
}

TEST_F(VirtualClock, OperationsSayWhatTheyAreFor) {
  start();
  {
    const sim::ActivityScope activity("micro-batch 3");
    work(1);
  }
  work(1);
  EXPECT_EQ(clock().main().timeline().events[0].label, "micro-batch 3");
  EXPECT_EQ(clock().main().timeline().events[1].label, "");
}

// What is allocated and freed at one time is a peak all the same.
TEST_F(VirtualClock, TheTopOfTheCurveIsThePeak) {
  start();
  RankContext::current().device.reset_peak_memory();
  clock().begin_steps();
  const Tensor kept = Tensor::empty({100}, {DType::kF32, Device()});
  work(10);
  { const Tensor gone = Tensor::empty({5000}, {DType::kF32, Device()}); }
  work(10);
  std::int64_t most = 0;
  for (const sim::MemorySample& sample : clock().main().timeline().memory) {
    most = std::max(most, sample.total());
  }
  EXPECT_EQ(most, RankContext::current().device.memory().peak_total);
  EXPECT_EQ(clock().main().timeline().memory.back().total(), 400);
}

TEST_F(VirtualClock, MemoryIsSampledByKindInVirtualTime) {
  start();
  work(10);
  const auto& samples = clock().main().timeline().memory;
  ASSERT_GE(samples.size(), 2u);
  const auto kind = static_cast<std::size_t>(MemoryKind::kActivation);
  EXPECT_EQ(samples.front().bytes[kind], 10000);
  EXPECT_EQ(samples.back().bytes[kind], 0);
  EXPECT_NEAR(samples.back().time_s * 1e6, 10, 1e-6);
}

}  // namespace
}  // namespace shardbook::test
