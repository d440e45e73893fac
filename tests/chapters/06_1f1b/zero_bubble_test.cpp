// Table 5 of the zero-bubble paper, from times that its authors measured.

#include <gtest/gtest.h>

#include <cmath>

#include "bench/validate/table.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/06_1f1b/schedules_zero_bubble.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"

namespace shardbook::pipeline {
namespace {

/// The bubble rate from the times in a row of the table.
double bubble(const validate::Row& row, double communication) {
  const Costs costs{
      .forward = row.number("T_F_ms"),
      .backward = row.number("T_B_ms") + row.number("T_W_ms"),
      .backward_input = row.number("T_B_ms"),
      .backward_weight = row.number("T_W_ms"),
      .communication = communication,
  };
  const int p = row.integer("pp"), m = row.integer("num_microbatches");
  const std::string& name = row.text("schedule");
  const Schedule schedule = name == "1F1B"    ? schedules::one_f_one_b(p, m)
                            : name == "ZB-H1" ? schedules::zb_h1(p, m)
                                              : schedules::zb_h2(p, m);
  return window_bubble(replay(schedule, costs));
}

double four_decimals(double value) { return std::round(value * 1e4) / 1e4; }

TEST(ZeroBubbleTable5, EveryRateToFourDecimals) {
  const auto rows = validate::read_table(
      SHARDBOOK_ROOT "/bench/validate/zero_bubble_table5.csv");
  EXPECT_EQ(rows.size(), 36u);
  for (const validate::Row& row : rows) {
    EXPECT_DOUBLE_EQ(four_decimals(bubble(row, row.number("T_comm_ms"))),
                     row.number("bubble_rate"))
        << row.place();
  }
}

// The rates include the time of messages: without it they are smaller.
TEST(ZeroBubbleTable5, MessagesAreInTheRates) {
  for (const validate::Row& row : validate::read_table(
           SHARDBOOK_ROOT "/bench/validate/zero_bubble_table5.csv")) {
    EXPECT_LT(four_decimals(bubble(row, 0)), row.number("bubble_rate"))
        << row.place();
  }
}

double automatic_bubble(const validate::Row& row) {
  schedules::ZeroBubbleSearch search;
  search.costs = {.forward = row.number("T_F_ms"),
                  .backward_input = row.number("T_B_ms"),
                  .backward_weight = row.number("T_W_ms"),
                  .communication = row.number("T_comm_ms")};
  const int p = row.integer("pp");
  search.memory_limit = p * row.number("memory_limit_per_stage");
  search.weight_share =
      32 / (34 + 5 * row.number("heads") * row.number("seq_len") /
                     row.number("hidden"));
  return window_bubble(
      replay(schedules::zb_auto(p, row.integer("num_microbatches"), search),
             search.costs));
}

TEST(ZeroBubbleTable5, SchedulesFoundBySearch) {
  const auto rows = validate::read_table(
      SHARDBOOK_ROOT "/bench/validate/zero_bubble_automatic.csv");
  EXPECT_EQ(rows.size(), 24u);
  for (const validate::Row& row : rows) {
    EXPECT_DOUBLE_EQ(four_decimals(automatic_bubble(row)),
                     row.number("bubble_rate"))
        << row.place();
  }
}

TEST(ZbAuto, KeepsItsLimitAndIsNoWorseThanByHand) {
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int m : {1, 2, 5, 16}) {
      for (const double limit : {1.0, 1.0 * p, 1.5 * p, 2.0 * p}) {
        schedules::ZeroBubbleSearch search;
        search.memory_limit = limit;
        search.costs = {.forward = 3,
                        .backward_input = 4,
                        .backward_weight = 2,
                        .communication = 0.5};
        const Schedule found = schedules::zb_auto(p, m, search);
        const Replay r = replay(found, search.costs);
        for (const int live : max_live_activations(found, r, Until::kWeight)) {
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
    schedules::ZeroBubbleSearch search;
    search.memory_limit = limit;
    const double bubble =
        window_bubble(replay(schedules::zb_auto(4, 12, search)));
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
