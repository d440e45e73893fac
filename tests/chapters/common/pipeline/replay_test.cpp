// Replays against the closed forms of the literature.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "core/check.h"
#include "tests/chapters/common/pipeline/schedule_support.h"

namespace shardbook::pipeline {
namespace {

using testing::ElementsAre;

/// Begin of an action of a rank.
double begin_of(const Schedule& schedule, const Replay& replay, int rank,
                ActionKind kind, int micro_batch) {
  const auto& list = schedule.actions[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i].kind == kind && list[i].micro_batch == micro_batch) {
      return replay.spans[static_cast<std::size_t>(rank)][i].begin;
    }
  }
  return -1;
}

class ClosedForms : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ClosedForms, GpipeTimes) {
  const auto [p, m] = GetParam();
  const Schedule schedule = gpipe::schedule(p, m);
  const Replay r = replay(schedule, kUnit);
  for (int s = 0; s < p; ++s) {
    for (int b = 0; b < m; ++b) {
      EXPECT_EQ(begin_of(schedule, r, s, ActionKind::kForward, b), b + s);
      EXPECT_EQ(begin_of(schedule, r, s, ActionKind::kBackward, b),
                (m + p - 1) + (m - 1 - b) + (p - 1 - s));
    }
  }
  EXPECT_EQ(r.makespan, 2 * (m + p - 1));
  EXPECT_EQ(max_live_activations(schedule, Until::kInput),
            std::vector<int>(static_cast<std::size_t>(p), m));
}

TEST_P(ClosedForms, OneFOneBTakesAsLongAndKeepsLess) {
  const auto [p, m] = GetParam();
  const Schedule schedule = schedules::one_f_one_b(p, m);
  const Replay r = replay(schedule, kUnit);
  EXPECT_EQ(r.makespan, 2 * (m + p - 1));
  EXPECT_DOUBLE_EQ(idle_share(r), (p - 1.0) / (m + p - 1));
  EXPECT_DOUBLE_EQ(bubble_over_work(r), (p - 1.0) / m);
  const auto live = max_live_activations(schedule, Until::kInput);
  for (int s = 0; s < p; ++s) {
    EXPECT_EQ(live[static_cast<std::size_t>(s)], std::min(p - s, m));
  }
}

TEST_P(ClosedForms, NaiveHasOneRankAtWork) {
  const auto [p, m] = GetParam();
  const Schedule schedule = schedules::naive(p, m);
  const Replay r = replay(schedule, kUnit);
  EXPECT_EQ(r.makespan, 2 * p * m);
  EXPECT_DOUBLE_EQ(idle_share(r), (p - 1.0) / p);
  EXPECT_DOUBLE_EQ(bubble_over_work(r), p - 1);
  EXPECT_EQ(max_live_activations(schedule, Until::kInput),
            std::vector<int>(static_cast<std::size_t>(p), 1));
}

TEST_P(ClosedForms, InterleavedDividesTheBubble) {
  const auto [p, groups] = GetParam();
  const int m = p * groups;
  for (const int v : {2, 3, 4}) {
    const Schedule schedule = schedules::interleaved(p, m, v);
    const Replay r = replay(schedule, Costs{.forward = 1, .backward = 2});
    EXPECT_DOUBLE_EQ(bubble_over_work(r), (p - 1.0) / (v * m));
    const auto live = max_live_activations(schedule, Until::kInput);
    for (int rank = 0; rank < p; ++rank) {
      const int warm_up = std::min(2 * (p - rank - 1) + (v - 1) * p, m * v);
      EXPECT_EQ(live[static_cast<std::size_t>(rank)],
                std::min(warm_up + 1, m * v));
    }
  }
}

