// Tensor, pipeline and data parallelism together: Megatron-LM's tables, and
// vTrain's measurements.

#include <fmt/format.h>

#include <algorithm>

#include "bench/validate/clusters.h"
#include "bench/validate/hybrid_rows.h"
#include "bench/validate/job_rows.h"
#include "bench/validate/kinds.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

Outcome rate_outcome(const std::string& model, const HybridJob& job,
                     double published) {
  const HybridStep step = hybrid_step(job);
  Outcome outcome;
  outcome.row = describe(model, job);
  outcome.unit = "TFLOP/s per GPU";
  outcome.pair.predicted =
      recomputed_flops(job) / ranks_of(job) / step.seconds / 1e12;
  outcome.pair.published = published;
  outcome.trust = sim::trust_name(step.trust);
  return outcome;
}

// Narayanan et al. 2021, table 1.
std::vector<Outcome> sc21_table1(const Row& row) {
  return {rate_outcome(row.text("model"), sc21_table1_job(row),
                       row.positive("tflops_per_gpu"))};
}

// The same models with the software of three months before. The picture prints
// no micro-batches: they are those of the later table.
std::vector<Outcome> january_2021(const Row& row) {
  expect_selene(row);
  HybridJob job = megatron_job(row);
  const int model_parallel = row.count("model_parallel_size", 1 << 16);
  const int tp = std::min(model_parallel, job.cluster.devices_per_node);
  SB_CHECK(model_parallel % tp == 0, row.place(), ": model_parallel_size is ",
           model_parallel, ", which is no multiple of ", tp);
  set_degrees(row, tp, model_parallel / tp, 1, job);
  job.layout.micro_batch = job.sizes.hidden <= 4096    ? 16
                           : job.sizes.hidden <= 6144  ? 8
                           : job.sizes.hidden <= 8192  ? 4
                           : job.sizes.hidden <= 12288 ? 2
                                                       : 1;
  set_micro_batches(row, job);
  return {rate_outcome(row.text("model"), job, row.positive("tflops_per_gpu"))};
}

// Korthikanti et al. 2022, table 5.
std::vector<Outcome> korthikanti_step(const Row& row) {
  expect_selene(row);
  HybridJob job = megatron_job(row);
  job.cluster = cluster_named("selene-2022");
  set_degrees(row, row.count("tp"), row.count("pp"), 1, job);
  job.layout.micro_batch = row.count("micro_batch", kMaxSize);
  job.chunks = row.count("interleave_v");
  set_micro_batches(row, job);
  const std::string& mode = row.text("mode");
  if (mode == "SP + selective recompute") {
    job.layout.cuts_tokens = true;
    job.layout.recompute = Recompute::kAttention;
  } else if (mode != "full recompute, no SP") {
    throw NotExpressed("mode " + mode + " has no chapter");
  }
  const HybridStep step = hybrid_step(job);
  Outcome outcome;
  outcome.row = describe(row.text("model") + ", " + mode, job);
  outcome.unit = "s";
  outcome.pair.predicted = step.seconds;
  outcome.pair.published = row.positive("iter_time_s");
  outcome.pair.null_scale = recomputed_flops(job) / ranks_of(job);
  outcome.pair.contest = row.text("model");
  outcome.trust = sim::trust_name(step.trust);
  return {outcome};
}

// VIA-Research/vTrain: one node of A100s.
std::vector<Outcome> vtrain(const Row& row) {
  if (row.text("gpu") != "A100" || row.text("schedule") != "1F1B") {
    throw NotExpressed("no cluster and schedule for " + row.text("gpu") + ", " +
                       row.text("schedule"));
  }
  HybridJob job;
  // Megatron's vocabulary: GPT-2's, padded
  job.sizes.vocabulary = 51200;
  job.sizes.hidden = row.count("hidden", 1 << 17);
  job.sizes.heads = row.count("heads", 1 << 12);
  job.sizes.seq = row.count("seq_len_tokens", kMaxSize);
  job.layers = row.count("layers", kMaxLayers);
  job.cluster = cluster_named("vtrain-a100");
  job.layout.dtype = job.gradient_dtype = DType::kF16;
  job.layout.dropout = kMegatronDropout;
  job.layout.recompute = row.text("activation_recompute") == "full"
                             ? Recompute::kBlocks
                             : Recompute::kNothing;
  set_degrees(row, row.count("tp"), row.count("pp"), 1, job);
  job.layout.micro_batch = row.count("micro_batch_seqs", kMaxSize);
  job.micro_batches =
      row.count("num_microbatches_per_replica", kMaxMicroBatchesPerRank);
  const HybridStep step = hybrid_step(job);
  Outcome outcome;
  outcome.row = fmt::format("{}: {} layers, ", row.text("row_id"), job.layers) +
                describe("", job);
  outcome.unit = "ms";
  outcome.pair.predicted = 1e3 * step.seconds;
  outcome.pair.published = row.positive("iter_time_ms");
  outcome.pair.null_scale = model_flops(job) / ranks_of(job);
  outcome.pair.contest =
      fmt::format("{} layers, {} GPUs, batch {}", job.layers, ranks_of(job),
                  row.text("global_batch_seqs"));
  outcome.trust = sim::trust_name(step.trust);
  return {outcome};
}

}  // namespace

void expect_selene(const Row& row) {
  if (row.text("hardware").find("A100-80GB") == std::string::npos) {
    throw NotExpressed("no cluster describes " + row.text("hardware"));
  }
}

Outcome megatron_2021(const Row& row, const std::string& model) {
  HybridJob job = megatron_job(row);
  set_degrees(row, row.count("tp"), row.count("pp"), 1, job);
  job.layout.micro_batch = row.count("micro_batch", kMaxSize);
  set_micro_batches(row, job);
  return rate_outcome(model, job, row.positive("tflops_per_gpu"));
}

std::vector<Kind> hybrid_kinds() {
  return {{"megatron_sc21_table1",
           {"model", "heads", "hidden", "layers", "vocab", "seq_len", "tp",
            "pp", "dp", "gpus", "global_batch", "micro_batch",
            "virtual_stages_v", "hardware", "tflops_per_gpu"},
           false,
           mean_aim(0.05, "MAPE within 5 %"),
           sc21_table1,
           ""},
          {"megatron_jan2021",
           {"model", "heads", "hidden", "layers", "model_parallel_size", "gpus",
            "global_batch", "vocab", "seq_len", "hardware", "tflops_per_gpu"},
           false,
           mean_aim(0.05, "MAPE within 5 %"),
           january_2021,
           "the picture prints no micro-batches: those of SC'21's table 1"},
          {"korthikanti_table5_e2e",
           {"model", "heads", "hidden", "layers", "seq_len", "vocab", "tp",
            "pp", "dp", "gpus", "global_batch", "micro_batch", "interleave_v",
            "mode", "iter_time_s", "hardware"},
           true,
           mean_aim(0.036, "MAPE within 3.6 %"),
           korthikanti_step,
           ""},
          {"vtrain_a100",
           {"row_id", "gpus", "global_batch_seqs", "micro_batch_seqs", "hidden",
            "heads", "layers", "seq_len_tokens", "tp", "dp", "pp",
            "iter_time_ms", "num_microbatches_per_replica", "schedule",
            "activation_recompute", "gpu"},
           true,
           mean_aim(0.08, "MAPE within 8 %"),
           vtrain,
           ""}};
}

}  // namespace shardbook::validate
