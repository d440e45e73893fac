#pragma once

// Virtual time against closed forms: a model, its run on shapes, and the
// comparison of a bill's form (chapters/common/run/textbook.h) with the clock.
//
//   const Report report = on_textbook("02_ddp --world-size 4 --batch 8");
//   expect_closed_form(report);

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "chapters/common/run/program.h"
#include "chapters/common/run/textbook.h"
#include "chapters/common/run/worlds.h"
#include "chapters/programs/programs.h"
#include "sim/world.h"

namespace shardbook::textbook {

// --- The model ---------------------------------------------------------------

// The model "mlp": an embedding, which costs nothing here, and three layers of
// 64 x 256 or 256 x 64 weights, which cost the same.
constexpr int kLayers = 3;
constexpr double kWeights = 64 * 256;
constexpr double kParameters = 4 * kWeights + 256 + 64 + 256;

/// Forward of one layer; backward takes twice as long, half of it for the
/// gradient of the weights.
inline double layer_forward_s(double tokens) {
  return 2 * kWeights * tokens / kRate;
}

inline Options mlp_options(int world_size, std::int64_t batch) {
  Options options;
  options.world_size = world_size;
  options.model = "mlp";
  options.data = "random";
  options.backend = "sim";
  options.cluster = "textbook";
  options.steps = 3;
  options.batch = batch;
  options.seq = 64;
  return options;
}

/// Runs `rank` on each of `num_ranks` ranks, on shapes, with a clock.
inline void run_on_shapes(const Options& options, int num_ranks,
                          const std::function<void(ProcessGroup&)>& rank) {
  sim::WorldOptions world;
  world.launch = launch_options(options);
  world.cost = cost_model(options);
  sim::run_world(num_ranks, rank, world);
}

/// Trains by `StrategyType(options, setup, world)` on shapes.
template <typename StrategyType, typename Setup>
Report run_on_textbook(Options options, const Setup& setup) {
  options.backend = "sim";
  options.cluster = "textbook";
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    StrategyType strategy(options, setup, world);
    run.train(options, strategy);
  };
  return run_and_compare(options, chapter);
}

inline void expect_time(double counted, double closed_form) {
  EXPECT_NEAR(counted / closed_form, 1, 1e-9)
      << counted << " s counted, " << closed_form << " s by the closed form";
}

/// The bill has a closed form of the step's time, and the clock agrees.
inline void expect_closed_form(const Report& report) {
  ASSERT_GE(report.time.closed_form_s, 0) << "no closed form";
  expect_time(report.time.step_s, report.time.closed_form_s);
}

/// The report of a chapter's line, where the line does not say otherwise of
/// mlp_options' model and samples.
inline Report on_textbook(std::string line) {
  return shardbook::run(line.insert(
      line.find(' '),
      " --backend sim --cluster textbook --data random --model mlp --seq 64"));
}

inline void expect_closed_form(const std::string& line) {
  SCOPED_TRACE(line);
  expect_closed_form(on_textbook(line));
}

inline void expect_no_form(const std::string& line) {
  EXPECT_EQ(on_textbook(line).time.closed_form_s, kNotPredicted) << line;
}

}  // namespace shardbook::textbook
