// The program's strategy: parity, bytes and memory of real models.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/common/pipeline/partition.h"
#include "tests/chapters/05_gpipe/gpipe_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook::gpipe_test {
namespace {

using gpipe::GpipeStrategy;
using gpipe::StrategyOptions;
using testing::HasSubstr;

Options gpipe_options(const std::string& model) {
  Options options;
  options.model = model;
  options.data = "random";
  options.batch = 6;
  options.seq = 8;
  options.steps = 2;
  options.deterministic = true;
  return options;
}

/// Eight layers, so that eight ranks have one each.
std::string small_gpt() {
  return R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 16,)"
         R"( "n_embd": 16, "n_layer": 6, "n_head": 2})";
}

std::string small_resnet() {
  return R"({"model_type": "resnet", "depths": [1, 1, 1, 1],)"
         R"( "embedding_size": 8, "num_labels": 10})";
}

Report train_ranks(int p, Options options, const StrategyOptions& setup) {
  options.world_size = p;
  options.cluster = "none";
  return sharded_test::report_of<GpipeStrategy>(
      options, setup, [&](const Options& options) {
        return gpipe::train_one_device_in_reverse(options, setup);
      });
}

class GpipeTraining : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, GpipeTraining,
                         testing::ValuesIn(world_sizes()));

// Numbers, bytes and memory are as claimed, for every way to run.
TEST_P(GpipeTraining, NumbersBytesAndMemoryAreThosePredicted) {
  const int p = GetParam();
  // Sizes: 6; 2 2 2; 1 x 6
  const auto pieces = sized<std::int64_t>({1, 4, 6}, {4});
  for (const DType dtype :
       sized<DType>({DType::kF64, DType::kF32}, {DType::kF64})) {
    for (const char* recompute : {"always", "except_last", "never"}) {
      for (const std::int64_t m : pieces) {
        for (const bool skips : {false, true}) {
          Options options = gpipe_options(small_gpt());
          options.dtype = dtype;
          options.dropout = dtype == DType::kF64 ? 0.1 : 0;
          options.batch = m == 4 ? 5 : 6;  // 2 2 1
          const StrategyOptions setup{
              .micro_batches = m, .recompute = recompute, .long_skips = skips};
          const auto what = std::string(recompute) + " " + dtype_name(dtype) +
                            " m " + std::to_string(m) + " skips " +
                            std::to_string(skips);
          const Report report = train_ranks(p, options, setup);
          sharded_test::expect_claims(report, what);
          // Tied embeddings on two ranks are summed in another order
          if (p == 1) {
            EXPECT_EQ(report.parity.max_abs, 0) << what;
          }
        }
      }
    }
  }
}

// No parameter is on two ranks, so every bit equals one device's.
TEST(GpipeParity, AnMlpHasTheBitsOfOneDevice) {
  for (const int p : sized<int>({1, 2, 3, 4}, {3})) {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      Options options = gpipe_options("mlp");
      options.dtype = dtype;
      options.steps = 3;
      options.batch = 7;
      const Report report = train_ranks(p, options, {3});
      sharded_test::expect_claims(report, "mlp");
      EXPECT_EQ(report.parity.max_abs, 0);
    }
  }
}

// Clipping needs the norm of the whole model on every rank.
TEST(GpipeParity, ClippingUsesTheNormOfAllStages) {
  Options options = gpipe_options("mlp");
  options.optimizer = "sgd";
  options.clip = 0.01;
  const StrategyOptions setup{3, "always"};
  sharded_test::expect_claims(train_ranks(4, options, setup), "clipped");
}

// Batch norms use the micro-batch's own statistics, as on one device.
TEST(GpipeParity, ImagesTrainToo) {
  Options options = gpipe_options(small_resnet());
  options.image_size = 32;
  options.dtype = DType::kF64;
  for (const char* recompute : {"always", "never"}) {
    const StrategyOptions setup{3, recompute};
    for (const int p : sized<int>({1, 2, 4}, {2})) {
      sharded_test::expect_claims(train_ranks(p, options, setup), recompute);
    }
  }
}

// Running statistics are updated once per mini-batch, from all its rows, also
// when there are fewer pieces than asked for. Recomputation does not count
// again.
TEST(GpipeBatchNorm, StatisticsAreThoseOfTheMiniBatch) {
  Options options = gpipe_options(small_resnet());
  options.image_size = 32;
  options.dtype = DType::kF64;
  options.batch = 5;
  options.steps = 1;
  // One device and the whole batch. The first norm reads images, which do not
  // depend on the pieces, so its statistics are the same in all runs
  RankContext context(Device::cpu(0), 0, 1);
  const RankContext::Scope scope(context);
  const auto layers = layers_of(model_config(options));
  Stage whole(*layers, 0, layers->size(),
              {.seed = options.seed, .dtype = options.dtype});
  const Dataset data = Dataset::open(options, model_config(options));
  whole(data.batch(0, options.batch).inputs);
  for (const char* recompute : {"always", "except_last", "never"}) {
    // 4 chunks give 2 2 1
    for (const std::int64_t chunks : sized<std::int64_t>({1, 4, 5}, {4})) {
      const auto ranks = on_ranks(2, [&](ProcessGroup& world) {
        GpipeStrategy strategy(options, {chunks, recompute}, world);
        strategy.step(0);
        const Tensors buffers = strategy.model().stage(world.rank()).buffers();
        return std::vector{buffers.at(0).to_vector<double>(),
                           buffers.at(1).to_vector<double>()};
      });
      for (std::size_t which : {0, 1}) {  // mean, variance
        const auto expected = whole.buffers().at(which).to_vector<double>();
        EXPECT_NE(expected[0], which == 0 ? 0.0 : 1.0) << "has moved";
        ASSERT_EQ(ranks[0][which].size(), expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_NEAR(ranks[0][which][i], expected[i], 1e-12)
              << recompute << " " << chunks;
        }
      }
    }
  }
}

