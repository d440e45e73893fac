// Virtual time against closed forms: ZeRO and FSDP.

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/03_zero_fsdp/trainer.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::sharded {
namespace {

class TextbookSharded : public ::testing::TestWithParam<int> {};

// One unit: all parameters are gathered before forward and stay until backward
// has used them; gradients are scattered after it.
TEST_P(TextbookSharded, FsdpOfOneUnitGathersAndScattersOnce) {
  const int n = GetParam();
  const Options options = mlp_options(n, 80000);
  zero_fsdp::TrainerOptions how;
  how.strategy = "fsdp";
  how.wrap = "none";
  const double f = layer_forward_s(80000.0 * 64 / n);
  const double padded = std::ceil(kParameters / n) * n;
  expect_time(step_s<zero_fsdp::Trainer>(options, how),
              all_gather(n, 4 * padded) + 3 * kLayers * f +
                  reduce_scatter(n, 4 * padded) + all_reduce(n, 8));
}

// The same messages in another order: gradients are scattered, then parameters
// gathered.
TEST_P(TextbookSharded, ZeroStagesScatterThenGather) {
  const int n = GetParam();
  for (const char* strategy : {"zero1", "zero2"}) {
    const Options options = mlp_options(n, 80000);
    zero_fsdp::TrainerOptions how;
    how.strategy = strategy;
    const double f = layer_forward_s(80000.0 * 64 / n);
    const double padded = std::ceil(kParameters / n) * n;
    SCOPED_TRACE(strategy);
    expect_time(step_s<zero_fsdp::Trainer>(options, how),
                3 * kLayers * f + reduce_scatter(n, 4 * padded) +
                    all_gather(n, 4 * padded) + all_reduce(n, 8));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TextbookSharded, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace shardbook::textbook::sharded
