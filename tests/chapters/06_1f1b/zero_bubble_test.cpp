// Schedules found by search. The paper's table 5 is in tests/validate.

#include <gtest/gtest.h>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"

namespace shardbook::pipeline {
namespace {

TEST(ZbAuto, KeepsItsLimitAndIsNoWorseThanByHand) {
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int m : {1, 2, 5, 16}) {
      for (const double limit : {1.0, 1.0 * p, 1.5 * p, 2.0 * p}) {
        const schedules::ZeroBubbleSearch search{
            .memory_limit = limit,
            .costs = {.forward = 3,
                      .backward_input = 4,
                      .backward_weight = 2,
                      .communication = 0.5}};
        const Schedule found = schedules::zb_auto(p, m, search);
        const Replay r = replay(found, search.costs);
        for (const int live : max_live_activations(found, Until::kWeight)) {
          EXPECT_LE(live, limit);
        }
        if (limit >= p) {
          EXPECT_LE(
              window_bubble(r),
              window_bubble(replay(schedules::zb_h1(p, m), search.costs)));
        }
      }
    }
  }
}

TEST(ZbAuto, MoreMemoryLeavesASmallerBubble) {
  double before = 1;
  for (const double limit : {4, 5, 6, 8}) {
    const double bubble = window_bubble(
        replay(schedules::zb_auto(4, 12, {.memory_limit = limit})));
    EXPECT_LE(bubble, before);
    before = bubble;
  }
  EXPECT_EQ(before, 0);
}

TEST(ZbAuto, RefusesWhatMakesNoSense) {
  schedules::ZeroBubbleSearch search;
  EXPECT_THROW(schedules::zb_auto(2, 4, search), Error);
  search.memory_limit = 4;
  search.weight_share = 1.5;
  EXPECT_THROW(schedules::zb_auto(2, 4, search), Error);
  search.weight_share = 1;
  search.costs.backward_weight = 0;
  EXPECT_THROW(schedules::zb_auto(2, 4, search), Error);
}

}  // namespace
}  // namespace shardbook::pipeline