TEST(GpipePartition, StagesAreCutAsAsked) {
  const Options options = gpipe_options("gpt-nano");
  const auto layers = layers_of(ModelConfig::read("gpt-nano"));
  const auto cuts = [&](const std::string& partition, int p) {
    return cuts_of(options, partition, *layers, p,
                   [] { return Tensors{tokens_of(2, 8, 256)}; });
  };
  EXPECT_EQ(cuts("uniform", 4), (std::vector<int>{0, 2, 4, 5, 6}));
  EXPECT_EQ(cuts("2,1,1,2", 4), (std::vector<int>{0, 2, 3, 4, 6}));
  // Blocks have most parameters: the two ends are cheap
  EXPECT_EQ(cuts("parameters", 2), (std::vector<int>{0, 3, 6}));
  EXPECT_EQ(cuts("type:block", 4).size(), 5u);
  EXPECT_EQ(cuts("time", 2).size(), 3u);
  EXPECT_EQ(error_of([&] { cuts("uniform", 7); }),
            "7 stages: the model has 6 layers; give at most one stage per "
            "layer");
  EXPECT_EQ(
      error_of([&] { cuts("2,4", 3); }),
      "--partition 2,4: 2 stages; there are 3; give a list such as 2,2,2");
  EXPECT_EQ(error_of([&] { cuts("2,x", 2); }),
            "--partition 2,x: give uniform, parameters, time, type:REGEX, or "
            "the layers of each stage (2,1,3)");
  EXPECT_EQ(error_of([&] { cuts("2,3", 2); }),
            "--partition 2,3: adds up to 5 layers; gpt-nano has 6 "
            "layers: embedding, 4 blocks and head; give a list such as 3,3");
}

TEST(GpipeFigure, OfFourStages) {
  Options options = gpipe_options("gpt-nano");
  options.world_size = options.batch = 4;
  EXPECT_EQ(
      gpipe::figure(options, {4}),
      "rank 0 |F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B3--- B2--- B1--- B0---\n"
      "rank 1 |.  F0 F1 F2 F3 .  .  .  .  .  .  B3--- B2--- B1--- B0--- .  .\n"
      "rank 2 |.  .  F0 F1 F2 F3 .  .  .  B3--- B2--- B1--- B0--- .  .  .  .\n"
      "rank 3 |.  .  .  F0 F1 F2 F3 B3--- B2--- B1--- B0--- .  .  .  .  .  "
      ".\n");
}

TEST(GpipeOptions, ImpossibleOnesAreKnownBeforeThereAreRanks) {
  const auto error = [](int world_size, const StrategyOptions& setup,
                        const std::string& cluster = "dgx-a100") {
    Options options = gpipe_options("gpt-nano");
    options.world_size = world_size;
    options.cluster = cluster;
    return error_of([&] { gpipe::check_strategy_options(options, setup); });
  };
  EXPECT_EQ(error(6, {6}), "");
  EXPECT_THAT(error(6, {7}), HasSubstr("--micro-batches 7: give 1 to 6"));
  EXPECT_THAT(error(7, {6}), HasSubstr("--world-size 7: gpt-nano has 6"));
  EXPECT_THAT(error(2, {6, "always", "2,3"}), HasSubstr("--partition 2,3"));
  const Options options = gpipe_options("mlp");
  EXPECT_THAT(error_of([&] {
                train_ranks(2, options,
                            {.micro_batches = 2, .long_skips = true});
              }),
              HasSubstr("--long-skips: the layers of a model of type mlp"));
}

// Two stages load the model that four stages saved.
TEST(GpipeFiles, AModelInPiecesIsSavedWhole) {
  const TempFolder folder;
  const std::string path = folder / "gpipe.safetensors";
  Options options = gpipe_options(small_gpt());
  on_ranks(4, [&](ProcessGroup& world) {
    GpipeStrategy strategy(options, {3}, world);
    strategy.step(0);
    const std::vector<NamedTensor> state = strategy.full_state();
    if (world.rank() != 0) return;
    Options save = options;
    save.save = path;
    save_results(save, model_with(options, state), strategy.data());
  });
  options.load = path;
  options.steps = 1;
  sharded_test::expect_claims(train_ranks(2, options, {3}), "loaded");
}

}  // namespace
}  // namespace shardbook::gpipe_test
