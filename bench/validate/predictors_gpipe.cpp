// GPipe: memory by formulae, speed by the chapter in the `sim` world.

#include <fmt/format.h>

#include <optional>
#include <regex>

#include "bench/validate/jobs.h"
#include "bench/validate/kinds.h"
#include "chapters/05_gpipe/gpipe.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

constexpr double kGiB = 1 << 30;

/// As the paper names them: "Transformer-13 (d_model 2048, ...)".
struct Transformer {
  double layers, hidden, inner, heads, vocab, seq;
};

std::optional<Transformer> read(const std::string& text) {
  static const std::regex pattern(
      R"(Transformer-(\d+) \(d_model (\d+), d_ff (\d+), (\d+) heads, )"
      R"(vocab (\d+)k, seq (\d+)\))");
  std::smatch found;
  if (!std::regex_match(text, found, pattern)) return std::nullopt;
  const auto value = [&](std::size_t i) { return std::stod(found[i].str()); };
  return Transformer{value(1), value(2),        value(3),
                     value(4), 1000 * value(5), value(6)};
}

/// Products with their biases, two norms per layer; separate tables for input
/// and output.
double parameters(const Transformer& t) {
  const double layer = 4 * t.hidden * (t.hidden + 1) + 2 * t.hidden * t.inner +
                       t.inner + t.hidden + 4 * t.hidden;
  return t.layers * layer + 2 * t.vocab * t.hidden;
}

/// Bytes that a layer keeps of one sequence in f32: 16 elements per token and
/// hidden unit as in chapters/common/run/memory.cpp, two masks of a byte, and
/// of the attention, which was not fused, the probabilities before and after
/// dropout with their mask. Korthikanti et al. 2022, section 4.1.
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

Outcome outcome_of(const Row& row, const std::string& what,
                   const std::string& column, double bytes) {
  Outcome outcome;
  const std::string& model = row.text("model");
  outcome.row =
      fmt::format("{}, {}, {}", model.substr(0, model.find(" (d_model")),
                  row.text("config"), what);
  outcome.unit = "GiB";
  outcome.pair.predicted = bytes / kGiB;
  outcome.pair.published = row.positive(column);
  return outcome;
}

// Parameters with gradient and one moment, and peak activations, over all
// partitions. Huang et al. 2019, table 1.
std::vector<Outcome> gpipe_memory(const Row& row) {
  const std::optional<Transformer> model = read(row.text("model"));
  const double count = model ? parameters(*model) : row.positive("params");
  std::vector<Outcome> outcomes = {
      outcome_of(row, "parameters", "param_memory_GB",
                 count * row.positive("bytes_per_param"))};
  outcomes[0].pair.null_scale = row.positive("params");
  if (model && row.text("rematerialization") == "yes") {
    const int partitions = row.count("partitions");
    outcomes.push_back(outcome_of(row, "activations", "peak_activation_GB",
                                  activation_bytes(*model, partitions, 32)));
    outcomes[1].pair.null_scale = row.positive("params");
  }
  return outcomes;
}

// --- Speed -------------------------------------------------------------------

/// Speed of K equal stages over one device that recomputes as much: the bubble
/// is all that is lost.
double bubble_bound(int stages, int micro_batches) {
  return stages * (1 - gpipe::idle_share(stages, micro_batches));
}

/// The same where recomputation begins before the gradient arrives: of
/// F + R + B = 1 + 1 + 2, the bubble has F and B alone.
double early_recompute_bound(int stages, int micro_batches) {
  return 4.0 * stages * micro_batches /
         (4.0 * micro_batches + 3.0 * (stages - 1));
}

/// Samples per second of a language model as in the paper.
double transformer_speed(const std::string& cluster, int layers, int stages,
                         int micro_batches) {
  constexpr int kBatch = 32;  // sequences, as for the paper's table 1
  Job job;
  job.cluster = cluster;
  job.strategy = stages == 1 ? Strategy::kOneDevice : Strategy::kGPipe;
  job.model.vocab_size = 32000;
  job.model.n_positions = job.seq = 1024;
  job.model.n_embd = 2048;
  job.model.n_layer = layers;
  job.model.n_head = 32;
  job.dtype = DType::kF32;
  job.recompute = true;
  job.ranks = stages;
  job.micro_batches = micro_batches;
  job.micro_batch = kBatch / micro_batches;
  return kBatch / step_time(job).seconds;
}

// Throughput relative to that of the first row, as in the paper. Huang et al.
// 2019, tables 2 and 3.
std::vector<Outcome> gpipe_throughput(const Row& row) {
  const std::string& model = row.text("model");
  const int k = row.count("partitions_K", 128);
  const int m = row.count("micro_batches_M", 1024);
  const bool is_table_3 = row.integer("table") == 3;
  const int first_m = is_table_3 ? 32 : 1;
  Outcome outcome;
  outcome.row =
      fmt::format("table {}, {}, K={}, M={}", row.text("table"), model, k, m);
  outcome.unit = "times row 1";
  const std::string transformer = "Transformer-";
  if (model.rfind(transformer, 0) == 0 && 32 % m == 0) {
    const int layers = std::stoi(model.substr(transformer.size()));
    const std::string cluster = is_table_3 ? "p100-pcie" : "tpu-v3";
    outcome.pair.predicted = transformer_speed(cluster, layers, k, m) /
                             transformer_speed(cluster, layers, 2, first_m);
    outcome.trust = "extrapolated";
  } else {
    // No such model in the book: equal stages
    outcome.pair.predicted =
        early_recompute_bound(k, m) / early_recompute_bound(2, first_m);
  }
  outcome.pair.published = row.positive("normalized_throughput");
  outcome.pair.contest = row.text("table") + model;
  return {outcome};
}

