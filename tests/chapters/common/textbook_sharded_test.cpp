// Closed forms of a step against the virtual clock: ZeRO and FSDP.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::sharded {
namespace {

class TextbookSharded : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TextbookSharded, ::testing::Values(1, 2, 4, 8));

// One unit: all parameters are gathered before forward and stay until backward
// has used them; gradients are scattered after it. ZeRO-1 and -2 send the same
// messages in another order.
TEST_P(TextbookSharded, OneUnitGathersAndScattersOnce) {
  const int n = GetParam();
  const double f = layer_forward_s(80000.0 * 64 / n);
  const double padded = 4 * std::ceil(kParameters / n) * n;
  for (const char* strategy : {"zero1", "zero2", "fsdp --wrap none"}) {
    SCOPED_TRACE(strategy);
    const Report report = on_textbook(
        fmt::format("03_zero_fsdp --world-size {} --batch 80000 --strategy {}",
                    n, strategy));
    expect_time(report.time.step_s, 3 * kLayers * f + all_gather(n, padded) +
                                        reduce_scatter(n, padded) +
                                        all_reduce(n, 8));
    expect_closed_form(report);
  }
}

/// The forms of GPTs of one to four layers and of the mlp, where a gather takes
/// longer than a layer's backward, longer than its forward, and less.
void expect_forms(int ranks, const std::string& strategy) {
  for (const char* model :
       {"mlp", R"('{"n_embd": 64, "n_layer": 1, "n_positions": 64}')",
        R"('{"n_embd": 64, "n_layer": 2, "n_positions": 64}')", "gpt-nano"}) {
    for (const std::int64_t rows : {1, 300, 1200, 6000}) {
      for (const std::int64_t micro_batches : {1, 3}) {
        expect_closed_form(fmt::format(
            "03_zero_fsdp --world-size {} --batch {} --micro-batches {} "
            "--model {} --strategy {}",
            ranks, rows * ranks * micro_batches, micro_batches, model,
            strategy));
      }
    }
  }
}

TEST_P(TextbookSharded, UnitsHideTheirMessagesButForTheEnds) {
  for (const char* strategy : {"zero1", "zero2", "zero3", "fsdp", "fsdp2"}) {
    expect_forms(GetParam(), strategy);
  }
}

// Layers that stay whole are gathered once, and the sum of the losses travels
// while backward computes. Without prefetching nothing hides.
TEST_P(TextbookSharded, KeptLayersAndThoseGatheredLate) {
  for (const char* strategy :
       {"zero3 --max-reuse-distance 1000000000",
        "zero3 --max-reuse-distance 1000000000 "
        "--prefetch-bucket-size 1000000000",
        "zero3 --max-reuse-distance 0 --prefetch-bucket-size 0 --recompute "
        "--persistence-threshold 0",
        "fsdp --backward-prefetch none", "fsdp --backward-prefetch post",
        "fsdp --backward-prefetch post --sharding-strategy shard_grad_op "
        "--param-dtype bf16"}) {
    expect_forms(GetParam(), strategy);
  }
}

// Where messages hide, gathering further ahead changes nothing; otherwise there
// is no form.
TEST(TextbookZero3, DeepPrefetchHidesNoMoreThanTheNextLayer) {
  const std::string three_blocks =
      "03_zero_fsdp --world-size 4 --model gpt-nano --strategy zero3 "
      "--prefetch-bucket-size 150000 --batch ";
  expect_closed_form(three_blocks + "240000");
  expect_no_form(three_blocks + "24");
}

TEST(TextbookSharding, OtherWaysHaveNoForm) {
  for (const std::string options :
       {"zero2 --reduce-bucket-size 1000", "zero2 --allgather-bucket-size 1000",
        "zero2 --cpu-offload", "zero3 --cpu-offload", "zero3 --no-overlap-comm",
        "zero3 --max-reuse-distance 60000", "zero3 --max-live-parameters 60000",
        "fsdp --cpu-offload", "fsdp --forward-prefetch",
        "fsdp --sharding-strategy no_shard", "fsdp --no-sync --micro-batches 2",
        // Records the order of fetches
        "zero3 --steps 1"}) {
    SCOPED_TRACE(options);
    const Report report = on_textbook(
        "03_zero_fsdp --world-size 4 --batch 24 --model gpt-nano --strategy " +
        options);
    EXPECT_EQ(report.time.closed_form_s, kNotPredicted);
    EXPECT_EQ(report.time.closed_form_command,
              "./shardbook run zero_fsdp -- --world-size 4 --cluster textbook "
              "--strategy " +
                  options.substr(0, options.find(' ')));
  }
  // Of the engine alone
  zero_fsdp::StrategyOptions owners;
  owners.strategy = "zero1";
  owners.zero.allgather_partitions = false;
  EXPECT_EQ(
      run_on_textbook<zero_fsdp::ZeroFsdpStrategy>(mlp_options(4, 24), owners)
          .time.closed_form_s,
      kNotPredicted);
}

}  // namespace
}  // namespace shardbook::textbook::sharded
