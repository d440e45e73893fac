#pragma once

// Bytes that a rank's allocator holds in Megatron-LM, by formulae: the chapters keep
// less of a layer than Megatron-LM does.
//
//   states       parameters, gradients, optimizer: the ZeRO chapter's table
//   activations  Korthikanti et al. 2022, section 4, for each layer and each
//                micro-batch that waits for its backward
//   loss         logits in 16 bits beside their copy in f32
//   buffers      messages, masks, and the workspaces of the libraries
//
// All of it is for the last stage of 1F1B: that rank writes Megatron-LM's log,
// and one micro-batch waits there.

#include "bench/validate/jobs.h"

namespace shardbook::validate {

/// Software choices that a job's degrees do not determine.
struct MegatronSoftware {
  /// Attention keeps its output and the sums of its softmax, not its scores.
  bool fuses_attention = true;
  /// Otherwise Megatron-LM's own layers ("local").
  bool has_transformer_engine = true;
  /// Bytes that cuBLAS recommends as the workspace of this device.
  double product_workspace = 0;
};

struct MegatronMemory {
  double states = 0, activations = 0, loss = 0, buffers = 0;
  double total() const { return states + activations + loss + buffers; }
};

/// Parameters of one rank of the last stage, its copy of the embedding
/// included. A gated MLP is narrowed until it has as many.
double last_stage_parameters(const HybridJob& job);

/// Bytes that one layer keeps of one micro-batch.
double layer_activations(const HybridJob& job, bool fuses_attention);

/// The peak, when the loss is computed. `job.chunks` is 1.
MegatronMemory megatron_memory(const HybridJob& job,
                               const MegatronSoftware& software);

}  // namespace shardbook::validate
