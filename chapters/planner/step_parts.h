#pragma once

// Parts of a step's prediction: the ranks of its groups, the work of each rank
// of the pipeline, the buckets of gradients, the messages of ZeRO, its run on
// shapes, and the bytes of all messages.

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "chapters/common/models/block.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/planner/step.h"
#include "core/device.h"
#include "sim/cost_model.h"

namespace shardbook::planner {

/// Ranks in Megatron-LM's order: tensor, context, data, pipeline.
class Ranks {
 public:
  /// Groups are those of the first rank of this rank of the pipeline.
  explicit Ranks(const HybridJob& job, int pp_rank = 0)
      : job_(job), tp_(job.layout.tp), first_(at_stage(pp_rank)) {}
  std::vector<int> of_tp() const { return every(1, tp_); }
  /// The ranks with the same parameters.
  std::vector<int> of_replicas() const { return every(tp_, job_.replicas()); }
  /// Those with the same experts.
  std::vector<int> of_experts() const {
    const int ep = job_.layout.ep, tp_cp = tp_ * job_.layout.cp;
    if (!job_.sizes.has_own_experts()) {
      const int stride = std::max(ep, tp_);
      return every(stride, std::max(1, tp_ * job_.replicas() / stride));
    }
    // All of tp and cp, and every ep-th replica
    std::vector<int> ranks;
    for (const int first : every(tp_cp * ep, job_.dp / ep)) {
      for (int i = 0; i < tp_cp; ++i) ranks.push_back(first + i);
    }
    return ranks;
  }
  /// The rank of a stage in the first pipeline.
  int at_stage(int stage) const { return stage * tp_ * job_.replicas(); }

 private:
  std::vector<int> every(int stride, int count) const {
    std::vector<int> ranks;
    for (int i = 0; i < count; ++i) ranks.push_back(first_ + i * stride);
    return ranks;
  }

