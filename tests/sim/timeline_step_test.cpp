#include "sim/timeline_step.h"

#include <gtest/gtest.h>

#include "tests/sim/timeline_support.h"

namespace shardbook::sim {
namespace {

TEST(TimelineStep, TheLastStepStartsAtZero) {
  const StepView view = last_step({two_steps(0)});
  EXPECT_EQ(view.world_size, 1);
  EXPECT_EQ(view.step_s, 1);
  ASSERT_EQ(view.groups.size(), 1u);
  const RankTimeline& step = view.groups[0].timeline;
  ASSERT_EQ(step.events.size(), 4u);
  EXPECT_EQ(step.events[0].begin_s, 0);
  EXPECT_EQ(step.events[3].end_s, 1);
}

TEST(TimelineStep, MemoryStartsWithWhatWasInUse) {
  RankTimeline rank = two_steps(0);
  rank.memory = {sample(0.5, MemoryKind::kGradient, 7),
                 sample(1.5, MemoryKind::kGradient, 9),
                 sample(2, MemoryKind::kGradient, 0)};
  const StepView view = last_step({rank});
  const auto& memory = view.groups[0].timeline.memory;
  ASSERT_EQ(memory.size(), 2u);
  EXPECT_EQ(memory[0].time_s, 0);
  EXPECT_EQ(memory[0].bytes[1], 7);
  EXPECT_EQ(memory[1].time_s, 0.5);
}

TEST(TimelineStep, EventsThatReachBeyondTheStepAreCut) {
  RankTimeline rank = two_steps(0);
  rank.events.push_back(event("all_gather", "comm", "unshard", 0.5, 1.5));
  const StepView view = last_step({rank});
  const TimelineEvent& last = view.groups[0].timeline.events.back();
  EXPECT_EQ(last.begin_s, 0);
  EXPECT_EQ(last.end_s, 0.5);
}

TEST(TimelineStep, RanksThatDoTheSameAreOneGroup) {
  const StepView view =
      last_step({two_steps(0), two_steps(1, 0.125), two_steps(2), two_steps(3),
                 two_steps(4, 1e-9)});
  EXPECT_EQ(view.world_size, 5);
  ASSERT_EQ(view.groups.size(), 2u);
  EXPECT_EQ(view.groups[0].ranks, (std::vector<int>{0, 2, 3, 4}));
  EXPECT_EQ(view.groups[1].ranks, (std::vector<int>{1}));
}

TEST(TimelineStep, WithoutStepsTheWholeRunIsShown) {
  const StepView view = last_step(one_message());
  EXPECT_DOUBLE_EQ(view.step_s, 2e-3);
  EXPECT_EQ(view.groups.size(), 2u);
  EXPECT_EQ(last_step({}).step_s, 0);
  EXPECT_EQ(last_step({RankTimeline{}}).step_s, 0);
}

TEST(TimelineStep, ComputeIsTheFirstQueue) {
  RankTimeline rank;
  rank.events = {event("all_gather", "comm", "unshard", 0, 1),
                 event("matmul", "forward", "compute", 1, 2)};
  EXPECT_EQ(queue_names(rank),
            (std::vector<std::string>{"compute", "unshard"}));
}

TEST(TimelineStep, RanksAreNamedByRuns) {
  EXPECT_EQ(rank_list({4}), "rank 4");
  EXPECT_EQ(rank_list({0, 1, 2, 3}), "ranks 0-3");
  EXPECT_EQ(rank_list({0, 2, 3, 7}), "ranks 0, 2-3, 7");
}

TEST(TimelineStep, AxisMarksAreRound) {
  EXPECT_DOUBLE_EQ(axis_distance(1, 5), 0.2);
  EXPECT_DOUBLE_EQ(axis_distance(0.013, 6), 0.005);
  EXPECT_DOUBLE_EQ(axis_distance(9.9, 10), 1);
  EXPECT_EQ(axis_distance(0, 5), 0);
}

}  // namespace
}  // namespace shardbook::sim
