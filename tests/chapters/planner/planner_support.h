#pragma once

// Questions, plans, and one stage of a model without embedding and head.

#include <cstdint>
#include <string>

#include "chapters/planner/search.h"

namespace shardbook::planner {

inline PlanRequest request_of(const std::string& model,
                              const std::string& cluster, int world_size,
                              std::int64_t batch, std::int64_t seq = 512,
                              DType dtype = DType::kBF16) {
  PlanRequest request;
  request.model = model;
  request.world_size = world_size;
  request.batch = batch;
  request.base.sizes.seq = seq;
  request.base.layout.dtype = dtype;
  read_model(request, sim::Cluster::read(cluster));
  return request;
}

inline Plan plan_of(const PlanRequest& request, int tp, int pp, int cp,
                    int zero_stage, std::int64_t micro_batch = 1) {
  Plan plan;
  plan.setup = {.dp = request.world_size / (tp * pp * cp),
                .tp = tp,
                .pp = pp,
                .cp = cp,
                .zero_stage = zero_stage,
                .cp_layout = cp > 1 ? "zigzag" : "contiguous"};
  plan.micro_batch = micro_batch;
  plan.setup.micro_batches = request.batch / plan.setup.dp / micro_batch;
  return plan;
}

inline StageRun run_blocks(const HybridJob& job, std::int64_t blocks) {
  return run_stage(job.cluster, job.sizes, job.layout, {blocks});
}

}  // namespace shardbook::planner