  const HybridJob& job_;
  int tp_, first_;
};

/// The place in a node from which `count` devices have the same links, and leave the
/// node at the same ones, as from a rank of the pipeline on; the first such place.
int place_of(const HybridJob& job, int pp_rank, int count);
/// The cluster as layers at a rank of the pipeline see it: a mesh of links is numbered
/// from the rank's first device.
const sim::Cluster& cluster_from(const sim::Cluster& cluster,
                                 const HybridJob& job, int pp_rank);

/// All stages in order, including those of all chunks.
std::vector<StageParts> stages_of(const HybridJob& job);
std::vector<StageRun> runs_of(const HybridJob& job);
/// Totals of each pipeline rank over its chunks: times, bytes sent and
/// parameters are sums, a tied table counts once, and the update is of the
/// rank's own part.
std::vector<StageRun> ranks_of(const HybridJob& job,
                               const std::vector<StageRun>& runs);

/// The order of each rank's forwards and backwards.
pipeline::Schedule schedule_of(const HybridJob& job, int micro_batches);

/// Of a pipeline: its seconds; by how much each rank ends before, and by how much
/// its host has gone on to issue by then.
struct PipelineTime {
  double seconds = 0;
  std::vector<double> early = {0}, ahead = {0};
};
/// Not replayed where the ranks' work alone takes `limit_s`: that work.
PipelineTime pipeline_time(const HybridJob& job, const sim::CostModel& costs,
                           const std::vector<StageRun>& runs, double limit_s);
/// An action of a rank of the pipeline, in seconds of the step.
struct TimedAction {
  pipeline::Action action;
  double begin_s = 0, end_s = 0;
};
/// Those of each rank; of a long step, with fewer micro-batches, which show how it
/// begins, goes on and ends. With ZeRO-2 and -3 they contain what is not hidden of
/// gathers and sums. `step`: the job's. Not with offload.
std::vector<std::vector<TimedAction>> timed_actions(
    const HybridJob& job, const std::vector<StageRun>& runs,
    const HybridStep& step);
/// Seconds of a micro-batch's work on each rank of the pipeline.
std::vector<double> work_of_ranks(const HybridJob& job,
                                  const std::vector<StageRun>& runs);

/// Activation bytes of one micro-batch on one rank of cp.
double activation_bytes(const HybridJob& job);
/// The part that one rank of tp sends to the next stage.
double sent_activation(const HybridJob& job);

/// Blocks by kind: without experts in a model that has some, and the others.
struct BlockCounts {
  double dense = 0, others = 0;
};
/// Of each stage, those of all chunks included.
std::vector<BlockCounts> blocks_of_stages(const HybridJob& job);
/// A block's rows; in a model of one kind, both are the same.
const std::vector<BlockPart>& block_of_kind(const HybridJob& job,
                                            bool is_dense);
const BlockPart& attention_of(const HybridJob& job);
/// Multiply-adds of its products for one token.
double products_of(const std::vector<BlockPart>& block);

/// Elements of one block on a rank of tp.
double block_elements(const HybridJob& job, const StageRun& whole);
/// Of these elements of a block, those of its largest matrix.
double largest_matrix(const HybridJob& job, double block);

/// The page on the messages inside the layers, or on their gaps.
const char* page_of_layers(const HybridJob& job);

/// Parameters that travel in one message.
struct SentBucket {
  double elements = 0;
  std::vector<double> parameters;  ///< elements of each
  bool is_expert = false, is_whole = false, is_partial = false, is_tied = false;
  auto kind() const {
    return std::tie(is_expert, is_whole, is_partial, is_tied);
  }
};

/// Of a rank of the pipeline, in the order in which they leave. `runs`: all stages.
std::vector<SentBucket> buckets_of(const HybridJob& job,
                                   const std::vector<StageRun>& runs, int rank);
/// Whether two ranks have stages of the same parts.
bool has_stages_of(const HybridJob& job, const std::vector<StageRun>& runs,
                   int rank, int other);

/// Seconds of a collective over `ranks` in buckets, one after another.
double in_buckets(const sim::CostModel& costs, CommOp op, double bytes,
                  double bucket_bytes, const std::vector<int>& ranks);
/// All micro-batches of one stage with ZeRO-2 or -3: gathers and sums run
/// beside the computation, and the slower of the two counts.
double zero_seconds(const HybridJob& job, const sim::CostModel& costs,
                    const StageRun& run);
/// Seconds of gradients to the host, Adam on `elements`, and parameters back.
double update_on_host_seconds(const HybridJob& job, const sim::CostModel& costs,
                              double elements);
/// Bytes by MemoryKind.
using BytesByKind = std::array<double, kNumMemoryKinds>;

/// ZeRO-2 and -3 of the hybrid chapter, run by itself on shapes for a model of few
/// blocks. A model of more blocks, and a step of more micro-batches, add equally
/// much for each.
struct ZeroRun {
  double step_s = 0;
  /// Of a micro-batch its forward, and all of it.
  double forward_s = 0, each_s = 0;
  BytesByKind peak{};  ///< at the fullest moment
};

/// Stages 2 and 3 without offload. Throws Error where the chapter refuses the job.
/// Cost: two steps of a few blocks, and of one more, once for all jobs that differ in
/// blocks and micro-batches alone.
ZeroRun zero_run(const HybridJob& job);

/// What a rank sends in a step over one kind of link, for one purpose.
struct SentTerm {
  const char* what;
  const char* page;  ///< that derives it, under chapters/
  std::string link;
  double times = 1, elements = 1, each = 0;  ///< bytes
  int ranks = 0;  ///< of a ring, to which a rank sends all but its own part
  double bytes() const {
    const double all = times * elements * each;
    return ranks > 0 ? all * (ranks - 1) / ranks : all;
  }
};
/// Of the rank that sends most.
std::vector<SentTerm> sent_terms(const HybridJob& job,
                                 const sim::CostModel& costs,
                                 const std::vector<StageRun>& ranks);

}  // namespace shardbook::planner