TEST_P(ClosedForms, ZbH1LosesForwardAndInputLessWeights) {
  const int p = std::get<0>(GetParam());
  const int m = std::max(std::get<1>(GetParam()), p);
  const Schedule schedule = schedules::zb_h1(p, m);
  for (const auto& [f, i, w] :
       {std::tuple(1.0, 1.0, 1.0), std::tuple(3.0, 4.0, 2.0)}) {
    const Replay r =
        replay(schedule,
               Costs{.forward = f, .backward_input = i, .backward_weight = w});
    const double lost =
        *std::max_element(r.window.begin(), r.window.end()) - m * (f + i + w);
    EXPECT_DOUBLE_EQ(lost, (p - 1) * (f + i - w));
  }
  EXPECT_EQ(max_live_activations(schedule, Until::kWeight),
            std::vector<int>(static_cast<std::size_t>(p), p));
  // Activations that live until the input's gradient: the numbers of 1F1B
  const auto live = max_live_activations(schedule, Until::kInput);
  for (int s = 0; s < p; ++s) {
    EXPECT_EQ(live[static_cast<std::size_t>(s)], p - s);
  }
}

TEST_P(ClosedForms, ZbH2HasNoBubbleAndTwiceTheActivations) {
  const int p = std::get<0>(GetParam());
  const int m = std::max(std::get<1>(GetParam()), 2 * p - 1);
  const Schedule schedule = schedules::zb_h2(p, m);
  const Replay r = replay(schedule);
  EXPECT_EQ(window_bubble(r), 0);
  EXPECT_EQ(max_live_activations(schedule, Until::kWeight),
            std::vector<int>(static_cast<std::size_t>(p), 2 * p - 1));
}

// A rank's own time loses F + I - 2 W; a step that all ranks begin and end
// together loses at least F, even where two W cover I.
TEST_P(ClosedForms, ZbH2LosesForwardAndInputLessTwoWeights) {
  const int p = std::get<0>(GetParam());
  const int m = std::max(std::get<1>(GetParam()), 2 * p - 1);
  const Schedule schedule = schedules::zb_h2(p, m);
  for (const auto& [f, i, w] :
       {std::tuple(1.0, 1.0, 1.0), std::tuple(3.0, 4.0, 2.0),
        std::tuple(3.0, 4.0, 1.0)}) {
    const Replay r =
        replay(schedule,
               Costs{.forward = f, .backward_input = i, .backward_weight = w});
    const double work = m * (f + i + w);
    const double window = *std::max_element(r.window.begin(), r.window.end());
    EXPECT_DOUBLE_EQ(window - work, (p - 1) * (f + i - 2 * w));
    EXPECT_DOUBLE_EQ(r.makespan - work, (p - 1) * std::max(f, f + i - 2 * w));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ClosedForms,
                         testing::Combine(testing::Values(1, 2, 3, 4, 8),
                                          testing::Values(1, 2, 4, 8, 17)));

// Korthikanti et al. 2022, section 4.2.3: the first rank keeps 1 + (p-1)/(p v)
// times the activations of plain 1F1B, in sets of a whole stage.
TEST(Replays, InterleavingCostsMemory) {
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int v : {2, 3, 4}) {
      const int m = 3 * p;
      const Schedule plain = schedules::one_f_one_b(p, m);
      const Schedule chunks = schedules::interleaved(p, m, v);
      const auto live = [&](const Schedule& s) {
        return max_live_activations(s, Until::kInput)[0];
      };
      EXPECT_DOUBLE_EQ(1.0 * live(chunks) / v / live(plain),
                       1 + (p - 1.0) / (p * v))
          << p << " ranks, " << v << " chunks";
    }
  }
}

std::string text_of(const std::vector<LiveSets>& row) {
  std::string text;
  for (const auto& [from, sets] : row) {
    text += (text.empty() ? "" : ", ") +
            std::to_string(static_cast<int>(from)) + ": " +
            std::to_string(sets);
  }
  return text;
}

