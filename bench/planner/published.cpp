#include "bench/planner/published.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/validate/jobs.h"
#include "chapters/planner/on_shapes.h"
#include "core/check.h"

namespace shardbook::bench {
namespace {

using planner::HybridJob;
using planner::Plan;
using planner::PlanRequest;
using planner::Recompute;
using validate::Row;

/// The job as a request without degrees, and its degrees as a plan.
PublishedRow row_of(const std::string& model, const HybridJob& job) {
  PublishedRow row;
  row.model = model;
  PlanRequest& request = row.request;
  request.model = planner::gpt_of(job.sizes, job.layers).to_json();
  request.base = job;
  request.world_size = job.ranks();
  request.batch = job.dp * job.micro_batches * job.layout.micro_batch;

  Plan& plan = row.plan;
  plan.setup.tp = job.layout.tp;
  plan.setup.cp = job.layout.cp;
  plan.setup.pp = job.pp;
  plan.setup.dp = job.dp;
  if (job.layout.cp > 1) plan.setup.cp_layout = "zigzag";
  plan.setup.sequence_parallel = job.layout.cuts_tokens;
  plan.setup.zero_stage = job.zero_stage;
  plan.setup.micro_batches = job.micro_batches;
  plan.setup.schedule = job.chunks > 1 ? "interleaved" : "1f1b";
  plan.setup.chunks = job.chunks;
  plan.micro_batch = job.layout.micro_batch;
  plan.recompute = job.layout.recompute == Recompute::kBlocks      ? "blocks"
                   : job.layout.recompute == Recompute::kAttention ? "attention"
                                                                   : "never";
  request.limits.offloads = false;
  request.limits.has_zero_bubble = false;
  request.limits.zero_stage = plan.setup.zero_stage;
  request.limits.max_tp = job.cluster.devices_per_node;
  row.open = request;
  row.open.limits = {};
  row.open.limits.offloads = false;
  // Ranks cannot share a key head
  if (job.sizes.kv_heads > 0) {
    row.open.limits.max_tp = static_cast<int>(job.sizes.kv_heads);
  }
  return row;
}

std::vector<Row> table(const std::string& name) {
  return validate::open_table(SHARDBOOK_ROOT "/bench/validate/" + name).rows;
}

planner::Prediction best_of(PlanRequest request, const std::string& model,
                            double memory_bytes) {
  request.memory_bytes = memory_bytes;
  planner::SearchOptions options;
  options.top = 1;
  const planner::PlanResult result = planner::search(request, options);
  SB_CHECK(!result.best.empty(), model, ": no plan fits");
  return result.best[0];
}

}  // namespace

std::vector<PublishedRow> megatron_rows() {
  std::vector<PublishedRow> rows;
  for (const Row& each : table("megatron_sc21_table1.csv")) {
    rows.push_back(row_of(each.text("row"), validate::read_job(each)));
    // Megatron-LM of 2021 recomputes all blocks and has neither sequence nor
    // context parallelism, nor a distributed optimizer
    planner::Limits& limits = rows.back().request.limits;
    limits.recompute = "blocks";
    limits.sequence_parallel = 0;
    limits.cp = 1;
    // The most of any row. Messages between its chunks block both sides, which
    // a replay ignores; with more chunks that would matter
    limits.max_chunks = 3;
  }
  return rows;
}

std::vector<PublishedRow> llama3_rows() {
  std::vector<PublishedRow> rows;
  for (const Row& each : table("llama3_table4.csv")) {
    const HybridJob job = validate::read_job(each);
    rows.push_back(row_of(fmt::format("405B, {} tokens", job.sizes.seq), job));
    planner::Limits& limits = rows.back().request.limits;
    limits.recompute = "never";
    limits.sequence_parallel = 1;
  }
  return rows;
}

std::vector<PublishedRow> mpt_rows() {
  std::vector<PublishedRow> rows;
  for (const Row& each : table("mpt_fsdp_a100_h100.csv")) {
    if (each.text("cluster") != "a100-cloud") continue;
    rows.push_back(row_of(each.text("row"), validate::read_job(each)));
    planner::Limits& limits = rows.back().request.limits;
    limits.tp = limits.pp = limits.cp = 1;
    limits.max_micro_batch = rows.back().open.limits.max_micro_batch = 512;
    // Each row was measured with or without recomputation
    limits.recompute = rows.back().plan.recompute;
  }
  return rows;
}

Compared compare(const PublishedRow& row, bool asks_open) {
  Compared compared;
  compared.published = planner::predict_plan(row.request, row.plan);
  const double needs =
      compared.published.memory.total() / planner::kUsableMemory;
  compared.memory_bytes = std::max(row.request.capacity(), needs);
  compared.within = best_of(row.request, row.model, compared.memory_bytes);
  if (asks_open) {
    compared.open = best_of(row.open, row.model, compared.memory_bytes);
  }
  return compared;
}

}  // namespace shardbook::bench
