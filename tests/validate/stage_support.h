#pragma once

// One stage of a model, without embedding and head.

#include <cstdint>

#include "chapters/14_hybrid_3d/predict/step.h"

namespace shardbook::test {

inline predict::StageRun run_blocks(const predict::HybridJob& job,
                                    std::int64_t blocks) {
  predict::StageParts parts;
  parts.blocks = blocks;
  return predict::run_stage(job.cluster, job.sizes, job.layout, parts);
}

}  // namespace shardbook::test
