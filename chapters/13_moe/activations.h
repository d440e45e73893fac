#pragma once

// The activations that a forward keeps for its backward.

#include "chapters/13_moe/bill.h"
#include "chapters/common/run/kept.h"

namespace shardbook::moe {

/// False where the bytes depend on the data, or have no formula: dropless
/// dispatch, noise in the gate's logits, a z-loss, masks in place of indices.
bool keeps_known_bytes(const MoeOptions& moe);
/// Slots of one of so many experts for a rank's tokens of a micro-batch.
double slots_of_expert(const MoeOptions& moe, std::int64_t experts,
                       double tokens);
/// What gate, dispatch, experts and combine of a layer keep.
double kept_by_experts(const ModelConfig& config, const MoeOptions& moe,
                       std::int64_t experts, const KeptSizes& sizes);
/// What their weights' gradients need where they are put off: inputs of products
/// and gradients of outputs, those of the gate among them.
double deferred_by_experts(const ModelConfig& config, const MoeOptions& moe,
                           std::int64_t experts, const KeptSizes& sizes);
/// A block with so many experts, or (1) a dense one.
double kept_by_block(const ModelConfig& config, const MoeOptions& moe,
                     std::int64_t experts, const KeptSizes& sizes);
/// What a rank keeps; kNotPredicted where it is not known.
double predicted_activations(const Options& options, const ModelConfig& config,
                             const MoeOptions& moe, const BillSizes& sizes);

}  // namespace shardbook::moe