/// Images per second of torchvision's ResNet-101 on P40.
double resnet101_speed(int stages, int micro_batches, int images) {
  Job job;
  job.cluster = "p40-pcie";
  job.model = ModelConfig::read("resnet50");
  job.model.depths = {3, 4, 23, 3};
  job.image_size = 224;
  job.dtype = DType::kF32;
  job.strategy = Strategy::kGPipe;
  // Without micro-batches nothing is recomputed: that is the baseline
  job.checkpoint = micro_batches == 1 ? "never" : "except_last";
  job.ranks = stages;
  job.micro_batch = images;
  job.micro_batches = micro_batches;
  return images * micro_batches / step_time(job).seconds;
}

// torchgpipe's own measurements (docs/benchmarks.rst). Its scripts (recalled)
// take 118 images on one device, 110 twice with recomputation, and many
// micro-batches of some 22 on several.
std::vector<Outcome> torchgpipe(const Row& row) {
  const std::string& benchmark = row.text("benchmark");
  const std::string& experiment = row.text("experiment");
  Outcome outcome;
  outcome.row = benchmark + ", " + experiment;
  if (row.has("memory_GiB")) {
    if (benchmark.rfind("AmoebaNet", 0) != 0) {
      throw NotExpressed("no U-Net has a chapter: activations are unknown");
    }
    // Parameters, gradients and momentum
    outcome.unit = "GiB of model states";
    outcome.pair.predicted = 12 * row.positive("params") / kGiB;
    outcome.pair.published = row.positive("memory_GiB");
    outcome.pair.null_scale = row.positive("params");
    return {outcome};
  }
  outcome.unit = "times row 1";
  outcome.pair.published = row.positive("speedup");
  outcome.pair.contest = benchmark;
  if (row.has("partitions")) {
    outcome.pair.predicted = bubble_bound(row.count("partitions", 128),
                                          row.count("micro_batches", 1024)) /
                             bubble_bound(2, 1);
    return {outcome};
  }
  const std::string pipeline = "pipeline-";
  const bool is_baseline = experiment == "baseline";
  SB_CHECK(is_baseline || experiment.rfind(pipeline, 0) == 0, row.place(),
           ": experiment is \"", experiment, "\"; give baseline or pipeline-K");
  const int stages =
      is_baseline ? 1 : std::stoi(experiment.substr(pipeline.size()));
  const int micro_batches = is_baseline ? 1 : stages == 1 ? 2 : 32 * stages;
  const int images = is_baseline ? 118 : stages == 1 ? 110 : 22;
  if (benchmark.rfind("ResNet-101", 0) == 0) {
    outcome.pair.predicted = resnet101_speed(stages, micro_batches, images) /
                             resnet101_speed(1, 1, 118);
    outcome.trust = "extrapolated";
  } else {
    // Equal stages; all forwards twice but the last: 3 + 1 - 1/m for 3
    const double recomputed = is_baseline ? 0 : (1 - 1.0 / micro_batches) / 3;
    outcome.pair.predicted =
        bubble_bound(stages, micro_batches) / (1 + recomputed);
  }
  return {outcome};
}

}  // namespace

std::vector<Kind> gpipe_kinds() {
  std::vector<Kind> kinds;
  kinds.push_back(
      {"gpipe_table1_memory",
       {"model", "config", "partitions", "rematerialization", "params",
        "bytes_per_param", "param_memory_GB", "peak_activation_GB"},
       true,
       mean_aim(0.1, "MAPE within 10 %"),
       gpipe_memory,
       "micro-batches are taken as single sequences (32 of them); "
       "rows of AmoebaNet agree better in decimal GB; its "
       "activations, and those of rows without re-materialisation, "
       "whose batch did not fit, are not predicted"});
  kinds.push_back(
      {"gpipe_throughput",
       {"table", "model", "partitions_K", "micro_batches_M",
        "normalized_throughput"},
       false,
       order_aim(0.9, "the order of the rows: Spearman 0.9"),
       gpipe_throughput,
       "batches are taken as 32 sequences; the paper lets them grow "
       "with the memory of more devices, which lifts its rows with "
       "few micro-batches above the bound of the bubble"});
  kinds.push_back({"torchgpipe",
                   {"benchmark", "experiment", "speedup", "partitions",
                    "micro_batches", "params", "memory_GiB"},
                   false,
                   order_aim(0.9, "the order of the rows: Spearman 0.9"),
                   torchgpipe,
                   "AmoebaNet and U-Net are taken as equal stages, whose speed "
                   "is bounded by the bubble alone"});
  return kinds;
}

}  // namespace shardbook::validate
