// Training steps, run by the chapters.

#include <fmt/format.h>

#include "bench/validate/table_rows.h"

namespace shardbook::validate {
namespace {

std::string contest(const Row& row, const std::string& model) {
  return fmt::format("{}, {} GPUs, batch {}, sequence {}", model,
                     row.text("gpus"), row.text("global_batch"),
                     row.text("seq_len"));
}

/// ZeRO-3 over all GPUs.
std::vector<Outcome> zero3(const Row& row, const std::string& model,
                           const char* cluster, bool is_of_2021,
                           int vocabulary) {
  HybridJob job = job_of(row, vocabulary);
  job.cluster = cluster_named(cluster);
  job.layout.dtype = DType::kF16;
  job.layout.recompute = Recompute::kBlocks;
  set_degrees(row, 1, 1, 1, job);
  job.layout.micro_batch = row.count("micro_batch", kMaxSize);
  set_micro_batches(row, job);
  Outcome outcome = rate_outcome(describe_on_gpus(model, job), job,
                                 with_zero3(job, is_of_2021), "TFLOP/s per GPU",
                                 recomputed_flops(job) / 1e12,
                                 row.positive("tflops_per_gpu"));
  outcome.pair.contest = contest(row, model);
  return {outcome};
}

const char* mpt_cluster(const std::string& gpu) {
  if (gpu == "a100_80gb") return "a100-cloud";
  if (gpu == "a100_40gb") return "a100-40gb-cloud";
  if (gpu.rfind("h100", 0) == 0) return "dgx-h100";
  throw NotExpressed("no cluster has " + gpu);
}

}  // namespace

// DeepSpeed on Azure: 175B to 1T parameters, sequences of 512.
std::vector<Outcome> azure_zero3(const Row& row) {
  require(row.integer("zero_stage") == 3,
          "only stage 3 was published for this cluster");
  require(row.says("hardware", "NDm A100 v4"),
          "no cluster describes " + row.text("hardware"));
  return zero3(row, row.text("model"), "azure-ndm-a100", false,
               kMegatronVocabulary);
}

// Narayanan et al. 2021, table 2.
std::vector<Outcome> sc21_table2(const Row& row) {
  const std::string model = row.text("params_B") + "B";
  if (row.begins("scheme", "ZeRO-3")) {
    return zero3(row, model, "selene+deepspeed-2021", true, 0);
  }
  require(row.text("scheme") == "PTD-P",
          "scheme " + row.text("scheme") + " has no chapter");
  HybridJob job = sc21_table1_job(row);
  Outcome outcome = tflops_outcome(model, job, row);
  outcome.pair.contest = contest(row, model);
  return {outcome};
}

HybridJob mpt_job(const Row& row, const char* cluster) {
  HybridJob job = job_of(row);
  job.cluster = cluster_named(cluster);
  set_degrees(row, 1, 1, 1, job);
  job.layout.micro_batch = row.count("micro_batch", kMaxSize);
  job.micro_batches = row.count("grad_accum", kMaxMicroBatchesPerRank);
  job.layout.dtype = job.gradient_dtype = DType::kBF16;
  if (row.flag("activation_ckpt")) job.layout.recompute = Recompute::kBlocks;
  return job;
}

// mosaicml/llm-foundry, scripts/train/benchmarking.
std::vector<Outcome> mpt_fsdp(const Row& row) {
  require(row.text("sharding") == "FULL_SHARD",
          "sharding " + row.text("sharding") + " is not FULL_SHARD");
  require(row.says("precision", "bf16"), "precision " + row.text("precision") +
                                             " is not in the device models");
  require(!row.flag("activation_cpu_offload"),
          "activations on the host have no chapter yet");
  const HybridJob job = mpt_job(row, mpt_cluster(row.text("gpu")));
  Outcome outcome = rate_outcome(
      describe_on_gpus(row.text("model"), job), job, with_fsdp(job),
      "tokens/s per GPU", job.tokens(), row.positive("tokens_per_s_per_gpu"));
  // One share of the peak for all rows: work of a token as in the source
  const auto h = static_cast<double>(job.sizes.hidden);
  outcome.pair.null_scale =
      1 / (6 * row.positive("num_params") +
           12.0 * static_cast<double>(job.layers * job.sizes.seq) * h);
  outcome.pair.contest =
      row.text("gpu") + " " + contest(row, row.text("model"));
  outcome.is_aimed_at = row.begins("gpu", "a100");
  return {outcome};
}

}  // namespace shardbook::validate
