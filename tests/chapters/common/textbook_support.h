#pragma once

// Virtual time against closed forms: the cluster, a model, and the comparison.
//
// On the cluster `textbook` a product takes its operations over one rate, a
// message latency plus bytes over bandwidth, and nothing else takes time. The
// tests write down what a step takes there from sizes and degrees, as the
// chapters' pages do. The clock must come to the same.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "chapters/common/run/worlds.h"
#include "sim/world.h"

namespace shardbook::textbook {

// --- The cluster -------------------------------------------------------------

constexpr double kRate = 1e14;       // flops per second
constexpr double kLatency = 5e-6;    // seconds
constexpr double kBandwidth = 1e11;  // bytes per second

inline double message(double bytes) { return kLatency + bytes / kBandwidth; }
inline double all_gather(int n, double bytes) {
  return (n - 1) * (kLatency + bytes / n / kBandwidth);
}
inline double reduce_scatter(int n, double bytes) {
  return all_gather(n, bytes);
}
inline double all_reduce(int n, double bytes) {
  return reduce_scatter(n, bytes) + all_gather(n, bytes);
}

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

template <typename Trainer, typename How>
double step_s(const Options& options, const How& how) {
  const Report report = run_chapter(
      options, [&](const Options& as, ProcessGroup& world, Report& report) {
        Trainer trainer(as, how, world);
        const TrainingLog log =
            train(as, trainer.optimizer(), false,
                  [&](std::int64_t step) { return trainer.step(step); });
        finish_rank(as, world, log, trainer.predicted_bytes(), trainer.bill(),
                    report);
      });
  return report.time.step_s;
}

inline void expect_time(double counted, double closed_form) {
  EXPECT_NEAR(counted / closed_form, 1, 1e-9)
      << counted << " s counted, " << closed_form << " s by the closed form";
}

}  // namespace shardbook::textbook
