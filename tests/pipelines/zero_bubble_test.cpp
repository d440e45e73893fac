// Table 5 of the zero-bubble paper, from times that its authors measured.

#include <gtest/gtest.h>

#include <cmath>

#include "bench/validate/table.h"
#include "chapters/06_1f1b/replay.h"
#include "chapters/06_1f1b/schedules.h"

namespace shardbook::pipeline {
namespace {

/// Bubble rate of a row, with its figures.
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

// Without the time of messages the rates are others: they are part of it.
TEST(ZeroBubbleTable5, MessagesAreInTheRates) {
  for (const validate::Row& row : validate::read_table(
           SHARDBOOK_ROOT "/bench/validate/zero_bubble_table5.csv")) {
    EXPECT_LT(four_decimals(bubble(row, 0)), row.number("bubble_rate"))
        << row.place();
  }
}

}  // namespace
}  // namespace shardbook::pipeline
