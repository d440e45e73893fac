// The figures of the literature, as text.

#include <gtest/gtest.h>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"
#include "tests/chapters/common/pipeline/schedule_support.h"

namespace shardbook::pipeline {
namespace {

std::string figure(const Schedule& schedule, const Costs& costs) {
  return "\n" + draw(schedule, replay(schedule, costs));
}

// Huang et al. 2019, figure 2c.
TEST(Figures, Gpipe) {
  EXPECT_EQ(figure(gpipe::schedule(4, 4), kUnit), R"(
rank 0 |F0 F1 F2 F3 .  .  .  .  .  .  B3 B2 B1 B0
rank 1 |.  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0 .
rank 2 |.  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .  .
rank 3 |.  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .  .
)");
}

TEST(Figures, OneFOneBByBlockingReceives) {
  EXPECT_EQ(figure(schedules::one_f_one_b(4, 4), kUnit), R"(
rank 0 |F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
rank 1 |.  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
rank 2 |.  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
rank 3 |.  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
)");
}

// A backward takes as long as two forwards; two chunks of half the size.
TEST(Figures, LongActionsAndChunks) {
  EXPECT_EQ(figure(schedules::one_f_one_b(2, 3), Costs()), R"(
rank 0 |F0 F1 .  .  B0--- F2 B1--- .  B2---
rank 1 |.  F0 B0--- F1 B1--- F2 B2--- .  .
)");
  EXPECT_EQ(figure(schedules::interleaved(2, 2, 2), kUnit), R"(
rank 0 |F0   F1   F0.1 F1.1 .    B0.1 .    B1.1 B0   B1
rank 1 |.    F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1   .
)");
}

// Qi et al. 2023, figures 2 and 3, for four micro-batches on three stages.
TEST(Figures, ZeroBubble) {
  EXPECT_EQ(figure(schedules::zb_h1(3, 4), Costs()), R"(
rank 0 |F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1 |.  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2 |.  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
)");
  EXPECT_EQ(figure(schedules::zb_h2(3, 5), Costs()), R"(
rank 0 |F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
rank 1 |.  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
)");
}

TEST(Figures, DualPipePairs) {
  const Costs costs{.overlapped_pair = 3};
  EXPECT_EQ(figure(schedules::dualpipe(4, 8), costs), R"(
rank 0 |F0   F1   F2   F4.1 I4.1 W4.1 F5.1 F3&B5.1------- .    F6.1&B0------- B6.1----- .    F7.1&B1------- B7.1----- I2   W2   I3   W3
rank 1 |.    F0   F4.1 F1   F5.1 F2   B4.1----- F6.1&B0------- F3&B5.1------- F7.1&B1------- B6.1----- B2------- .    I7.1 I3   W7.1 W3
rank 2 |.    F4.1 F0   F5.1 F1   F6.1 B0------- F2&B4.1------- F7.1&B1------- F3&B5.1------- B2------- B6.1----- .    I3   I7.1 W3   W7.1
rank 3 |F4.1 F5.1 F6.1 F0   I0   W0   F1   F7.1&B1------- .    F2&B4.1------- B2------- .    F3&B5.1------- B3------- I6.1 W6.1 I7.1 W7.1
)");
}

TEST(Figures, UpdatesTakeNoRoom) {
  EXPECT_EQ(figure(schedules::pipedream(2, 3), kUnit), R"(
rank 0 |F0 F1 .  B0 F2 B1 .  B2
rank 1 |.  F0 B0 F1 B1 F2 B2 .
)");
}

TEST(Figures, OfTooManyColumnsAreRefused) {
  const Schedule s = gpipe::schedule(2, 2000);
  EXPECT_THROW(draw(s, replay(s)), Error);
  EXPECT_NE(draw(s, replay(s), 10), "");
}

}  // namespace
}  // namespace shardbook::pipeline
