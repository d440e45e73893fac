#pragma once

// The cost of a sequence-parallel step for a rank, by the page's formulas in b
// s h.

#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/report.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::sequence_parallel {

/// Elements that a rank sends for one attention layer, forward and backward.
struct LayerElements {
  double forward = 0;   ///< of the model's dtype
  double backward = 0;  ///< of the model's dtype
  /// In f32 (f64 for f64): gradients that are summed on their way.
  double backward_sums = 0;
};
/// z = b s h of a whole sequence's queries; `kv_share` of it are keys (key_share).
LayerElements layer_elements(const SequenceOptions& setup, double c, double z,
                             double kv_share = 1);

/// Elements of keys that a layer's attention moves, as a part of those of queries:
/// the share of heads. Ulysses repeats heads until c divides them.
double key_share(const SequenceOptions& setup, const ModelConfig& config,
                 int c);

/// Seconds of one layer's attention on the slowest of c ranks: two products
/// forward, five backward.
struct AttentionTimes {
  double forward = 0, backward = 0;
};
/// Of s tokens. `pair_s`: seconds of one product for a pair of query and key;
/// `part`: bytes of a rank's queries, `part_of_sums`: the same in the type of
/// gradients on their way. `kv_share` of both are keys.
AttentionTimes attention_times(const SequenceOptions& setup, double c, double s,
                               double pair_s, double part, double part_of_sums,
                               double kv_share = 1);

/// Bytes of options.steps steps (attention, the gradients of all parameters, loss
/// and norm), a rank's memory, seconds of a step on the cluster `textbook`.
Bill sequence_bill(const Options& options, const ModelConfig& config,
                   const SequenceOptions& setup, int c,
                   std::int64_t num_parameters, std::int64_t micro_batches);

/// Megatron's, on t ranks. `padded` has the vocabulary with its padding.
Bill megatron_bill(const Options& options, const ModelConfig& padded, int t,
                   std::int64_t micro_batches, bool recompute_attention);

}  // namespace shardbook::sequence_parallel
