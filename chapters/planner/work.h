#pragma once

// The work of a step, by which rates are printed.

#include "chapters/planner/step.h"

namespace shardbook::planner {

/// Tokens of a step, over all replicas.
double tokens_of(const HybridJob& job);
/// Multiply-adds of one block for one token: of its products with weights, and
/// of attention, without what its mask saves.
double weight_products(const HybridJob& job);
double attention_products(const HybridJob& job);
/// Products of forward and backward; attention without what its mask saves.
double model_flops(const HybridJob& job);
/// With all blocks computed again: Narayanan et al. 2021, equation 3.
double recomputed_flops(const HybridJob& job);

}  // namespace shardbook::planner
