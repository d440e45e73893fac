#pragma once

// Training jobs as published tables describe them, run by the chapters in the
// `sim` world: on shapes alone, with identical ranks run once.

#include <string>

#include "bench/validate/kinds.h"
#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "chapters/common/run/options.h"
#include "chapters/planner/step.h"
#include "sim/cluster.h"

namespace shardbook::validate {

// The planner's types, to which rows are converted.
using planner::DecoderSizes;
using planner::HybridJob;
using planner::Recompute;
using planner::StepTime;

// More would be no model of this time, and would take long to simulate.
constexpr int kMaxLayers = 2000;
constexpr int kMaxSize = 1 << 20;
constexpr int kMaxMicroBatchesPerRank = 4096;

/// Layers and sizes of a GPT, and its sequence. `vocabulary` 0: the row's.
HybridJob gpt_job(const Row& row, int vocabulary = 0);
/// A column that may be empty: 0.
bool is_set(const Row& row, const char* column);
/// A row of a table of jobs (bench/own_rows.md).
HybridJob read_job(const Row& row);

/// Reads `file` in place of the preset `name` from now on: fit_h100.py tries
/// constants without a build. Call it before predicting.
void replace_cluster(const std::string& name, const std::string& file);
sim::Cluster cluster_named(const std::string& name);

/// Options that start a chapter with the job's cluster, ranks, model and batch.
Options options_of(const HybridJob& job);

// Each returns the virtual time of one optimizer step. They throw Error when
// the cluster has fewer devices than the job has ranks. 16-bit parameters have
// f32 copies, which the optimizer updates.
StepTime on_one_device(const HybridJob& job);
/// ZeRO-3 as it was in 2021: each module's parameters are fetched when it needs
/// them, and neither fetches nor reductions overlap with computation. Since
/// 2022 a block's parameters are fetched together, on a separate stream.
StepTime with_zero3(const HybridJob& job, bool is_of_2021 = false);
/// `checkpoint`: which micro-batches are recomputed. The model may read images.
StepTime with_gpipe(const HybridJob& job, const Options& options,
                    const std::string& checkpoint = "always");
/// Megatron-LM's tensor parallelism with sequence parallelism.
StepTime with_megatron(const HybridJob& job);
/// Tokens are cut over all ranks: Ulysses, or ring self-attention as in
/// Colossal-AI, which sums by all-reduce.
StepTime with_sequence(const HybridJob& job, sequence_parallel::Kind kind);

// --- Attention alone ---------------------------------------------------------

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
StepTime run_attention(const AttentionJob& job);

}  // namespace shardbook::validate
