// GPipe: memory by formulae, speed by the chapter in the `sim` world.

#include <fmt/format.h>

#include <optional>
#include <regex>

#include "bench/validate/jobs.h"
#include "chapters/05_gpipe/gpipe.h"
#include "chapters/common/models/models.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

constexpr double kGiB = 1 << 30;

/// The paper's names of them: "Transformer-13 (d_model 2048, ...)".
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

}  // namespace

// Parameters with gradient and one moment, and peak activations, over all
// partitions. Huang et al. 2019, table 1.
std::vector<Outcome> gpipe_memory(const Row& row) {
  const std::string& name = row.text("model");
  const std::optional<Transformer> model = read(name);
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
  const std::string transformer = "Transformer-";
  if (model.rfind(transformer, 0) == 0 && 32 % m == 0) {
    const int layers = std::stoi(model.substr(transformer.size()));
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
    // Equal stages; all forwards but the last run twice: 3 + 1 - 1/m for 3
    const double recomputed = is_baseline ? 0 : (1 - 1.0 / micro_batches) / 3;
    outcome.pair.predicted =
        bubble_bound(stages, micro_batches) / (1 + recomputed);
  }
  return {outcome};
}

}  // namespace shardbook::validate
