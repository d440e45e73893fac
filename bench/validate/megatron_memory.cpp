#include "bench/validate/megatron_memory.h"

#include <fmt/format.h>

#include "bench/validate/jobs.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/sharded/parts.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

constexpr double kMiB = 1 << 20;

double tokens(const HybridJob& job) {
  return static_cast<double>(job.layout.micro_batch * job.sizes.seq);
}
/// Korthikanti's sbh, and (below) as^2b.
double units(const HybridJob& job) {
  return tokens(job) * static_cast<double>(job.sizes.hidden);
}
double scores(const HybridJob& job) {
  return tokens(job) * static_cast<double>(job.sizes.seq * job.sizes.heads);
}

/// Bytes of parameters, gradients and optimizer.
double states(const HybridJob& job) {
  zero::StateBytes bytes;
  // With BF16, Megatron-LM sums gradients in f32; with f16 the f32 copies of
  // the gradients live only in the update
  if (job.layout.dtype == DType::kBF16) bytes.gradient = 4;
  return zero::model_states(job.zero_stage, last_stage_parameters(job), job.dp,
                            bytes)
      .total();
}

}  // namespace

double last_stage_parameters(const HybridJob& job) {
  const auto h = static_cast<double>(job.sizes.hidden);
  const double t = job.layout.tp;
  const double layers = static_cast<double>(job.layers) / job.pp;
  const double table = static_cast<double>(job.sizes.vocabulary) * h / t;
  double parameters =
      layers * ((12 * h * h + 7 * h) / t + 6 * h) + 2 * h + table;
  if (job.pp == 1) {
    parameters += static_cast<double>(job.sizes.seq) * h;  // positions
    if (!job.is_tied) parameters += table;
  }
  return parameters;
}

double layer_activations(const HybridJob& job, bool fuses_attention) {
  const double t = job.layout.tp;
  if (job.layout.recompute == Recompute::kBlocks) {
    return 2 * units(job) / (job.layout.cuts_tokens ? t : 1);
  }
  const double linear =
      units(job) * (job.layout.cuts_tokens ? 34 / t : 10 + 24 / t);
  if (!fuses_attention) return linear + 5 * scores(job) / t;
  // Its output a second time, as attention wrote it, and f32 sums
  return linear + 2 * units(job) / t +
         4 * tokens(job) * static_cast<double>(job.sizes.heads) / t;
}

MegatronMemory megatron_memory(const HybridJob& job,
                               const MegatronSoftware& software) {
  SB_CHECK(job.chunks == 1, "Megatron-LM's memory is known of 1F1B, not of ",
           job.chunks, " chunks per rank");
  SB_CHECK(job.layers % job.pp == 0, job.layers, " layers do not divide by pp ",
           job.pp);
  const double t = job.layout.tp;
  MegatronMemory memory;
  memory.states = states(job);
  memory.activations = static_cast<double>(job.layers) / job.pp *
                       layer_activations(job, software.fuses_attention);
  // Forward: logits in 16 bits, and copied to f32. Backward: their gradient in
  // f32, copied to 16 bits
  constexpr double kBytesPerLogit = 2 + 4;
  memory.loss = kBytesPerLogit * tokens(job) *
                static_cast<double>(job.sizes.vocabulary) / t;
  // The forward and the backward thread have a cuBLAS handle each, whose
  // workspace is 32 MiB where results must repeat
  // (CUBLAS_WORKSPACE_CONFIG=:4096:8)
  memory.buffers = 2 * 32 * kMiB;
  // The causal mask, which is part of a batch: a byte per pair
  memory.buffers += tokens(job) * static_cast<double>(job.sizes.seq);
  if (software.has_transformer_engine) {
    memory.buffers += software.product_workspace;
  } else if (!software.fuses_attention) {
    memory.buffers += 2 * scores(job) / t;  // a buffer that all layers share
  }
  // The stage's input, and the gradient that it returns
  if (job.pp > 1) memory.buffers += 2 * 2 * units(job);
  return memory;
}

// --- The table of Megatron-LM's own tests ------------------------------------

namespace {

/// Rejects tests whose names state facts that no column states.
void expect_plain(const Row& row) {
  const struct {
    const char *part, *reason;
  } kinds[] = {
      {"mla", "latent attention has no chapter"},
      {"modelopt", "distillation has no chapter"},
      {"uneven_pipeline", "layers per stage are not in the table"},
      {"cross_entropy_loss_fusion", "the memory of a fused loss is unknown"},
      {"defer_embedding_wgrad",
       "the embedding's deferred gradients have no formula"},
      {"multi_dist_optimizer_instances",
       "the number of optimizer instances is not in the table"}};
  for (const auto& each : kinds) {
    require(!row.says("test", each.part), each.reason);
  }
  require(!row.has("fp8"), "weights in FP8 have no formula");
  require(row.count("cp") == 1 && row.count("ep") == 1,
          "the formulae are for tp, pp and dp");
}

MegatronSoftware software_of(const Row& row) {
  MegatronSoftware software;
  const std::string& hardware = row.text("hardware");
  const bool is_a100 = hardware == "A100";
  require(is_a100 || hardware == "H100" || hardware == "GB200",
          "the workspace of " + hardware + " is unknown");
  software.product_workspace = (is_a100 ? 4 : 32) << 20;
  software.has_transformer_engine = row.text("impl") != "local";
  software.fuses_attention =
      software.has_transformer_engine && row.text("attn_backend") != "unfused";
  // Where a test leaves the choice to the library, development containers fuse;
  // those with long-term support did so in some releases only.
  require(!software.fuses_attention || row.has("attn_backend") ||
              !row.begins("env", "lts"),
          "the attention that its container chose is not stated");
  return software;
}

HybridJob tested_job(const Row& row) {
  const int tp = row.count("tp", 1024);
  // The default is GPT-2's, as Megatron-LM pads it
  const auto padded = static_cast<int>(padded_vocabulary(50257, 128 * tp));
  HybridJob job = gpt_job(row, row.has("vocab") ? 0 : padded);
  job.layout.tp = tp;
  job.pp = row.count("pp", 1024);
  job.layout.micro_batch = row.count("mbs", kMaxSize);
  job.layout.dtype = is_set(row, "fp16") ? DType::kF16 : DType::kBF16;
  job.layout.cuts_tokens = is_set(row, "sp");
  job.is_tied = !is_set(row, "untied");
  job.zero_stage = is_set(row, "dist_opt") ? 1 : 0;
  if (row.has("dp_derived")) {
    job.dp = row.count("dp_derived", kMaxSize);
  } else {
    require(job.zero_stage == 0, "the number of GPUs is not in the table");
  }
  if (row.has("recompute")) {
    require(row.text("recompute") == "full/uniform/1",
            "recomputation " + row.text("recompute") + " has no formula");
    job.layout.recompute = Recompute::kBlocks;
  }
  return job;
}

}  // namespace

std::vector<Outcome> megatron_ci(const Row& row) {
  expect_plain(row);
  const MegatronSoftware software = software_of(row);
  const HybridJob job = tested_job(row);
  const MegatronMemory memory = megatron_memory(job, software);
  // The null model: a constant times the model states
  return {{fmt::format("{}, {}, {}", row.text("test"), row.text("hardware"),
                       row.text("env")),
           "GB",
           {memory.total() / 1e9, row.positive("mem_max_allocated_bytes") / 1e9,
            memory.states}}};
}

}  // namespace shardbook::validate
