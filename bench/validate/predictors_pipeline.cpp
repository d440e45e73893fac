// Bubbles of pipelines, by replays of their schedules.

#include <fmt/format.h>

#include <map>

#include "bench/validate/kinds.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/06_1f1b/schedules_zero_bubble.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

constexpr int kMaxRanks = 256, kMaxMicroBatches = 2048;

/// A time in milliseconds; 0 is one.
double milliseconds(const Row& row, const std::string& column) {
  const double value = row.number(column);
  SB_CHECK(value >= 0 && value < 1e9, row.place(), ": ", column, " is ", value,
           "; give milliseconds from 0");
  return value;
}

/// T_B is the time of the input's gradient alone.
pipeline::Costs costs_of(const Row& row) {
  pipeline::Costs costs;
  costs.forward = milliseconds(row, "T_F_ms");
  costs.backward_input = milliseconds(row, "T_B_ms");
  costs.backward_weight = milliseconds(row, "T_W_ms");
  costs.backward = costs.backward_input + costs.backward_weight;
  costs.communication = milliseconds(row, "T_comm_ms");
  return costs;
}

Outcome outcome_of(const Row& row, const std::string& schedule,
                   const pipeline::Replay& replay) {
  const std::string contest =
      fmt::format("{}, {} stages, {} micro-batches", row.text("model"),
                  row.count("pp"), row.count("num_microbatches"));
  return {schedule + ", " + contest,
          "bubble",
          {pipeline::window_bubble(replay), row.positive("bubble_rate"), 1,
           contest},
          "replay",
          last_digit(row.text("bubble_rate"))};
}

}  // namespace

// Qi et al. 2023, table 5.
std::vector<Outcome> bubble_rate(const Row& row) {
  static const std::map<std::string, std::string> names = {
      {"1F1B", "1f1b"}, {"ZB-H1", "zb-h1"}, {"ZB-H2", "zb-h2"}};
  const auto name = names.find(row.text("schedule"));
  if (name == names.end()) {
    throw NotExpressed("no schedule " + row.text("schedule"));
  }
  pipeline::schedules::ScheduleOptions options;
  options.num_ranks = row.count("pp", kMaxRanks);
  options.micro_batches = row.count("num_microbatches", kMaxMicroBatches);
  const auto schedule =
      pipeline::schedules::make_schedule(name->second, options);
  return {outcome_of(row, row.text("schedule"),
                     pipeline::replay(schedule, costs_of(row)))};
}

// The same table's schedules that are found by search within a memory limit.
std::vector<Outcome> automatic_bubble_rate(const Row& row) {
  const int ranks = row.count("pp", kMaxRanks);
  const int limit = row.count("memory_limit_per_stage", 100);
  pipeline::schedules::ZeroBubbleSearch search;
  search.costs = costs_of(row);
  search.memory_limit = 1.0 * limit * ranks;
  // Bytes of a transformer layer's activations that W reads, of all
  search.weight_share =
      32 / (34 + 5 * row.positive("heads") * row.positive("seq_len") /
                     row.positive("hidden"));
  const auto schedule = pipeline::schedules::zb_auto(
      ranks, row.count("num_microbatches", kMaxMicroBatches), search);
  return {outcome_of(row, fmt::format("ZB-{}p", limit),
                     pipeline::replay(schedule, search.costs))};
}

}  // namespace shardbook::validate
