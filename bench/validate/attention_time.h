#pragma once

// One attention over a group that cuts the sequence, run by itself on shapes.

#include <cstdint>

#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/planner/step.h"

namespace shardbook::validate {

struct AttentionJob {
  sim::Cluster cluster;
  int ranks = 1;  ///< they hold equal parts of one sequence
  std::int64_t tokens_per_rank = 0;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  DType dtype = DType::kBF16;
  sequence_parallel::Layout layout = sequence_parallel::Layout::kContiguous;
  bool with_backward = false;
};

/// Causal ring attention of one sequence, until the last rank has ended; on one
/// rank, plain attention.
planner::StepTime run_attention(const AttentionJob& job);

}  // namespace shardbook::validate
