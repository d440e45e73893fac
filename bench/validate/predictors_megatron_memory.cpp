// Peaks of the allocator in Megatron-LM's own tests.

#include <fmt/format.h>

#include "bench/validate/megatron_memory.h"
#include "bench/validate/table_rows.h"
#include "chapters/common/sharded/parts.h"

namespace shardbook::validate {
namespace {

bool is_set(const Row& row, const char* column) {
  return row.has(column) && row.flag(column);
}

/// Tests whose names state what no column states.
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
    if (row.text("test").find(each.part) != std::string::npos) {
      throw NotExpressed(each.reason);
    }
  }
  if (row.has("fp8")) throw NotExpressed("weights in FP8 have no formula");
  if (row.count("cp") > 1 || row.count("ep") > 1) {
    throw NotExpressed("the formulae are for tp, pp and dp");
  }
}

MegatronSoftware software_of(const Row& row) {
  MegatronSoftware software;
  const std::string& hardware = row.text("hardware");
  if (hardware == "A100") {
    software.product_workspace = 4 << 20;
  } else if (hardware == "H100" || hardware == "GB200") {
    software.product_workspace = 32 << 20;
  } else {
    throw NotExpressed("the workspace of " + hardware + " is unknown");
  }
  software.has_transformer_engine = row.text("impl") != "local";
  software.fuses_attention =
      software.has_transformer_engine && row.text("attn_backend") != "unfused";
  // Where a test leaves the choice to the library, development containers
  // fuse. Those with long-term support did so in some releases only.
  if (software.fuses_attention && !row.has("attn_backend") &&
      row.text("env").rfind("lts", 0) == 0) {
    throw NotExpressed("the attention that its container chose is not stated");
  }
  return software;
}

HybridJob tested_job(const Row& row) {
  const int tp = row.count("tp", 1024);
  // Where it is not given, GPT-2's, as Megatron-LM pads it
  const auto padded = static_cast<int>(padded_vocabulary(50257, 128 * tp));
  HybridJob job = job_of(row, row.has("vocab") ? 0 : padded, "seq");
  job.layout.tp = tp;
  job.pp = row.count("pp", 1024);
  job.layout.micro_batch = row.count("mbs", kMaxSize);
  job.layout.dtype = is_set(row, "fp16") ? DType::kF16 : DType::kBF16;
  job.layout.cuts_tokens = is_set(row, "sp");
  job.is_tied = !is_set(row, "untied");
  job.zero_stage = is_set(row, "dist_opt") ? 1 : 0;
  if (row.has("dp_derived")) {
    job.dp = row.count("dp_derived", kMaxSize);
  } else if (job.zero_stage > 0) {
    throw NotExpressed("the number of GPUs is not in the table");
  }
  if (row.has("recompute")) {
    if (row.text("recompute") != "full/uniform/1") {
      throw NotExpressed("recomputation " + row.text("recompute") +
                         " has no formula");
    }
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
  // The null model: so many times the model states
  return {{fmt::format("{}, {}, {}", row.text("test"), row.text("hardware"),
                       row.text("env")),
           "GB",
           {memory.total() / 1e9, row.positive("mem_max_allocated_bytes") / 1e9,
            memory.states}}};
}

}  // namespace shardbook::validate
