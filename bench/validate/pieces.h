#pragma once

// Parts of a model, run by themselves on shapes: one transformer layer over a
// tensor-parallel group, one attention over a group that cuts the sequence.

#include <cstdint>

#include "chapters/12_sequence_parallel/layout.h"
#include "core/dtype.h"
#include "sim/cluster.h"

namespace shardbook::validate {

struct LayerJob {
  sim::Cluster cluster;
  int ranks = 1;  ///< of the tensor-parallel group
  std::int64_t hidden = 0, heads = 0, seq = 0, micro_batch = 1;
  DType dtype = DType::kF16;
  double dropout = 0;
  bool cuts_tokens = false;  ///< Megatron-LM's sequence parallelism
  bool recompute = false;    ///< of the whole layer
  /// Of attention alone; only where tokens are cut.
  bool recompute_attention = false;
};

struct LayerRun {
  double forward_s = 0;
  double backward_s = 0;
  /// Activations that a rank keeps for backward, the layer's input included.
  double kept_bytes = 0;
  sim::Trust trust = sim::Trust::kInterpolated;
};

/// Throws Error where the layer does not divide by the ranks.
LayerRun run_layer(const LayerJob& job);

struct AttentionJob {
  sim::Cluster cluster;
  int ranks = 1;  ///< they hold equal parts of one sequence
  std::int64_t tokens_per_rank = 0;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  DType dtype = DType::kBF16;
  sequence_parallel::Layout layout = sequence_parallel::Layout::kContiguous;
  bool with_backward = false;
};

struct AttentionRun {
  double seconds = 0;  ///< until the last rank has ended
  sim::Trust trust = sim::Trust::kInterpolated;
};

/// Causal ring attention of one sequence; on one rank, plain attention.
AttentionRun run_attention(const AttentionJob& job);

}  // namespace shardbook::validate
