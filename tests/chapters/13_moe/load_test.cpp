// The load of each expert as a picture.

#include "chapters/13_moe/load.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook::moe {
namespace {

TEST(DrawLoads, ShowsSharesOfAnEvenLoad) {
  const Loads loads = {{"transformer.h.10.mlp", {10, 10}},
                       {"transformer.h.9.mlp", {30, 10}}};
  EXPECT_EQ(draw_loads(loads),
            "load of each expert (1.00: even)\n"
            "   h.9   1.50  0.50\n"
            "         ####     #\n"
            "  h.10   1.00  1.00\n"
            "          ###   ###\n");
  EXPECT_EQ(draw_loads({}), "");
  EXPECT_EQ(loads_json(loads), "{\"h.9\": [30, 10], \"h.10\": [10, 10]}");
  EXPECT_EQ(loads_json({}), "{}");
}

TEST(DrawLoads, AsSvgHasABarPerExpert) {
  const std::string svg =
      loads_picture("Uneven", {{"transformer.h.0.mlp", {1, 2, 3}}}).svg;
  std::size_t bars = 0;
  for (auto at = svg.find("<rect"); at != std::string::npos;
       at = svg.find("<rect", at + 1)) {
    ++bars;
  }
  EXPECT_EQ(bars, 3U + 2U);  // the part beyond an even load, and the ground
  expect_text(svg, {"h.0: 0.50 1.00 1.50"});
}

TEST(SumLoads, AddsTheRanksThatCount) {
  const auto sums = on_ranks(4, [](ProcessGroup& world) {
    MoeRecord record;
    record.loads["a"].exp_counts = {world.rank(), 1};
    return sum_loads(record, world, world.rank() != 1);
  });
  for (const Loads& each : sums) {
    EXPECT_EQ(each.at("a"), (std::vector<std::int64_t>{5, 3}));
  }
}

}  // namespace
}  // namespace shardbook::moe
