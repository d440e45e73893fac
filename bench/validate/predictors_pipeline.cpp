// Pipelines: GPipe's memory by formulae, and its speed by the chapter in the `sim`
// world; bubbles, by replays of schedules; the chapter's own sweep of model
// parallelism on two devices.

#include <fmt/format.h>

#include <optional>
#include <string>

#include "bench/validate/jobs.h"
#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/planner/on_shapes.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

// --- GPipe -------------------------------------------------------------------

constexpr double kGiB = 1 << 30;

/// The paper's names of them: "Transformer-13 (d_model 2048, ...)".
struct Transformer {
  double layers, hidden, inner, heads, vocab, seq;
};

std::optional<Transformer> read_model(const Row& row) {
  const std::vector<double> n = numbers_in(
      row, "model",
      R"(Transformer-(\d+) \(d_model (\d+), d_ff (\d+), (\d+) heads, )"
      R"(vocab (\d+)k, seq (\d+)\))");
  if (n.empty()) return std::nullopt;
  return Transformer{n[0], n[1], n[2], n[3], 1000 * n[4], n[5]};
}

/// Products with their biases, two norms per layer; separate tables for input
/// and output.
double parameters(const Transformer& t) {
  const double layer = 4 * t.hidden * (t.hidden + 1) + 2 * t.hidden * t.inner +
                       t.inner + t.hidden + 4 * t.hidden;
  return t.layers * layer + 2 * t.vocab * t.hidden;
}

/// Bytes that a layer keeps of one sequence in f32: 16 elements per token and
/// hidden unit as in chapters/common/run/kept.cpp, two masks of a byte, and,
/// since attention was not fused, the probabilities before and after dropout
/// with their mask. Korthikanti et al. 2022, section 4.1.
double layer_bytes(const Transformer& t) {
  return t.seq * t.hidden * (66 + 9 * t.heads * t.seq / t.hidden);
}

/// Peak over all partitions together, m micro-batches of one sequence: each
/// keeps the inputs of all of them and the activations of one; the last one
/// also logits and probabilities. Huang et al. 2019, section 2.3.
double activation_bytes(const Transformer& t, double partitions, double m) {
  const double boundary = t.seq * t.hidden * 4;
  return partitions * m * boundary + t.layers * layer_bytes(t) +
         2 * t.seq * t.vocab * 4;
}

// --- Speed -------------------------------------------------------------------

/// Speed of K equal stages over one device that also recomputes: only the
/// bubble is lost.
double bubble_bound(int stages, int micro_batches) {
  return stages * (1 - gpipe::idle_share(stages, micro_batches));
}

/// The same where recomputation begins before the gradient arrives: of F, R and
/// B (1, 1 and 2), only F and B are in the bubble.
double early_recompute_bound(int stages, int micro_batches) {
  return 4.0 * stages * micro_batches /
         (4.0 * micro_batches + 3.0 * (stages - 1));
}

/// Samples per second of a language model as in the paper.
double transformer_speed(const char* cluster, int layers, int stages,
                         int micro_batches) {
  constexpr int kBatch = 32;  // sequences, as for the paper's table 1
  HybridJob job;
  job.cluster = cluster_named(cluster);
  job.sizes = {.hidden = 2048, .heads = 32, .seq = 1024, .vocabulary = 32000};
  job.layers = layers;
  job.layout.dtype = DType::kF32;
  job.layout.recompute = Recompute::kBlocks;
  job.pp = stages;
  job.micro_batches = micro_batches;
  job.layout.micro_batch = kBatch / micro_batches;
  const StepTime time =
      stages == 1 ? on_one_device(job) : with_gpipe(job, options_of(job));
  return kBatch / time.seconds;
}

/// Images per second of torchvision's ResNet-101 on P40.
double resnet101_speed(int stages, int micro_batches, int images) {
  HybridJob job;
  job.cluster = cluster_named("p40-pcie");
  job.layout.dtype = DType::kF32;
  job.layout.micro_batch = images;
  job.pp = stages;
  job.micro_batches = micro_batches;
  ModelConfig model = ModelConfig::read("resnet50");
  model.depths = {3, 4, 23, 3};
  Options options = options_of(job);
  options.model = model.to_json();
  options.image_size = 224;
  options.seq = 1;
  // Without micro-batches nothing is recomputed: that is the baseline
  const char* checkpoint = micro_batches == 1 ? "never" : "except_last";
  return images * micro_batches / with_gpipe(job, options, checkpoint).seconds;
}

// --- Bubbles and devices in turn ---------------------------------------------

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
  const auto found = numbers_in(row, "image", R"(3x(\d{1,5})x\d+)");
  SB_CHECK(!found.empty(), row.place(), ": image is \"", row.text("image"),
           "\"; give 3xHEIGHTxWIDTH");
  return static_cast<std::int64_t>(found[0]);
}

}  // namespace

