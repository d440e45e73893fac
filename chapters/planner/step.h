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
//   memory             the ZeRO chapter's states, and what the schedule keeps

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "chapters/planner/stage.h"
#include "sim/cluster.h"

namespace shardbook::planner {

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

  /// Blocks of each stage; empty: equally many.
  std::vector<std::int64_t> blocks;
  bool is_zero_bubble = false;  ///< ZB-H1 in place of 1F1B
  /// 1 is distributes_optimizer. 2 and 3 need pp = 1: the gradients of every
  /// micro-batch are scattered, and with 3 the parameters of a block are
  /// gathered while the block before computes.
  int zero_stage = 0;
  /// Stages 2 and 3: the optimizer's state, gradients and the update are on the
  /// host; with 3, shards of the parameters as well.
  bool offloads = false;
  /// Gradients and parameters travel in messages of about so many bytes; 0: in
  /// one.
  double bucket_bytes = 0;
  /// A rank of tp sends its part of an activation to the next stage, where tp
  /// gathers them; false: each sends the whole.
  bool scatters_messages = true;
  /// Stages come from composed_stage; else each is run as it is.
  bool composes_stages = false;

  bool distributes() const { return distributes_optimizer || zero_stage >= 1; }
  int replicas() const { return layout.cp * dp; }
  int ranks() const { return layout.tp * pp * replicas(); }
};

/// The most that a rank holds, by kind; of the rank that holds most.
struct StepMemory {
  int pp_rank = 0;
  double parameters = 0, gradients = 0, optimizer = 0, activations = 0;
  double messages = 0;
  double host = 0;  ///< on the host, beside these
  double total() const {
    return parameters + gradients + optimizer + activations + messages;
  }
};

struct HybridStep {
  double seconds = 0;
  // Parts of it, on the critical path
  double pipeline_s = 0, gradients_s = 0, optimizer_s = 0;
  /// The part of the step in which a device does not compute; mean over ranks.
  double idle_share = 0;
  /// What the rank that sends most sends, by kind of link.
  std::map<std::string, double> sent_bytes;
  sim::Trust trust = sim::Trust::kInterpolated;
};

/// Throws Error where layers do not divide by stages, micro-batches by an
/// interleaved pipeline, or the cluster is smaller than the job. Cost: a few
/// simulated stages, each once for all jobs.
HybridStep hybrid_step(const HybridJob& job);
/// The memory of a step, by closed forms on the bytes of one micro-batch:
///
///   parameters + gradients + optimizer    the ZeRO chapter's table
///   + (live - 1) kept + peak              live: as many as the schedule keeps
///
/// Throws as hybrid_step does.
StepMemory step_memory(const HybridJob& job);

// --- For both ----------------------------------------------------------------

/// The stages in order, with those of all chunks.
std::vector<StageParts> stages_of(const HybridJob& job);
StageRun stage_of(const HybridJob& job, const StageParts& parts);
std::vector<StageRun> runs_of(const HybridJob& job);
/// Parameters of a rank of the pipeline; a tied table counts once on it.
double parameters_of(const HybridJob& job, const std::vector<StageRun>& runs,
                     int pp_rank);

}  // namespace shardbook::planner
