#pragma once

// The one device that runs with experts are compared with. Capacity and drops
// depend on the tokens that are routed together, so it routes each group of tokens
// by itself, as the ranks do.

#include <memory>
#include <vector>

#include "chapters/13_moe/moe_layer.h"
#include "chapters/common/run/loss_scaler.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/training.h"

namespace shardbook::moe {

/// A GPT of these layers, with the options' seed and dtype.
std::unique_ptr<Gpt> build_gpt(const Options& options,
                               const ModelConfig& config,
                               const LayerFactory& layers);

/// Trains a GPT of these layers in these pieces of the batch, which are equally
/// large. Each piece is routed by itself; where the layers route it in `groups`
/// equal parts, the gates' losses of each count that much less. In f16 the
/// losses are scaled by `scaler`, and steps that overflow are skipped.
ReferenceRun train_reference(const Options& options, const LayerFactory& layers,
                             MoeRecord& record,
                             const std::vector<MicroBatch>& pieces,
                             int groups = 1,
                             DynamicLossScaler scaler = DynamicLossScaler(1));

/// The model with all of its experts, for --save and --logits.
LoadedModel whole_model(const Options& options, const MoeOptions& moe,
                        const std::vector<NamedTensor>& state);

}  // namespace shardbook::moe
