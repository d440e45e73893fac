#pragma once

// The degrees of parallelism, and their legal combinations.
//
//   W = d t c p     data, tensor, context, pipeline
//   d = ep x edp    with experts: replicas that share a set of experts, and sets
//
// Every combination that the chapter does not offer is refused before ranks
// start, with the reason. The same code makes the table of the page, one
// combination after another.

#include <map>
#include <string>
#include <vector>

#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "chapters/13_moe/moe_layer.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/run/loss_scaler.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/training.h"
#include "comm/topology.h"

namespace shardbook::hybrid {

struct HybridOptions {
  int dp = 0;  ///< 0: as many as the other degrees leave
  int tp = 1;
  int pp = 1;
  int cp = 1;
  /// The axis that varies fastest between neighbouring ranks comes first.
  std::string order = "tp-cp-dp-pp";
  /// 1 shards the optimizer's state over dp and cp, 2 gradients as well, 3 also
  /// parameters. 2 and 3 need pp = 1.
  int zero_stage = 0;
  bool sequence_parallel = false;  ///< Megatron's, inside the tp group
  std::string cp_kind = "ring";
  std::string cp_layout = "contiguous";
  std::string schedule = "1f1b";
  std::int64_t micro_batches = 4;  ///< of each replica
  int chunks = 2;                  ///< per rank: interleaved schedules
  std::string partition = "uniform";
  /// Parts that run forward again in backward: "always" or "except_last", a whole
  /// stage from its input; "blocks", one block after the other from its own;
  /// "attention" of every block alone; "never".
  std::string recompute = "never";
  /// Gradients (and shards) travel in buckets of about this many bytes.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  /// A bucket leaves while backward goes on, once the last micro-batch has
  /// filled it.
  bool overlap_grad_reduce = false;
  /// Sum the 16-bit gradients of micro-batches in f32.
  bool accumulate_f32 = false;
  /// The model's config has experts (Mixtral), which are dropless; check_legal
  /// sets it.
  bool has_own_experts = false;
  /// Experts of each layer in place of a GPT's MLP; 1: an ordinary MLP.
  std::int64_t experts = 1;
  int ep = 1;              ///< replicas that share a set of experts
  std::int64_t top_k = 1;  ///< experts that a token visits
  double capacity_factor = 1;
  bool expert_tp = false;  ///< tp cuts experts' hidden units, not their slots
  double aux_coefficient = 1e-2;
  std::string noise = "none";        ///< in the gates
  LossScaleOptions loss_scale = {};  ///< f16
  /// Whose sequence of loss scales; empty: loss_scale.kind.
  std::string scaler = "deepspeed";

  sequence_parallel::SequenceOptions sequence() const;
  bool has_experts() const { return experts > 1; }
  moe::MoeOptions moe() const;
  /// Options that a resumed run must share: drops and the gates' losses depend
  /// on the tokens that are routed together.
  std::map<std::string, std::string> agreed() const;
  /// Which micro-batches recompute their whole stage.
  pipeline::Recompute recomputed_stages() const;
  /// The first step's loss scale, and how it changes.
  DynamicLossScaler loss_scaler(DType dtype) const;
};

/// The chapter's own options.
void add_options(CommandLine& line, HybridOptions& setup);

/// The orders of ranks that systems use, and the axes in each.
extern const char* const kOrderHelp;
/// "megatron", "megatron-pp-dp", "deepspeed", "colossal-ai", or the axes
/// themselves ("tp-cp-dp-pp"). Throws Error unless each axis comes once. With
/// ep above 1, ep and edp replace dp, and no rank moves.
Topology topology_of(const HybridOptions& setup);
/// The ranks of one replica's stage, and with ep of the ep replicas that share
/// experts: axes tp and ep, in their order.
Topology parts_topology(const HybridOptions& setup);
/// The replica that a rank belongs to, 0 .. dp-1.
int replica_of(const Topology& topology, int rank);

/// Sets dp where it was left open. Throws Error for illegal combinations, with
/// sizes that work.
void check_legal(const Options& options, HybridOptions& setup);
/// The message of check_legal; empty where the options are legal.
std::string refusal(const Options& options, HybridOptions setup);

/// The schedule of each pipeline. Throws Error where it has none.
pipeline::Schedule schedule_of(const HybridOptions& setup);
/// The rows of micro-batches 0 .. m-1 of a replica: consecutive ones.
std::vector<MicroBatch> pieces_of(const Options& options,
                                  const HybridOptions& setup, int dp_rank);

/// Which axes go together, as text: a row for each set of axes above one, a
/// column for each stage of ZeRO, without experts, with experts over ep, and for
/// image models; below, the reasons for refusals.
std::string combinations_text();

}  // namespace shardbook::hybrid