TEST(Replays, SetsLiveFromTheForwardToTheLastAction) {
  // tick     0  1  2  3  4  5  6  7  8  9
  // rank 0   F0 F1 .  I0 W0 F2 I1 W1 I2 W2
  // rank 1   .  F0 I0 F1 I1 W0 F2 I2 W1 W2
  const Schedule s = schedules::zb_h1(2, 3);
  const Replay r = replay(s, kUnit);
  const auto weights = live_activations(s, r, Until::kWeight);
  const auto inputs = live_activations(s, r, Until::kInput);
  EXPECT_EQ(text_of(weights[0]), "0: 1, 1: 2, 8: 1, 10: 0");
  EXPECT_EQ(text_of(inputs[0]), "0: 1, 1: 2, 4: 1, 5: 2, 7: 1, 9: 0");
  EXPECT_EQ(text_of(weights[1]), "0: 0, 1: 1, 3: 2, 9: 1, 10: 0");
  EXPECT_EQ(text_of(inputs[1]), "0: 0, 1: 1, 5: 0, 6: 1, 8: 0");
}

TEST(Replays, TheMostSetsOverTimeAreTheMostOfTheList) {
  for (const std::string& name : schedules::schedule_names()) {
    const Schedule s = schedules::make_schedule(name, {4, 8});
    const Replay r = replay(s, {.forward = 1, .communication = 0.5});
    for (const Until until : {Until::kInput, Until::kWeight}) {
      const auto most = max_live_activations(s, until);
      const auto over_time = live_activations(s, r, until);
      for (std::size_t rank = 0; rank < most.size(); ++rank) {
        int seen = 0;
        for (const LiveSets& each : over_time[rank]) {
          seen = std::max(seen, each.sets);
        }
        EXPECT_EQ(seen, most[rank]) << name << ", rank " << rank;
        EXPECT_EQ(over_time[rank].back().sets, 0) << name;
      }
    }
  }
}

TEST(Replays, StagesMayDiffer) {
  const Costs costs[] = {{.forward = 1, .backward = 2, .communication = 10},
                         {.forward = 3, .backward = 5, .communication = 20}};
  const Replay r = replay(gpipe::schedule(2, 1),
                          [&](int stage, int) { return costs[stage]; });
  EXPECT_EQ(r.spans[1][0].begin, 11);  // one message of stage 0
  EXPECT_EQ(r.spans[0][1].begin, 39);  // and one of stage 1
  EXPECT_EQ(r.makespan, 41);
  EXPECT_THAT(r.busy, ElementsAre(3, 8));
  EXPECT_THAT(r.window, ElementsAre(41, 8));
}

// A rank on a route that no micro-batch takes has no actions.
TEST(Replays, RanksMayHaveNoActions) {
  Schedule s = gpipe::schedule(1, 1);
  s.num_ranks = 2;
  s.routes.push_back({{1, 0}});
  s.actions.emplace_back();
  const Replay r = replay(s);
  EXPECT_THAT(r.busy, ElementsAre(3, 0));
  EXPECT_THAT(r.window, ElementsAre(3, 0));
  EXPECT_THAT(max_versions(s), ElementsAre(1, 0));
}

// DeepSeek-V3, table 2: the bubble, two copies of the parameters, p+1 live.
TEST(DualPipe, BubbleAndActivations) {
  for (const int p : {2, 4, 6, 8, 16}) {
    for (const int m : {2 * p, 2 * p + 4, 5 * p}) {
      const Schedule s = schedules::dualpipe(p, m);
      const Costs costs{.forward = 1,
                        .backward = 2,
                        .backward_input = 1,
                        .backward_weight = 1,
                        .overlapped_pair = 3};
      const Replay r = replay(s, costs);
      for (const double busy : r.busy) {
        EXPECT_EQ(r.makespan - busy, (p / 2 - 1) * (3 + 2 - 3 * 1))
            << p << " ranks, " << m << " micro-batches";
      }
      EXPECT_EQ(max_live_activations(s, Until::kWeight),
                std::vector<int>(static_cast<std::size_t>(p), p + 1))
          << p << " ranks, " << m << " micro-batches";
    }
  }
}

