#pragma once

// One stage of a model, without embedding and head.

#include <cstdint>

#include "chapters/planner/step.h"

namespace shardbook::test {

inline planner::StageRun run_blocks(const planner::HybridJob& job,
                                    std::int64_t blocks) {
  planner::StageParts parts;
  parts.blocks = blocks;
  return planner::run_stage(job.cluster, job.sizes, job.layout, parts);
}

}  // namespace shardbook::test
