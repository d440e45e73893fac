// Figures and tables that the program prints besides its report.

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"
#include "core/how_many.h"
#include "core/text_file.h"

namespace shardbook::pipeline {
namespace {

std::string list(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += std::to_string(value) + " ";
  return text;
}

void print_schedule(const Schedule& schedule) {
  const Replay played = replay(schedule, Costs{});
  fmt::print("{}: {}, {}, {}{}; F takes 1, B 2, I and W 1\n\n{}\n",
             schedule.name, how_many(schedule.num_ranks, "rank"),
             how_many(schedule.num_stages, "stage"),
             how_many(schedule.num_micro_batches, "micro-batch"),
             schedule.repeats == 0
                 ? ""
                 : fmt::format(" (the first and the last of {})",
                               schedule.total_micro_batches()),
             draw(schedule, played));
  fmt::print("slots               {}\n", played.makespan);
  fmt::print("idle share          {:.1f} %\n", 100 * idle_share(played));
  fmt::print("bubble over work    {:.1f} %\n", 100 * bubble_over_work(played));
  fmt::print("activations alive   {}until B or I, by rank\n",
             list(max_live_activations(schedule, Until::kInput)));
  fmt::print("                    {}until B or W\n",
             list(max_live_activations(schedule, Until::kWeight)));
  if (!schedule.flushes) {
    fmt::print("versions alive      {}of the weights\n",
               list(max_versions(schedule)));
  }
}

constexpr int kShownUpdates = 10;

/// One line: a number for each update.
std::string line_of(const ProcessGroup& world, int stage,
                    const std::string& what,
                    const std::vector<std::string>& numbers) {
  std::string text =
      fmt::format("  {:>4}  {:>5}  {:<20}", world.rank(), stage, what);
  for (const std::string& each : numbers) text += fmt::format(" {:>6}", each);
  return text + "\n";
}

/// The gradients of one update.
struct Staleness {
  int forward = 0, backward = 0, wrong = 0;
  double error = 0;
};

std::string lines_of(const std::vector<VersionUse>& uses,
                     const ProcessGroup& world) {
  std::map<int, Staleness> updates;
  bool is_wrong = false;
  for (const VersionUse& each : uses) {
    if (each.newest >= kShownUpdates) continue;
    Staleness& update = updates[each.newest];
    update.forward = std::max(update.forward, each.newest - each.forward);
    update.backward = std::max(update.backward, each.newest - each.backward);
    update.wrong += 1;
    update.error += each.error;
    is_wrong = is_wrong || each.backward != each.forward;
  }
  std::vector<std::string> forward, backward, error;
  for (const auto& [number, each] : updates) {
    forward.push_back(std::to_string(each.forward));
    backward.push_back(std::to_string(each.backward));
    error.push_back(fmt::format("{:.2f}", 100 * each.error / each.wrong));
  }
  const int stage = uses[0].stage;
  if (!is_wrong) return line_of(world, stage, "forward and backward", forward);
  return line_of(world, stage, "forward", forward) +
         line_of(world, stage, "backward", backward) +
         line_of(world, stage, "error of gradient, %", error);
}

}  // namespace

void show_schedule(const Plan& plan, const StrategyOptions& setup) {
  if (setup.print_schedule) print_schedule(plan.schedule);
  const std::string& file = setup.write_schedule;
  if (file.empty()) return;
  SB_CHECK(file.ends_with(".json"), "--write-schedule ", file,
           ": give a FILE.json, which --schedule can read");
  SB_CHECK(
      plan.schedule.repeats == 0, "--write-schedule ", file,
      ": the lists of this run repeat themselves; give at most --steps ",
      plan.schedule.num_micro_batches / plan.schedule.micro_batches_per_step);
  const std::string text = to_json(plan.schedule);
  schedule_from_json(text, "--write-schedule " + file);
  write_text_file(file, text, "--write-schedule " + file + ": this file");
}

std::string staleness_table(const std::vector<VersionUse>& uses,
                            ProcessGroup& pp) {
  const std::vector<std::string> rows =
      pp.collect(uses.empty() ? "" : lines_of(uses, pp));
  std::string lines;
  for (const std::string& each : rows) lines += each;
  if (pp.rank() != 0 || lines.empty()) return "";
  std::string table =
      "how many updates old the weights were, for the gradient in each of the "
      "first updates\n";
  table += fmt::format("  {:>4}  {:>5}  {:<20}", "rank", "stage", "weights of");
  for (int i = 1; i <= kShownUpdates; ++i) table += fmt::format("{:>7}", i);
  return table + "\n" + lines;
}

}  // namespace shardbook::pipeline
