#include "chapters/06_1f1b/picture.h"

#include <fmt/format.h>

#include <algorithm>

#include "chapters/06_1f1b/draw.h"
#include "chapters/06_1f1b/replay.h"

namespace shardbook::pipeline {
namespace {

std::string list(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += std::to_string(value) + " ";
  return text;
}

}  // namespace

void print_schedule(const Schedule& schedule) {
  const Replay played = replay(schedule, Costs{});
  fmt::print(
      "{}: {} ranks, {} stages, {} micro-batches; F takes 1, B 2, I and "
      "W 1\n\n{}\n",
      schedule.name, schedule.num_ranks, schedule.num_stages,
      schedule.num_micro_batches, draw(schedule, played));
  fmt::print("slots               {}\n", played.makespan);
  fmt::print("idle share          {:.1f} %\n", 100 * idle_share(played));
  fmt::print("bubble over work    {:.1f} %\n", 100 * bubble_over_work(played));
  fmt::print("activations alive   {}until B or I, by rank\n",
             list(max_live_activations(schedule, played, Until::kInput)));
  fmt::print("                    {}until B or W\n",
             list(max_live_activations(schedule, played, Until::kWeight)));
  if (!schedule.flushes) {
    fmt::print("versions alive      {}of the weights\n",
               list(max_versions(schedule)));
  }
}

std::string staleness_table(const Trainer& trainer, ProcessGroup& world) {
  const std::vector<VersionUse>& uses = trainer.version_uses();
  std::string row;
  if (!uses.empty()) {
    int forward = 0, apart = 0, wrong = 0;
    double error = 0;
    for (const VersionUse& each : uses) {
      forward = std::max(forward, each.newest - each.forward);
      apart = std::max(apart, each.newest - each.backward);
      if (each.backward == each.forward) continue;
      ++wrong;
      error += each.error;
    }
    row =
        fmt::format("  {:>4}  {:>5}  {:>9}  {:>17}  {:>18}  {:>17}\n",
                    world.rank(), uses[0].stage, uses.size(), forward, apart,
                    wrong == 0 ? std::string("0")
                               : fmt::format("{:.1f} %", 100 * error / wrong));
  }
  const std::vector<std::string> rows = world.collect(row);
  if (world.rank() != 0 || row.empty()) return "";
  std::string table =
      "updates behind, when a gradient is applied\n"
      "  rank  stage  backwards  forward's weights  backward's weights  "
      "error of gradient\n";
  for (const std::string& each : rows) table += each;
  return table;
}

void print(const std::string& text) { fmt::print("{}", text); }

}  // namespace shardbook::pipeline
