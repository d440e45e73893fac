// Stages: bubbles of pipelines, by replays of their schedules, and the chapter's
// own sweep of model parallelism on two devices.

#include <fmt/format.h>

#include <map>
#include <string>

#include "bench/validate/kinds.h"
#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/planner/on_shapes.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

constexpr int kMaxRanks = 256, kMaxMicroBatches = 2048;

/// A time in milliseconds, which may be 0.
double milliseconds(const Row& row, const std::string& column) {
  const double value = row.number(column);
  SB_CHECK(value >= 0 && value < 1e9, row.place(), ": ", column, " is ", value,
           "; give milliseconds from 0");
  return value;
}

/// T_B is the time of the input's gradient only.
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
  const auto name = choice<std::string>(
      row, "schedule",
      {{"1F1B", "1f1b"}, {"ZB-H1", "zb-h1"}, {"ZB-H2", "zb-h2"}});
  pipeline::schedules::ScheduleOptions options;
  options.num_ranks = row.count("pp", kMaxRanks);
  options.micro_batches = row.count("num_microbatches", kMaxMicroBatches);
  const auto schedule = pipeline::schedules::make_schedule(name, options);
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
  // The share of a layer's activation bytes that W reads
  search.weight_share =
      32 / (34 + 5 * row.positive("heads") * row.positive("seq_len") /
                     row.positive("hidden"));
  const auto schedule = pipeline::schedules::zb_auto(
      ranks, row.count("num_microbatches", kMaxMicroBatches), search);
  return {outcome_of(row, fmt::format("ZB-{}p", limit),
                     pipeline::replay(schedule, search.costs))};
}

namespace {

/// A step of ResNet-50 in each way.
model_parallel::Sweep sweep_of(std::int64_t batch, std::int64_t image_size,
                               std::int64_t split_size) {
  Options options = planner::shape_options();
  // The text names no device; a processor of a K80, fitted to its first row,
  // gives the other three
  options.cluster = "k80-pcie";
  options.world_size = 2;
  options.model = "resnet50";
  options.batch = batch;
  options.seq = 1;
  options.image_size = image_size;
  options.optimizer = "sgd";
  return model_parallel::run_sweep(options, {}, {split_size}, /*repeats=*/1);
}

/// Height of "3x128x128".
std::int64_t image_size(const Row& row) {
  const std::string& image = row.text("image");
  const std::size_t last = image.rfind('x');
  SB_CHECK(last != std::string::npos && image.rfind("3x", 0) == 0, row.place(),
           ": image is \"", image, "\"; give 3xHEIGHTxWIDTH");
  return std::stoll(image.substr(last + 1));
}

}  // namespace

std::vector<Outcome> tutorial(const Row& row) {
  require(row.text("model") == "ResNet50",
          "the chapter's table is of ResNet50");
  const int batch = row.count("batch", 1 << 16);
  const std::string& variant = row.text("variant");
  const bool is_pipeline = variant == "pipelined";
  const int split = is_pipeline ? row.count("split_size", batch) : batch;
  const model_parallel::Sweep sweep = sweep_of(batch, image_size(row), split);
  const auto& time = is_pipeline                ? sweep.pipelined[0]
                     : row.integer("gpus") == 1 ? sweep.single
                                                : sweep.naive;
  const double seconds = row.positive("num_batches") * time.virtual_s;
  return {{variant + (is_pipeline ? fmt::format(", splits of {}", split) : ""),
           "s",
           {seconds, row.positive("time_s"), 1, "ResNet50"},
           "extrapolated"}};
}

}  // namespace shardbook::validate