TEST(DualPipe, EveryRankDoesHalfOfBothWays) {
  const Schedule s = schedules::dualpipe(4, 10);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(s.stage_at(rank, 0), rank);
    EXPECT_EQ(s.stage_at(rank, 1), 3 - rank);
    int forwards[2] = {0, 0}, backwards[2] = {0, 0};
    int split = 0, weights = 0, pairs = 0;
    for (const Action& each : s.actions[static_cast<std::size_t>(rank)]) {
      pairs += each.overlaps_next;
      if (each.kind == ActionKind::kForward) ++forwards[each.chunk];
      if (each.kind == ActionKind::kBackward) ++backwards[each.chunk];
      if (each.kind == ActionKind::kBackwardInput) {
        ++backwards[each.chunk];
        ++split;
      }
      weights += each.kind == ActionKind::kBackwardWeight;
    }
    EXPECT_THAT(forwards, ElementsAre(5, 5));
    EXPECT_THAT(backwards, ElementsAre(5, 5));
    EXPECT_EQ(split, weights);
    // Twice step 4 (less one pair in the middle), and step 5
    const int h = std::min(rank, 3 - rank);
    EXPECT_EQ(pairs, 2 * (5 - 4 + h + 1) - (h == 1) + (2 - h - 1));
  }
}

TEST(PipeDream, VersionsAreTheClosedForm) {
  for (const int p : {1, 2, 3, 4, 8}) {
    const Schedule s = schedules::pipedream(p, 20);
    for (const VersionRecord& each : versions(s)) {
      const int b = each.micro_batch;
      EXPECT_EQ(each.read, std::max(0, b - (p - 1 - each.stage)));
      EXPECT_EQ(each.applied_to, b);
    }
    std::vector<int> stash;
    for (int stage = 0; stage < p; ++stage) stash.push_back(p - stage);
    EXPECT_EQ(max_versions(s), stash);
    EXPECT_EQ(max_live_activations(s, Until::kInput), stash);
  }
  // Stage 1 of 4 runs mini-batch 5 on version 3
  const VersionRecord record = versions(schedules::pipedream(4, 8))[8 + 5];
  EXPECT_EQ(record.stage, 1);
  EXPECT_EQ(record.micro_batch, 5);
  EXPECT_EQ(record.read, 3);
}

TEST(PipeDream, VerticalSyncReadsOneVersionEverywhere) {
  for (const int p : {1, 2, 3, 4, 8}) {
    const Schedule s = schedules::pipedream(p, 20, /*vertical_sync=*/true);
    check(s);
    for (const VersionRecord& each : versions(s)) {
      EXPECT_EQ(each.read, std::max(0, each.micro_batch - p + 1));
    }
    EXPECT_EQ(max_versions(s),
              std::vector<int>(static_cast<std::size_t>(p), p));
  }
}

TEST(PipeDream, ReplicasTakeTurnsAndUpdateTogether) {
  // Stages of 3, 2 and 1 replicas
  const std::vector<int> replicas = {3, 2, 1};
  const Schedule s = schedules::pipedream(replicas, 12);
  EXPECT_EQ(s.num_stages, 3);
  EXPECT_EQ(s.place(4, 0).rank, 1);
  EXPECT_EQ(s.place(5, 1).rank, 4);
  EXPECT_EQ(to_string(s.actions[1].front()), "F1");
  EXPECT_EQ(to_string(s.actions[1].back()), "U11");
  // Two in flight in each replica of stage 0: one warm-up forward
  EXPECT_THAT(max_live_activations(s, Until::kInput),
              ElementsAre(2, 2, 2, 2, 2, 1));
  for (const std::vector<int>& each : std::vector<std::vector<int>>{
           {1}, {4}, {2, 1}, {1, 2}, {1, 4}, {2, 2, 2}, {1, 3, 2}, {4, 3, 2}}) {
    check(schedules::pipedream(each, 24));
  }
}

