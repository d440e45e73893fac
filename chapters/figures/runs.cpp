#include "chapters/figures/runs.h"

#include <fmt/format.h>

namespace shardbook::figures {

std::string on_shapes(const std::string& cluster, int world_size,
                      const std::string& model, std::int64_t batch,
                      std::int64_t seq) {
  return fmt::format(
      " --backend sim --cluster {} --world-size {} --model '{}' --data random "
      "--batch {} --seq {} --steps {} --no-check",
      cluster, world_size, model, batch, seq, kSteps);
}

Options options_on_shapes(const std::string& cluster, int world_size,
                          const std::string& model, std::int64_t batch,
                          std::int64_t seq) {
  Options options;
  options.chapter = "figures";
  options.backend = "sim";
  options.cluster = cluster;
  options.world_size = world_size;
  options.model = model;
  options.data = "random";
  options.batch = batch;
  options.seq = seq;
  options.steps = kSteps;
  options.check = false;
  return options;
}

sim::RankTimeline first_rank(const Report& report) {
  return sim::last_step(report.timelines).groups.at(0).timeline;
}

}  // namespace shardbook::figures
