#pragma once

// One step of a decoder over a mesh: tensor, context, pipeline and data
// parallelism together.
//
//   stage times        the chapters' layers on shapes (stage.h)
//   pipeline           1F1B or its interleaved form, replayed with messages
//   gradients          all-reduce, or reduce-scatter and all-gather of the
//                      parameters (distributed optimizer), over dp and cp;
//                      of experts over the ranks with the same ones
//   tied embedding     all-reduce between the first stage and the last
//   optimizer          the norm, then Adam on f32 copies

#include <cstdint>
#include <string>

#include "chapters/14_hybrid_3d/predict/stage.h"
#include "sim/cluster.h"

namespace shardbook::predict {

struct HybridJob {
  sim::Cluster cluster;
  DecoderSizes sizes;
  std::int64_t layers = 0;
  StageLayout layout;
  int pp = 1, dp = 1;
  /// Pieces of the model per pipeline rank; above 1: interleaved 1F1B.
  int chunks = 1;
  std::int64_t micro_batches = 1;
  /// The host waits for the device after each forward and backward, as
  /// Megatron-LM's timers of 2021 do. Otherwise it runs ahead.
  bool is_synchronous = true;
  /// Each rank of dp and cp updates its part of the parameters.
  bool distributes_optimizer = false;
  /// Messages of data parallelism run beside the last micro-batch's backward
  /// and, of parameters, the first one's forward.
  bool overlaps_gradients = false;
  /// Products begin with the parts of their input that are there, and send what
  /// is done of their output: of a tensor-parallel transfer, one of tp parts is
  /// left (Transformer Engine's userbuffers).
  bool overlaps_tensor = false;
  DType gradient_dtype = DType::kF16;  ///< on the wire
  bool is_tied = true;                 ///< head and token embedding
};

struct HybridStep {
  double seconds = 0;
  // Parts of it, on the critical path
  double pipeline_s = 0, gradients_s = 0, optimizer_s = 0;
  sim::Trust trust = sim::Trust::kInterpolated;
};

/// Throws Error where layers do not divide by stages, micro-batches by an
/// interleaved pipeline, or the cluster is smaller than the job. Cost: a few
/// simulated stages, each once for all jobs.
HybridStep hybrid_step(const HybridJob& job);

}  // namespace shardbook::predict
