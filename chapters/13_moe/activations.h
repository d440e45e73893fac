#pragma once

// Peak bytes of activations, derived by walking through a step.

#include "chapters/13_moe/bill.h"

namespace shardbook::moe {

/// Of one rank whose blocks all have equally many experts with slots, without
/// noise, without an MLP beside the experts, and without dropout; kNotPredicted
/// for the others.
double predicted_activations(const Options& options, const ModelConfig& config,
                             const MoeOptions& moe, const BillSizes& sizes);

}  // namespace shardbook::moe
