// The naive ZeRO-3, the reader's first: it equals one device, and the real one
// equals it.

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/03_zero_fsdp/naive_zero3.h"
#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/common/run/parity.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::fsdp_test {
namespace {

using zero_fsdp::NaiveZero3;

Options naive_options(int d, const std::string& model) {
  Options options;
  options.model = model;
  options.data = "random";
  options.world_size = d;
  options.batch = 12;
  options.seq = 8;
  options.steps = 3;
  options.dtype = DType::kF64;
  return options;
}

struct NaiveRun {
  ReferenceRun run;
  double bytes = 0;     ///< of the last step
  double expected = 0;  ///< tied parameters count at each use
};

NaiveRun train_naively(ProcessGroup& dp, const Options& options) {
  const ModelConfig config = model_config(options);
  const auto layers = layers_of(config);
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  NaiveZero3 zero(*layers, init, dp, options.optimizer,
                  options.optimizer_options);
  const Dataset data = Dataset::open(options, config);
  NaiveRun naive_run;
  const std::int64_t d = dp.size();
  for (std::int64_t k = 0; k < options.steps; ++k) {
    const Batch batch = data.batch(k, options.batch, BatchSlice{dp.rank(), d},
                                   options.batch / d);
    const double before = wire_bytes(dp.records());
    Tensor loss = Tensor::full({}, zero.step(batch.inputs, batch.targets) / d,
                               {DType::kF64, Device()});
    naive_run.bytes = wire_bytes(dp.records()) - before;
    dp.all_reduce(loss, ReduceOp::kSum, "loss").wait();
    naive_run.run.losses.push_back(loss.item());
  }
  // Two all-gathers and a reduce-scatter; the head has no forward of its own
  InitOptions on_meta = init;
  on_meta.device = Device::meta();
  for (int i = 0; i < layers->size(); ++i) {
    const int times = i + 1 < layers->size() ? 3 : 2;
    for (const Tensor& each : layers->make(i, on_meta)->parameters()) {
      const std::int64_t part = (each.numel() + d - 1) / d;
      naive_run.expected += static_cast<double>(times * part * 8 * (d - 1));
    }
  }
  naive_run.run.parameters = zero.full_parameters();
  return naive_run;
}

class NaiveZero3Parity
    : public testing::TestWithParam<std::tuple<int, std::string>> {};

TEST_P(NaiveZero3Parity, EqualsOneDeviceAndTheRealOne) {
  const auto [d, model] = GetParam();
  const Options options = naive_options(d, model);
  const auto ranks =
      on_ranks(d, [&](ProcessGroup& dp) { return train_naively(dp, options); });
  for (const NaiveRun& rank : ranks) {
    EXPECT_NEAR(rank.bytes, rank.expected, 1e-6);
  }
  const ReferenceRun one = [&] {
    RankContext context(Device::cpu(0));
    const RankContext::Scope scope(context);
    return train_one_device(options);
  }();
  const Parity parity = compare_runs(options, ranks[0].run, one);
  EXPECT_TRUE(parity.passed) << parity.max_rel;

  zero_fsdp::StrategyOptions setup;
  setup.strategy = "zero3";
  setup.zero.persistence_threshold = 0;
  const auto real = on_ranks(d, [&](ProcessGroup& dp) {
    zero_fsdp::ZeroFsdpStrategy strategy(options, setup, dp);
    ReferenceRun run;
    run.losses =
        train(options, strategy.optimizer(), false, [&](std::int64_t k) {
          return strategy.step(k);
        }).losses;
    run.parameters = strategy.full_state();
    return run;
  });
  ReferenceRun naive = ranks[0].run;
  naive.slack.clear();
  EXPECT_LT(compare_runs(options, real[0], naive).max_rel, 1e-10);
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, NaiveZero3Parity,
    testing::Combine(testing::ValuesIn(sized<int>({1, 2, 3, 4}, {1, 3})),
                     testing::Values("gpt-nano", "mlp")),
    [](const auto& info) {
      std::string name = std::get<1>(info.param);
      name.erase(std::remove(name.begin(), name.end(), '-'), name.end());
      return name + std::to_string(std::get<0>(info.param));
    });

}  // namespace
}  // namespace shardbook::fsdp_test
