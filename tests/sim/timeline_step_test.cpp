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

TEST(TimelineStep, ARankStandsForThoseThatWereNotRun) {
  std::vector<RankTimeline> ranks = {two_steps(0), two_steps(3, 0.125),
                                     two_steps(4)};
  ranks[0].alike = {1, 5};
  ranks[0].world_size = 9;
  const StepView view = last_step(ranks);
  EXPECT_EQ(view.world_size, 9);
  ASSERT_EQ(view.groups.size(), 2u);
  EXPECT_EQ(view.groups[0].ranks, (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(hidden_text(view, 2), "4 more ranks are not shown");
  EXPECT_EQ(hidden_text(last_step({two_steps(0)}), 1), "");
}

// Stage 0 ends its steps at 1 and 2; stage 1, with its slower optimizer, at
// 1.25 and 2.25.
std::vector<RankTimeline> two_stages() {
  std::vector<RankTimeline> ranks(2);
  ranks[0].steps = {0, 1, 2};
  ranks[1].rank = 1;
  ranks[1].steps = {0, 1.25, 2.25};
  for (const double begin : {0.0, 1.0}) {
    ranks[0].events.push_back(
        event("matmul", "forward", "compute", begin, begin + 0.25));
    ranks[0].events.push_back(
        event("wait", "bubble", "compute", begin + 0.25, begin + 1));
    ranks[1].events.push_back(
        event("matmul", "forward", "compute", begin + 0.25, begin + 0.75));
    ranks[1].events.push_back(
        event("adam", "optimizer", "compute", begin + 0.75, begin + 1.25));
  }
  return ranks;
}

TEST(TimelineStep, APipelineDoesNotShowTheOptimizerOfTheStepBefore) {
  const StepView view = last_step(two_stages());
  EXPECT_EQ(view.step_s, 1.25);
  EXPECT_EQ(view.num_steps, 1);
  ASSERT_EQ(view.groups.size(), 2u);
  const RankTimeline& second = view.groups[1].timeline;
  ASSERT_EQ(second.events.size(), 2u);
  EXPECT_EQ(second.events[0].category, "forward");
  EXPECT_EQ(second.events[1].end_s, 1.25);
}

// Stage 0 is one mini-batch ahead of stage 1, and its last step only drains,
// without a forward.
TEST(TimelineStep, RanksThatDoNotFlushShowTheirSteadyState) {
  std::vector<RankTimeline> ranks(2);
  constexpr int kSteps = 10;
  for (int r = 0; r < 2; ++r) {
    ranks[r].rank = r;
    ranks[r].steps = {0};
    for (int step = 0; step < kSteps; ++step) {
      const double begin = 2 + step;
      if (r == 1 || step + 1 < kSteps) {
        ranks[r].events.push_back(
            event("matmul", "forward", "compute", begin, begin + 0.25));
      }
      ranks[r].events.push_back(
          event("matmul", "backward", "compute", begin + 0.5, begin + 1));
      ranks[r].steps.push_back(begin + 1);
    }
  }
  const StepView view = last_step(ranks);
  EXPECT_EQ(view.num_steps, 4);
  EXPECT_EQ(view.step_s, 4);
  for (const RankGroup& group : view.groups) {
    const QueueShares shares = queue_shares(group.timeline, "compute", 4);
    EXPECT_DOUBLE_EQ(shares.busy, 0.75);
  }
}

// Ranks may omit different steps: the entries of the same step are shown.
TEST(TimelineStep, RanksThatLeftOutStepsShowTheirLastOne) {
  std::vector<RankTimeline> ranks = two_stages();
  for (RankTimeline& rank : ranks) {
    // Six more steps before these two, without records
    for (TimelineEvent& each : rank.events) {
      each.begin_s += 6;
      each.end_s += 6;
    }
    const double begin_s = rank.steps[0], end_s = begin_s + 6;
    for (double& each : rank.steps) each += 6;
    rank.steps[0] = end_s;
    rank.steps.insert(rank.steps.begin(), begin_s);
    rank.num_left_out = 6;
  }
  // One rank has omitted fewer
  RankTimeline& first = ranks[0];
  first.steps.insert(first.steps.begin() + 1, first.steps[1] - 1);
  first.num_left_out = 5;
  const StepView view = last_step(ranks);
  EXPECT_EQ(view.step_s, 1.25);
  EXPECT_EQ(view.num_steps, 1);
  ASSERT_EQ(view.groups.size(), 2u);
  EXPECT_EQ(view.groups[0].timeline.events.size(), 2u);
  EXPECT_EQ(view.groups[1].timeline.events.size(), 2u);
}

TEST(TimelineStep, SharesOfAQueueAddUpToOne) {
  RankTimeline rank;
  rank.events = {event("matmul", "forward", "compute", 0, 1),
                 event("wait", "bubble", "compute", 1, 1.5),
                 event("wait", "exposed", "compute", 1.5, 2),
                 event("wait", "wait", "compute", 2, 3),
                 // Two messages to different ranks, at the same time.
                 event("send", "comm", "send", 0, 2),
                 event("send", "comm", "send", 1, 3)};
  const QueueShares compute = queue_shares(rank, "compute", 4);
  EXPECT_EQ(compute.busy, 0.25);
  EXPECT_EQ(compute.bubble, 0.125);
  EXPECT_EQ(compute.exposed, 0.125);
  EXPECT_EQ(compute.rest, 0.5);
  EXPECT_EQ(queue_shares(rank, "send", 4).busy, 0.75);
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
  EXPECT_EQ(rank_list({0, 2, 4, 6, 8, 10, 12, 14, 16, 17}),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more");
}

TEST(TimelineStep, AxisMarksAreRound) {
  EXPECT_DOUBLE_EQ(axis_distance(1, 5), 0.2);
  EXPECT_DOUBLE_EQ(axis_distance(0.013, 6), 0.005);
  EXPECT_DOUBLE_EQ(axis_distance(9.9, 10), 1);
  EXPECT_EQ(axis_distance(0, 5), 0);
}

}  // namespace
}  // namespace shardbook::sim
