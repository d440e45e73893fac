// Bubbles of pipelines, by replays of their schedules.

#include <fmt/format.h>

#include <map>

#include "bench/validate/kinds.h"
#include "chapters/06_1f1b/replay.h"
#include "chapters/06_1f1b/schedules.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

/// A time in milliseconds; 0 is one.
double milliseconds(const Row& row, const std::string& column) {
  const double value = row.number(column);
  SB_CHECK(value >= 0 && value < 1e9, row.place(), ": ", column, " is ", value,
           "; give milliseconds from 0");
  return value;
}

// Qi et al. 2023, table 5: T_B is the time of the input's gradient alone.
std::vector<Outcome> bubble_rate(const Row& row) {
  static const std::map<std::string, std::string> names = {
      {"1F1B", "1f1b"}, {"ZB-H1", "zb-h1"}, {"ZB-H2", "zb-h2"}};
  const auto name = names.find(row.text("schedule"));
  if (name == names.end()) {
    throw NotExpressed("no schedule " + row.text("schedule"));
  }
  pipeline::schedules::ScheduleOptions options;
  options.num_ranks = row.count("pp", 1024);
  options.micro_batches = row.count("num_microbatches", 4096);
  pipeline::Costs costs;
  costs.forward = milliseconds(row, "T_F_ms");
  costs.backward_input = milliseconds(row, "T_B_ms");
  costs.backward_weight = milliseconds(row, "T_W_ms");
  costs.backward = costs.backward_input + costs.backward_weight;
  costs.communication = milliseconds(row, "T_comm_ms");
  Outcome outcome;
  outcome.pair.predicted = pipeline::window_bubble(pipeline::replay(
      pipeline::schedules::make_schedule(name->second, options), costs));
  outcome.pair.published = row.positive("bubble_rate");
  outcome.last_digit = last_digit(row.text("bubble_rate"));
  outcome.pair.contest =
      fmt::format("{}, {} stages, {} micro-batches", row.text("model"),
                  options.num_ranks, options.micro_batches);
  outcome.row = row.text("schedule") + ", " + outcome.pair.contest;
  outcome.unit = "bubble";
  outcome.trust = "replay";
  return {outcome};
}

}  // namespace

std::vector<Kind> pipeline_kinds() {
  return {{"zero_bubble_table5",
           {"model", "pp", "num_microbatches", "schedule", "T_F_ms", "T_B_ms",
            "T_W_ms", "T_comm_ms", "bubble_rate"},
           true,
           digits_aim(),
           bubble_rate,
           "a rank's bubble is the part of the time from its first action to "
           "its last in which it idles; the largest of all ranks"}};
}

}  // namespace shardbook::validate
