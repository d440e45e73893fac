// Running statistics of batch norms: every replica has one device's.

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "tests/chapters/14_hybrid_3d/image_support.h"

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

}  // namespace
}  // namespace shardbook::hybrid
