// The part of a schedule that repeats, and long runs that omit it.

#include "chapters/common/pipeline/steady.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/dependencies.h"
#include "tests/chapters/06_1f1b/worlds_support.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Action;
using pipeline::Schedule;
using pipeline::Steady;
using pipeline::steady_state;

TEST(SteadyState, OneForwardOneBackwardRepeatsFromTheFirstBackward) {
  const Steady steady = steady_state(pipeline::schedules::one_f_one_b(4, 12));
  EXPECT_EQ(steady.period, 1);
  EXPECT_EQ(steady.count, 9);  // of rank 0: m - (p - 1)
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(steady.first[static_cast<std::size_t>(rank)].begin, 3 - rank);
    EXPECT_EQ(steady.first[static_cast<std::size_t>(rank)].end, 5 - rank);
  }
}

TEST(SteadyState, SchedulesWithOneForwardAfterTheOtherDoNotRepeat) {
  EXPECT_EQ(steady_state(gpipe::schedule(4, 12)).count, 0);
}

// Ranks may meet between two repetitions: an action of repetition i waits for
// none of repetition i + 1 or later.
TEST(SteadyState, RepetitionsWaitForNoLaterOnes) {
  for (const Schedule& schedule :
       {pipeline::schedules::one_f_one_b(5, 20),
        pipeline::schedules::interleaved(4, 32, 2),
        pipeline::schedules::zb_h1(4, 24), pipeline::schedules::zb_h2(4, 24)}) {
    const Steady steady = steady_state(schedule);
    ASSERT_GT(steady.count, 1) << schedule.name;
    const pipeline::Dependencies dependencies(schedule);
    const auto repetition = [&](int rank, int index) {
      const auto& part = steady.first[static_cast<std::size_t>(rank)];
      const int length = part.end - part.begin;
      const int done = index - part.begin;
      return done < 0 ? -1 : done / length;
    };
    for (int rank = 0; rank < schedule.num_ranks; ++rank) {
      const auto& list = schedule.actions[static_cast<std::size_t>(rank)];
      const auto& part = steady.first[static_cast<std::size_t>(rank)];
      const int length = part.end - part.begin;
      EXPECT_LE(part.begin + steady.count * length,
                static_cast<int>(list.size()));
      for (int i = part.begin; i < part.begin + steady.count * length; ++i) {
        const Action& action = list[static_cast<std::size_t>(i)];
        const Action& first = list[static_cast<std::size_t>(
            part.begin + (i - part.begin) % length)];
        EXPECT_EQ(action.kind, first.kind) << schedule.name;
        EXPECT_EQ(action.micro_batch,
                  first.micro_batch + repetition(rank, i) * steady.period);
        for (const auto& each : dependencies.of(rank, i)) {
          EXPECT_LE(repetition(each.rank, each.index), repetition(rank, i))
              << schedule.name << ", rank " << rank;
        }
      }
    }
  }
}

// A run on shapes reports the same as if all micro-batches had run.
TEST(SteadyState, LongRunsLeaveMicroBatchesOutAndReportTheSame) {
  for (const std::string cluster : {"textbook", "dgx-a100", "dgx-v100"}) {
    for (const std::string schedule : {"1f1b", "interleaved", "zb-h1"}) {
      SCOPED_TRACE(schedule + " on " + cluster);
      Options options = worlds_options(4);
      options.model = R"({"n_layer": 8, "n_embd": 256, "n_head": 4,
                          "n_positions": 128, "vocab_size": 1000})";
      options.backend = "sim";
      options.cluster = cluster;
      options.batch = 160;
      options.seq = 128;
      options.steps = 2;
      StrategyOptions setup;
      setup.schedule = schedule;
      setup.micro_batches = 160;
      const Report fast = run_strategy(options, setup).report;
      setup.leaves_out_repetitions = false;
      const Report all = run_strategy(options, setup).report;
      expect_bill(fast);
      const auto num_events = [](const Report& report) {
        return report.timelines.at(0).events.size();
      };
      EXPECT_LT(num_events(fast), num_events(all) / 2) << "nothing left out";
      ASSERT_EQ(fast.ranks.size(), all.ranks.size());
      for (std::size_t rank = 0; rank < all.ranks.size(); ++rank) {
        const RankReport &a = fast.ranks[rank], &b = all.ranks[rank];
        EXPECT_DOUBLE_EQ(a.bytes.counted, b.bytes.counted);
        for (int k = 0; k < kNumMemoryKinds; ++k) {
          const auto kind = static_cast<std::size_t>(k);
          EXPECT_EQ(a.peak[kind].counted, b.peak[kind].counted) << k;
        }
        const double near = 1e-9 * b.time.step_s;
        EXPECT_NEAR(a.time.step_s, b.time.step_s, near);
        EXPECT_NEAR(a.time.exposed_comm_s, b.time.exposed_comm_s, near);
        EXPECT_NEAR(a.time.bubble_s, b.time.bubble_s, near);
        EXPECT_NEAR(a.time.idle_share, b.time.idle_share, 1e-9);
        ASSERT_EQ(a.time.links.size(), b.time.links.size());
        for (std::size_t i = 0; i < a.time.links.size(); ++i) {
          EXPECT_NEAR(a.time.links[i].bytes, b.time.links[i].bytes,
                      1e-9 * b.time.links[i].bytes);
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::pipeline_test