// Parameters with gradient and one moment, and peak activations, over all
// partitions. Huang et al. 2019, table 1.
std::vector<Outcome> gpipe_memory(const Row& row) {
  const std::string& name = row.text("model");
  const std::optional<Transformer> model = read_model(row);
  const double params = row.positive("params");
  std::vector<Outcome> outcomes;
  const auto add = [&](const char* what, const char* column, double bytes) {
    outcomes.push_back(
        {fmt::format("{}, {}, {}", name.substr(0, name.find(" (d_model")),
                     row.text("config"), what),
         "GiB",
         {bytes / kGiB, row.positive(column), params}});
  };
  add("parameters", "param_memory_GB",
      (model ? parameters(*model) : params) * row.positive("bytes_per_param"));
  if (model && row.text("rematerialization") == "yes") {
    add("activations", "peak_activation_GB",
        activation_bytes(*model, row.count("partitions"), 32));
  }
  return outcomes;
}

// Throughput relative to that of the first row, as in the paper. Huang et al.
// 2019, tables 2 and 3.
std::vector<Outcome> gpipe_throughput(const Row& row) {
  const std::string& model = row.text("model");
  const int k = row.count("partitions_K", 128);
  const int m = row.count("micro_batches_M", 1024);
  const bool is_table_3 = row.integer("table") == 3;
  const int first_m = is_table_3 ? 32 : 1;
  Outcome outcome = {
      fmt::format("table {}, {}, K={}, M={}", row.text("table"), model, k, m),
      "times row 1",
      {0, row.positive("normalized_throughput"), 1, row.text("table") + model}};
  const auto found = numbers_in(row, "model", R"(Transformer-(\d{1,4}).*)");
  if (!found.empty() && 32 % m == 0) {
    const int layers = static_cast<int>(found[0]);
    const char* cluster = is_table_3 ? "p100-pcie" : "tpu-v3";
    outcome.pair.predicted = transformer_speed(cluster, layers, k, m) /
                             transformer_speed(cluster, layers, 2, first_m);
    outcome.trust = "extrapolated";
  } else {
    // The book has no such model: assume equal stages
    outcome.pair.predicted =
        early_recompute_bound(k, m) / early_recompute_bound(2, first_m);
  }
  return {outcome};
}

// torchgpipe's own measurements (docs/benchmarks.rst). Its scripts (recalled)
// take 118 images on one device, 110 twice with recomputation, and many
// micro-batches of some 22 on several.
std::vector<Outcome> torchgpipe(const Row& row) {
  const std::string& benchmark = row.text("benchmark");
  const std::string& experiment = row.text("experiment");
  const std::string name = benchmark + ", " + experiment;
  if (row.has("memory_GiB")) {
    require(row.begins("benchmark", "AmoebaNet"),
            "no U-Net has a chapter: activations are unknown");
    // Parameters, gradients and momentum
    const double params = row.positive("params");
    return {{name,
             "GiB of model states",
             {12 * params / kGiB, row.positive("memory_GiB"), params}}};
  }
  Outcome outcome = {
      name, "times row 1", {0, row.positive("speedup"), 1, benchmark}};
  if (row.has("partitions")) {
    outcome.pair.predicted = bubble_bound(row.count("partitions", 128),
                                          row.count("micro_batches", 1024)) /
                             bubble_bound(2, 1);
    return {outcome};
  }
  const bool is_baseline = experiment == "baseline";
  const auto found = numbers_in(row, "experiment", R"(pipeline-(\d{1,3}))");
  SB_CHECK(is_baseline || !found.empty(), row.place(), ": experiment is \"",
           experiment, "\"; give baseline or pipeline-K");
  const int stages = is_baseline ? 1 : static_cast<int>(found[0]);
  const int micro_batches = is_baseline ? 1 : stages == 1 ? 2 : 32 * stages;
  const int images = is_baseline ? 118 : stages == 1 ? 110 : 22;
  if (benchmark.rfind("ResNet-101", 0) == 0) {
    outcome.pair.predicted = resnet101_speed(stages, micro_batches, images) /
                             resnet101_speed(1, 1, 118);
    outcome.trust = "extrapolated";
  } else {
    // Equal stages; all forwards but the last run twice: 3 + 1 - 1/m for 3
    const double recomputed = is_baseline ? 0 : (1 - 1.0 / micro_batches) / 3;
    outcome.pair.predicted =
        bubble_bound(stages, micro_batches) / (1 + recomputed);
  }
  return {outcome};
}

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
