// Closed forms of a step against the virtual clock: ZeRO and FSDP.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::sharded {
namespace {

using zero_fsdp::StrategyOptions;
using zero_fsdp::ZeroFsdpStrategy;

class TextbookSharded : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TextbookSharded, ::testing::Values(1, 2, 4, 8));

// One unit: all parameters are gathered before forward and stay until backward
// has used them; gradients are scattered after it. ZeRO-1 and -2 send the same
// messages in another order.
TEST_P(TextbookSharded, OneUnitGathersAndScattersOnce) {
  const int n = GetParam();
  const double f = layer_forward_s(80000.0 * 64 / n);
  const double padded = 4 * std::ceil(kParameters / n) * n;
  for (const char* strategy : {"zero1", "zero2", "fsdp"}) {
    SCOPED_TRACE(strategy);
    StrategyOptions setup;
    setup.strategy = strategy;
    setup.wrap = "none";
    const Report report =
        run_on_textbook<ZeroFsdpStrategy>(mlp_options(n, 80000), setup);
    expect_time(report.time.step_s, 3 * kLayers * f + all_gather(n, padded) +
                                        reduce_scatter(n, padded) +
                                        all_reduce(n, 8));
    expect_closed_form(report);
  }
}

/// The step's closed form and the clock agree.
void expect_form(const Options& options, const StrategyOptions& setup) {
  expect_closed_form(run_on_textbook<ZeroFsdpStrategy>(options, setup));
}

/// Calls `expect` for GPTs of one to four layers and the mlp, where a gather
/// takes longer than a layer's backward, longer than its forward, and less.
void for_each_run(
    int ranks, const char* strategy,
    const std::function<void(const Options&, StrategyOptions)>& expect) {
  for (const char* model :
       {"mlp", R"({"n_embd": 64, "n_layer": 1, "n_positions": 64})",
        R"({"n_embd": 64, "n_layer": 2, "n_positions": 64})", "gpt-nano"}) {
    for (const std::int64_t rows : {1, 300, 1200, 6000}) {
      for (const std::int64_t micro_batches : {1, 3}) {
        SCOPED_TRACE(std::string(model) + ", " + std::to_string(micro_batches) +
                     " micro-batches of " + std::to_string(rows));
        Options options = mlp_options(ranks, rows * ranks * micro_batches);
        options.model = model;
        StrategyOptions setup;
        setup.strategy = strategy;
        setup.micro_batches = micro_batches;
        expect(options, setup);
      }
    }
  }
}

TEST_P(TextbookSharded, UnitsHideTheirMessagesButForTheEnds) {
  for (const char* strategy : {"zero1", "zero2", "zero3", "fsdp", "fsdp2"}) {
    SCOPED_TRACE(strategy);
    for_each_run(GetParam(), strategy, expect_form);
  }
}

// Layers that stay whole are gathered once, and the sum of the losses travels
// while backward computes. Without prefetching nothing hides.
TEST_P(TextbookSharded, KeptLayersAndThoseGatheredLate) {
  for_each_run(GetParam(), "zero3",
               [](const Options& options, StrategyOptions setup) {
                 setup.zero.max_reuse_distance = 1'000'000'000;
                 expect_form(options, setup);
                 setup.zero.prefetch_bucket_size = 1'000'000'000;
                 expect_form(options, setup);
                 setup.zero.max_reuse_distance = 0;
                 setup.zero.prefetch_bucket_size = 0;
                 setup.recompute = true;
                 setup.zero.persistence_threshold = 0;
                 expect_form(options, setup);
               });
  for_each_run(GetParam(), "fsdp",
               [](const Options& options, StrategyOptions setup) {
                 setup.backward_prefetch = "none";
                 expect_form(options, setup);
                 setup.backward_prefetch = "post";
                 expect_form(options, setup);
                 setup.sharding_strategy = "shard_grad_op";
                 setup.param_dtype = "bf16";
                 expect_form(options, setup);
               });
}

// Where messages hide, gathering further ahead changes nothing; otherwise there
// is no form.
TEST(TextbookZero3, DeepPrefetchHidesNoMoreThanTheNextLayer) {
  StrategyOptions setup;
  setup.strategy = "zero3";
  setup.zero.prefetch_bucket_size = 150'000;  // three blocks
  Options options = mlp_options(4, 240000);
  options.model = "gpt-nano";
  expect_form(options, setup);
  options.batch = 24;
  EXPECT_EQ(
      run_on_textbook<ZeroFsdpStrategy>(options, setup).time.closed_form_s,
      kNotPredicted);
}

TEST(TextbookSharding, OtherWaysHaveNoForm) {
  Options options = mlp_options(4, 24);
  options.model = "gpt-nano";
  const auto expect_none = [&](const std::string& strategy, auto set) {
    StrategyOptions setup;
    setup.strategy = strategy;
    set(setup);
    const Report report = run_on_textbook<ZeroFsdpStrategy>(options, setup);
    EXPECT_EQ(report.time.closed_form_s, kNotPredicted) << strategy;
    EXPECT_EQ(report.time.closed_form_command,
              "./shardbook run zero_fsdp -- --world-size 4 --cluster textbook "
              "--strategy " +
                  strategy);
  };
  expect_none("zero2",
              [](auto& setup) { setup.zero.reduce_bucket_size = 1000; });
  expect_none("zero2",
              [](auto& setup) { setup.zero.allgather_bucket_size = 1000; });
  expect_none("zero1",
              [](auto& setup) { setup.zero.allgather_partitions = false; });
  expect_none("zero2", [](auto& setup) { setup.cpu_offload = true; });
  expect_none("zero3", [](auto& setup) { setup.cpu_offload = true; });
  expect_none("zero3", [](auto& setup) { setup.zero.overlap_comm = false; });
  expect_none("zero3",
              [](auto& setup) { setup.zero.max_reuse_distance = 60000; });
  expect_none("zero3",
              [](auto& setup) { setup.zero.max_live_parameters = 60000; });
  expect_none("fsdp", [](auto& setup) { setup.cpu_offload = true; });
  expect_none("fsdp", [](auto& setup) { setup.fsdp.forward_prefetch = true; });
  expect_none("fsdp",
              [](auto& setup) { setup.sharding_strategy = "no_shard"; });
  expect_none("fsdp", [](auto& setup) {
    setup.no_sync = true;
    setup.micro_batches = 2;
  });
  options.steps = 1;  // records the order of fetches
  expect_none("zero3", [](auto&) {});
}

}  // namespace
}  // namespace shardbook::textbook::sharded
