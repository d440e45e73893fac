#pragma once

// The cost of a step for a rank in bytes, memory and time (on the cluster
// `textbook`), as the page's formulas: sums of the formulas of the chapters
// that this one composes.

#include <vector>

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/14_hybrid_3d/hybrid_layers.h"
#include "chapters/14_hybrid_3d/update.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::hybrid {

/// Counts and sizes of a rank's work in one step.
struct BillSizes {
  const Options* options = nullptr;
  const HybridOptions* setup = nullptr;
  const RankLayers* layers = nullptr;
  double rows = 0;     ///< samples of a micro-batch
  double element = 0;  ///< bytes
  double sum = 0;      ///< bytes of an element of a loss or a statistic
  double updates = 0;  ///< steps that f16 did not skip
  /// Forwards (and backwards) of blocks, embedding, head; and recomputed ones.
  double blocks = 0, embeddings = 0, heads = 0;
  double blocks_again = 0, embeddings_again = 0, heads_again = 0;
  /// Of the blocks: those with a Mixtral's experts.
  double expert_blocks = 0, expert_blocks_again = 0;
  double attentions_again = 0;  ///< alone
  /// First layer of each stage, and the end.
  std::vector<int> cuts = {};
  /// The update's buckets; null with ZeRO-2 and -3.
  const std::vector<UpdateBucket>* buckets = nullptr;

  double d() const { return setup->dp * setup->cp; }
  double t() const { return setup->tp; }
  double c() const { return setup->cp; }
  double world() const { return options->world_size; }
  double h() const { return static_cast<double>(layers->padded.n_embd); }
  BlockTable block() const { return block_table(layers->padded); }
  /// Elements of a token's queries, on all ranks of tp.
  double queries() const { return static_cast<double>(block().attention.out); }
  /// Elements of keys that cp moves, as a part of those of queries.
  double key_share() const;
  double vocabulary() const {
    return static_cast<double>(layers->padded.vocab_size);
  }
  /// The share of `rows` samples that a rank of tp and cp has.
  KeptSizes kept_sizes_of(std::int64_t rows) const {
    KeptSizes sizes = kept_sizes(*options, rows);
    sizes.tokens /= c();
    sizes.t = t();
    sizes.recompute = setup->recompute == "blocks";
    return sizes;
  }
  /// Tokens of a micro-batch on one context-parallel rank.
  double tokens() const {
    return rows * static_cast<double>(options->seq) / c();
  }
};

/// The sizes of rank `pp_rank` of a pipeline. Keeps references.
BillSizes bill_sizes(const Options& options, const HybridOptions& setup,
                     const RankLayers& layers,
                     const pipeline::Schedule& schedule,
                     const std::vector<int>& cuts, int pp_rank);

// --- Bytes that a rank sends in a step ---------------------------------------

/// Inside the rank's layers: over tp, cp and ep.
double layer_bytes(const BillSizes& sizes);
/// An all-reduce of two f64 over the world.
double loss_and_norm_bytes(const BillSizes& sizes);
/// The gather of ZeRO-1's parameters, which a skipped step (f16) does not send.
double gather_bytes(const BillSizes& sizes);
/// All of a step with ZeRO-0 and -1, except messages between stages.
double step_bytes(const BillSizes& sizes);

// --- Memory held -------------------------------------------------------------

MemoryBill memory(const BillSizes& sizes, PipelineModel& model,
                  pipeline::Engine& engine);
/// ZeRO-2 and -3.
MemoryBill zero_memory(const BillSizes& sizes, const zero::ZeroOptimizer& zero);
/// ZeRO-2 with experts.
MemoryBill expert_zero_memory(const BillSizes& sizes);

// --- Time --------------------------------------------------------------------

/// Whether the formulas below hold for the options.
bool has_step_time(const Options& options, const HybridOptions& setup,
                   const pipeline::Schedule& schedule);

/// Seconds of a step, from the pipeline's actions and its ranks' updates. The
/// sum of loss and norm over the world waits for all of them; with ZeRO-1, a
/// rank begins its next step when it has its parameters. With
/// overlap_grad_reduce, buckets leave during backward. Collective over `pp`.
double step_s(const BillSizes& sizes, pipeline::Engine& engine,
              ProcessGroup& pp);

/// Times of a micro-batch of this size, for ZeRO-2 and -3.
textbook::ModelTimes model_times(const BillSizes& sizes);

}  // namespace shardbook::hybrid