// The lists follow NOAM. Narayanan et al. 2019, section 3.2.
TEST(PipeDream, AdmitsRanksOverReplicasOfTheFirstStage) {
  const std::pair<std::vector<int>, int> cases[] = {
      {{1}, 1},       {{4}, 1},       {{1, 1}, 2},    {{1, 1, 1, 1}, 4},
      {{2, 1}, 2},    {{1, 2}, 3},    {{2, 2}, 2},    {{3, 1}, 2},
      {{1, 3, 2}, 6}, {{4, 3, 2}, 3}, {{2, 1, 1}, 2}, {{3, 2, 1}, 2}};
  for (const auto& [replicas, in_flight] : cases) {
    const Schedule s = schedules::pipedream(replicas, 24);
    const auto live = max_live_activations(s, Until::kInput);
    for (int rank = 0; rank < replicas[0]; ++rank) {
      EXPECT_EQ(live[static_cast<std::size_t>(rank)], in_flight);
    }
  }
}

// Versions count updates; an update of a stage with R replicas covers R
// mini-batches.
TEST(PipeDream, VerticalSyncWithReplicasReadsWhatTheFirstStageHasSeen) {
  for (const std::vector<int>& replicas : std::vector<std::vector<int>>{
           {2, 1}, {1, 2}, {3, 1}, {2, 2}, {1, 3, 2}, {4, 3, 2}}) {
    const Schedule s = schedules::pipedream(replicas, 48, true);
    check(s);
    int ranks = 0;
    for (const int each : replicas) ranks += each;
    for (const VersionRecord& each : versions(s)) {
      const int r = replicas[static_cast<std::size_t>(each.stage)];
      // ceil((ranks - R0) / R0) rounds behind
      const int ahead = (ranks - 1) / replicas[0];
      const int seen =
          replicas[0] * std::max(0, each.micro_batch / replicas[0] - ahead);
      EXPECT_EQ(each.read, seen / r)
          << "stage " << each.stage << ", mini-batch " << each.micro_batch;
    }
    // Longer runs keep no more
    EXPECT_EQ(max_versions(s),
              max_versions(schedules::pipedream(replicas, 96, true)));
  }
}

// Replicas update together: an update waits for the gradients of all.
TEST(PipeDream, UpdatesOfReplicasBeginTogether) {
  const Schedule s = schedules::pipedream({2, 1}, 4);
  const Replay r = replay(s, Costs{.forward = 1, .backward = 1, .update = 3});
  for (std::size_t i = 0; i < s.actions[0].size(); ++i) {
    if (s.actions[0][i].kind != ActionKind::kUpdate) continue;
    EXPECT_EQ(r.spans[0][i].begin, r.spans[1][i].begin);
  }
}

TEST(PipeDream, DoubleBuffersDelayByOneBatch) {
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int m : {p, p + 1, 2 * p}) {
      const Schedule s = schedules::pipedream_2bw(p, m, 5);
      check(s);
      for (const VersionRecord& each : versions(s)) {
        const int batch = each.micro_batch / m;
        EXPECT_EQ(each.read, std::max(0, batch - 1));
        EXPECT_EQ(each.applied_to, batch);
      }
      EXPECT_EQ(max_versions(s),
                std::vector<int>(static_cast<std::size_t>(p), 2));
    }
  }
  EXPECT_THROW(schedules::pipedream_2bw(4, 3, 2), Error);
}

TEST(PipeDream, NoBubbleAfterTheWarmUp) {
  const Replay few = replay(schedules::pipedream(4, 10), kUnit);
  const Replay more = replay(schedules::pipedream(4, 110), kUnit);
  EXPECT_EQ(more.makespan - few.makespan, 2 * 100);
}

// Between the shares of kInput and of kWeight.
TEST(Replays, AShareOfASetMayLiveLonger) {
  EXPECT_THAT(max_live_shares(schedules::zb_h1(2, 4), 4.0 / 9),
              ElementsAre(2, 1 + 4.0 / 9));
}

}  // namespace
}  // namespace shardbook::pipeline
