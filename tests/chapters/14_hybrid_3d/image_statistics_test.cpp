// Running statistics of batch norms: every replica has one device's.

#include "chapters/14_hybrid_3d/batch_statistics.h"
#include "tests/chapters/14_hybrid_3d/image_support.h"
#include "tests/support/larger.h"

namespace shardbook::hybrid {
namespace {

/// The running statistics of a rank's stages after three steps.
struct AfterSteps {
  int pp = 0;
  Values statistics;
};
std::vector<AfterSteps> after_three_steps(const HybridOptions& setup) {
  const Options options = image_options(ranks_of(setup));
  return on_mesh(
      options, setup,
      [&](ProcessGroup&, DeviceMesh& mesh, HybridStrategy& strategy) {
        for (std::int64_t k = 0; k < options.steps; ++k) strategy.step(k);
        return AfterSteps{mesh.coordinate("pp"),
                          values_of(running_statistics(strategy.model()))};
      });
}

TEST(HybridStatistics, AreTheSameBitsOnAllReplicas) {
  for (const char* schedule : {"1f1b", "dualpipe"}) {
    HybridOptions setup = image_mesh(2, 2, 1);
    setup.schedule = schedule;
    const std::vector<AfterSteps> all = after_three_steps(setup);
    for (const AfterSteps& one : all) {
      EXPECT_FALSE(one.statistics.empty());
      for (const AfterSteps& other : all) {
        // Two directions: each stage is on both ranks of a pipeline
        if (one.pp != other.pp && schedule == std::string("1f1b")) continue;
        EXPECT_EQ(one.statistics, other.statistics);
      }
    }
  }
}

// The saved model equals one device's, running statistics included; the first
// norm's follow from the images alone, without any pieces.
TEST(HybridStatistics, AreSavedAsThoseOfAllImages) {
  TempFolder folder;
  const HybridOptions setup = image_mesh(2, 2, 1);
  Options options = image_options(4);
  options.steps = 1;
  options.save = folder / "model.safetensors";
  ReferenceRun one = reference_run(options, setup);
  train_on(options, setup, &one);
  const auto expected = values_of(one.parameters);
  EXPECT_EQ(expected.count("layer2.0.downsample.1.running_var"), 1u);
  const auto found = state_in(options.save);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : found) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(values[i], expected.at(name)[i], 1e-12) << name;
    }
  }
  // The whole batch at once
  const auto config = model_config(options);
  InitOptions init;
  init.dtype = options.dtype;
  init.seed = options.seed;
  const auto plain = make_model(config, init);
  (*plain)(Dataset::open(options, config).batch(0, options.batch).inputs);
  for (const NamedTensor& each : plain->named_buffers()) {
    if (each.name.rfind("bn1.", 0) != 0) continue;
    const std::vector<double> values = each.tensor.to_vector<double>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(values[i], found.at(each.name)[i], 1e-12) << each.name;
    }
  }
}

enum class Rule { kAllImages, kOwnImages, kWithoutCount };

/// The running statistics of a stem on each of two ranks that see two images
/// each, and (first) on one device that sees all four.
std::vector<std::vector<double>> statistics_of_two(Rule rule) {
  const Options options = image_options(2);
  const auto layers =
      std::shared_ptr<const LayerList>(layers_of(model_config(options)));
  const Dataset data = Dataset::open(options, model_config(options));
  const auto read = [](Module& stem) {
    std::vector<double> values;
    for (const Tensor& each : stem.buffers()) {
      for (const double value : each.to_vector<double>()) {
        values.push_back(value);
      }
    }
    return values;
  };
  auto all = on_ranks(2, [&](ProcessGroup& world) {
    const auto alone = world.split(world.rank(), 0, "pp");
    PipelineLayout layout = one_stage_per_rank({0, layers->size()});
    PipelineModel model(options, layers, layout, *alone);
    Stage& stage = model.stage(0);
    defer_batch_norms(stage);
    stage(data.batch(0, 4, BatchSlice{2 * world.rank(), 1}, 2).inputs);
    if (rule == Rule::kAllImages) {
      commit_statistics(model, world);
    } else if (rule == Rule::kOwnImages) {
      commit_batch_norms(stage);
    } else {
      sum_over_ranks(world, pending_statistics(stage), "statistics");
      commit_batch_norms(stage);
    }
    return read(stage[0]);
  });
  RankContext context(Device::cpu(0), 0, 1);
  const RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = options.dtype;
  init.seed = options.seed;
  Stage stem(*layers, 0, 1, init);
  stem(data.batch(0, 4).inputs);
  all.insert(all.begin(), read(stem));
  return all;
}

// Trap: only evaluation reads them, so training looks right without the sum.
// Each replica then has its own, and DDP's rule saves the first one's.
TEST(HybridStatistics, WithoutTheSumReplicasDriftApart) {
  const auto right = statistics_of_two(Rule::kAllImages);
  EXPECT_LT(largest_gap(right[0], right[1]), 1e-14);
  EXPECT_EQ(right[1], right[2]);
  const auto own = statistics_of_two(Rule::kOwnImages);
  EXPECT_GT(largest_gap(own[1], own[2]), 1e-4);
  EXPECT_GT(largest_gap(own[0], own[1]), 1e-4);
}

// Trap: sums over two ranks need the count of both.
TEST(HybridStatistics, SumsNeedTheirNumberOfRanks) {
  const auto wrong = statistics_of_two(Rule::kWithoutCount);
  EXPECT_GT(largest_gap(wrong[0], wrong[1]), 1e-3);
}

}  // namespace
}  // namespace shardbook::hybrid
