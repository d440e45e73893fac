// Training steps, run by the chapters.

#include <fmt/format.h>

#include "bench/validate/hybrid_rows.h"
#include "bench/validate/job_rows.h"
#include "bench/validate/jobs.h"
#include "bench/validate/kinds.h"

namespace shardbook::validate {
namespace {

Outcome rate_outcome(const Row& row, const std::string& model, const Job& job) {
  const StepTime time = step_time(job);
  Outcome outcome;
  outcome.row = describe(model, job);
  outcome.unit = "TFLOP/s per GPU";
  outcome.pair.predicted =
      megatron_flops(job) / job.ranks / time.seconds / 1e12;
  outcome.pair.published = row.positive("tflops_per_gpu");
  outcome.trust = sim::trust_name(time.trust);
  return outcome;
}

std::string contest(const Row& row, const std::string& model) {
  return fmt::format("{}, {} GPUs, batch {}, sequence {}", model,
                     row.text("gpus"), row.text("global_batch"),
                     row.text("seq_len"));
}

// DeepSpeed on Azure: 175B to 1T parameters, sequences of 512.
std::vector<Outcome> azure_zero3(const Row& row) {
  if (row.integer("zero_stage") != 3) {
    throw NotExpressed("only stage 3 was published for this cluster");
  }
  if (row.text("hardware").find("NDm A100 v4") == std::string::npos) {
    throw NotExpressed("no cluster describes " + row.text("hardware"));
  }
  // Megatron's vocabulary: GPT-2's, padded
  Job job = job_of(row, 51200);
  job.cluster = "azure-ndm-a100";
  job.strategy = Strategy::kZero3;
  job.micro_batch = row.count("micro_batch", kMaxSize);
  job.micro_batches = micro_batches_of(row, job, job.ranks);
  job.dtype = DType::kF16;
  job.recompute = true;
  Outcome outcome = rate_outcome(row, row.text("model"), job);
  outcome.pair.contest = contest(row, row.text("model"));
  return {outcome};
}

// Narayanan et al. 2021, table 2.
std::vector<Outcome> sc21_table2(const Row& row) {
  const std::string model = row.text("params_B") + "B";
  if (row.text("scheme") == "PTD-P") {
    expect_selene(row);
    Outcome outcome = megatron_2021(row, model);
    outcome.pair.contest = contest(row, model);
    return {outcome};
  }
  if (row.text("scheme").rfind("ZeRO-3", 0) != 0) {
    throw NotExpressed("scheme " + row.text("scheme") + " has no chapter");
  }
  Job job = job_of(row, row.count("vocab", kMaxSize));
  job.cluster = "selene-zero3";
  job.strategy = Strategy::kZero3;
  job.is_deepspeed_of_2021 = true;  // the year of the paper
  job.micro_batch = row.count("micro_batch", kMaxSize);
  job.micro_batches = micro_batches_of(row, job, job.ranks);
  job.dtype = DType::kF16;
  job.recompute = true;
  Outcome outcome = rate_outcome(row, model, job);
  outcome.pair.contest = contest(row, model);
  return {outcome};
}

std::string mpt_cluster(const std::string& gpu) {
  if (gpu == "a100_80gb") return "a100-cloud";
  if (gpu == "a100_40gb") return "a100-40gb-cloud";
  if (gpu.rfind("h100", 0) == 0) return "dgx-h100";
  throw NotExpressed("no cluster has " + gpu);
}

// mosaicml/llm-foundry, scripts/train/benchmarking.
std::vector<Outcome> mpt_fsdp(const Row& row) {
  if (row.text("sharding") != "FULL_SHARD") {
    throw NotExpressed("sharding " + row.text("sharding") +
                       " is not FULL_SHARD");
  }
  if (row.text("precision").find("bf16") == std::string::npos) {
    throw NotExpressed("precision " + row.text("precision") +
                       " is not in the device models");
  }
  if (row.flag("activation_cpu_offload")) {
    throw NotExpressed("activations on the host have no chapter yet");
  }
  Job job = job_of(row, row.count("vocab", kMaxSize));
  job.cluster = mpt_cluster(row.text("gpu"));
  job.strategy = Strategy::kFsdp;
  job.micro_batch = row.count("micro_batch", kMaxSize);
  job.micro_batches = row.count("grad_accum", kMaxMicroBatchesPerRank);
  job.recompute = row.flag("activation_ckpt");
  const StepTime time = step_time(job);

  Outcome outcome;
  outcome.row = describe(row.text("model"), job);
  outcome.unit = "tokens/s per GPU";
  outcome.pair.predicted = tokens_per_step(job) / job.ranks / time.seconds;
  outcome.pair.published = row.positive("tokens_per_s_per_gpu");
  // One share of the peak for all rows: work of a token as in the source
  const auto h = static_cast<double>(job.model.n_embd);
  outcome.pair.null_scale =
      1 / (6 * row.positive("num_params") +
           12.0 * static_cast<double>(job.model.n_layer * job.seq) * h);
  outcome.pair.contest =
      row.text("gpu") + " " + contest(row, row.text("model"));
  outcome.trust = sim::trust_name(time.trust);
  outcome.is_aimed_at = row.text("gpu").rfind("a100", 0) == 0;
  return {outcome};
}

// Li et al. 2020, figure 6.
std::vector<Outcome> ddp_overlap(const Row& row) {
  if (row.text("model").rfind("ResNet", 0) == 0) {
    throw NotExpressed("the DDP chapter trains no ResNet");
  }
  throw NotExpressed("the paper's " + row.text("model") +
                     " is printed without its sizes");
}

}  // namespace

std::vector<Kind> training_kinds() {
  std::vector<Kind> kinds;
  kinds.push_back(
      {"deepspeed_azure_zero3",
       {"model", "layers", "hidden", "heads", "seq_len", "zero_stage", "gpus",
        "micro_batch", "global_batch", "tflops_per_gpu", "hardware"},
       false,
       mean_aim(0.15, "MAPE within 15 %"),
       azure_zero3,
       ""});
  kinds.push_back(
      {"megatron_sc21_table2_zero3",
       {"scheme", "params_B", "layers", "hidden", "heads", "seq_len", "vocab",
        "tp", "pp", "gpus", "micro_batch", "global_batch", "tflops_per_gpu"},
       false,
       mean_aim(0.15, "MAPE within 15 %"),
       sc21_table2,
       ""});
  kinds.push_back({"mpt_fsdp",
                   {"model", "layers", "hidden", "heads", "vocab", "seq_len",
                    "gpus", "gpu", "precision", "sharding", "activation_ckpt",
                    "activation_cpu_offload", "micro_batch", "grad_accum",
                    "global_batch", "num_params", "tokens_per_s_per_gpu"},
                   false,
                   mean_aim(0.09, "MAPE of A100 within 9 %"),
                   mpt_fsdp,
                   ""});
  kinds.push_back({"ddp_overlap",
                   {"model", "backend", "gpus", "quantity", "value"},
                   false,
                   mean_aim(0.15, "order and sign of the effects"),
                   ddp_overlap,
                   ""});
  return kinds;
}

}  // namespace shardbook::validate
