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
#include <utility>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
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
  /// Sums of gradients overlap with the last micro-batch's backward, gathers of
  /// parameters with the first one's forward.
  bool overlaps_gradients = false;
  /// Products begin with the parts of their input that have arrived, and send
  /// finished parts of their output: only one of tp parts of a transfer is not
  /// hidden (Transformer Engine's userbuffers).
  bool overlaps_tensor = false;
  DType gradient_dtype = DType::kF16;  ///< on the wire
  bool is_tied = true;                 ///< head and token embedding

  /// Blocks of each stage; empty: equally many.
  std::vector<std::int64_t> blocks;
  bool is_zero_bubble = false;  ///< ZB-H1 in place of 1F1B
  /// In its place the searched schedule that keeps so many sets of activations
  /// (ZB-1p: pp, ZB-2p: 2 pp); a step's time, not its memory.
  int zero_bubble_sets = 0;
  /// 1: each rank of dp and cp updates its part of the parameters
  /// (Megatron-LM's distributed optimizer). 2 and 3 need pp = 1: the gradients
  /// of every micro-batch are scattered, and with 3 the parameters of a block
  /// are gathered during the block before.
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
  /// A rank computes nothing while it sends or receives an activation (DeepSpeed's
  /// pipeline); false: beside its work.
  bool waits_for_messages = false;
  /// Stages come from composed_stage; false: each is run as it is.
  bool composes_stages = false;

  /// Whether a chapter trains, as plans do: its host runs ahead until it reads
  /// a loss, and its update goes bucket by bucket.
  bool is_of_chapter() const { return bucket_bytes > 0; }
  /// Whether it is run on shapes (ZeroRun, step_parts.h).
  bool runs_zero() const {
    return is_of_chapter() && zero_stage >= 2 && !offloads;
  }
  int replicas() const { return layout.cp * dp; }
  int ranks() const { return layout.tp * pp * replicas(); }
  /// Bytes of an element, and of a gradient's element on the wire.
  double element() const {
    return static_cast<double>(dtype_bytes(layout.dtype));
  }
  double gradient() const {
    return static_cast<double>(dtype_bytes(gradient_dtype));
  }
  /// Elements of the token table on one rank of tp.
  double table() const {
    return static_cast<double>(sizes.vocabulary * sizes.hidden) / layout.tp;
  }
  /// Tokens of a step, over all replicas.
  double tokens() const {
    return static_cast<double>(micro_batches * layout.micro_batch * sizes.seq) *
           dp;
  }
  /// The ZeRO chapter's table, with Adam, for a rank with so many parameters,
  /// `experts` of them in experts.
  zero::ModelStates states(double parameters, double experts = 0) const;
};

// --- Work --------------------------------------------------------------------

/// Multiply-adds of one block for one token, mean over blocks: products with
/// weights, and attention as if it had no mask.
double weight_products(const HybridJob& job);
double attention_products(const HybridJob& job);
/// FLOPs of forward and backward, with attention as if it had no mask.
double model_flops(const HybridJob& job);
/// FLOPs with full recomputation: Narayanan et al. 2021, equation 3.
double recomputed_flops(const HybridJob& job);

// --- Prediction --------------------------------------------------------------

constexpr double kNoLimit = 1e300;  ///< seconds

struct StepTime {
  double seconds = 0;
  sim::Trust trust = sim::Trust::kInterpolated;
};

struct HybridStep : StepTime {
  // Parts of it, on the critical path
  double pipeline_s = 0, gradients_s = 0, optimizer_s = 0;
  // Parts of pipeline_s, of the rank with most work: its device computes; its
  // layers wait for messages; it waits for other stages, or with ZeRO-2 and -3 for
  // gathers and sums
  double compute_s = 0, layers_s = 0, waits_s = 0;
  /// Of the rank that sums and updates most.
  double largest_parameters = 0;
  /// The part of the step in which a device does not compute; mean over ranks.
  double idle_share = 0;
  /// Bytes sent by the rank that sends most, by kind of link.
  std::map<std::string, double> sent_bytes;
};

/// The peaks of the fullest rank, by kind.
struct StepMemory {
  double parameters = 0, gradients = 0, optimizer = 0, activations = 0;
  double messages = 0;
  double host = 0;  ///< on the host, not in total()
  static const std::pair<const char*, double StepMemory::*> kKinds[6];
  double total() const {
    return parameters + gradients + optimizer + activations + messages;
  }
};

/// A part of one kind: so many of so many bytes, over so many ranks.
struct MemoryTerm {
  const char* what;
  const char* page;  ///< that derives it, under chapters/
  double count = 0, each = 0, ranks = 1;
  double StepMemory::*kind = nullptr;
  double bytes() const { return count * each / ranks; }
};

/// Throws Error where layers do not divide by stages, micro-batches by the
/// ranks of an interleaved pipeline, or the cluster is smaller than the job.
/// Cost: a few simulated stages, each once for all jobs.
/// A pipeline is not replayed where its ranks' work alone takes `limit_s`: the
/// result has that work's time, and is no faster than the limit.
HybridStep hybrid_step(const HybridJob& job, double limit_s = kNoLimit);
/// Seconds in which a device computes its layers: no step is faster.
/// `blocks_alone`: without embedding and head, which is less to find out.
double least_stage_seconds(const HybridJob& job, bool blocks_alone);
/// Sets of activations, each of one chunk, that a rank keeps at the same time,
/// including the one being computed. The table of the 1F1B chapter.
int live_sets(const HybridJob& job, int pp_rank);
/// The memory of a step, by closed forms on the bytes of one micro-batch:
///
///   parameters + gradients + optimizer    the ZeRO chapter's table
///   + (live - 1) kept + peak              live: as many as the schedule keeps
///
/// Throws as hybrid_step does. `terms`: what it is the sum of.
StepMemory step_memory(const HybridJob& job,
                       std::vector<MemoryTerm>* terms = nullptr);
/// Blocks of each stage: equally many. Where layers + 2 divides, the embedding
/// and the head count as a block each, and the first and the last stage have
/// one less (Llama 3; Megatron-LM's account_for_embedding_in_pipeline_split).
/// Else some have one more, in the later middle, away from the head.
std::vector<std::int64_t> balanced_blocks(std::int64_t layers, int stages);

}  // namespace shardbook::planner
