#pragma once

// The activations that a forward leaves for its backward, layer by layer.
//
// The layers are those of a LayerList (pipeline/stages.h): an embedding or a
// stem, blocks, and a head with the loss. Values that a layer only passes on are
// counted where they are read again: a block's input is the block's.

#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"

namespace shardbook {

/// A piece of a batch on one device.
struct KeptSizes {
  double rows = 0;         ///< samples
  double tokens = 0;       ///< of a sample
  double side = 0;         ///< of an image
  double element = 4;      ///< bytes of an activation
  double stat = 4;         ///< bytes of a statistic, and of the loss
  double t = 1;            ///< ranks that share heads, hidden units, vocabulary
  bool recompute = false;  ///< blocks keep only their inputs
};

/// The sizes for `rows` samples.
KeptSizes kept_sizes(const ModelOptions& options, std::int64_t rows);

/// Bytes kept by one block with a dense MLP.
double kept_by_block(const ModelConfig& config, const KeptSizes& sizes);
/// Bytes kept by the head and the norm before it, without the loss itself.
double kept_by_head(const ModelConfig& config, const KeptSizes& sizes);
/// Bytes kept by one layer of the model's LayerList.
double kept_by_layer(const ModelConfig& config, int layer,
                     const KeptSizes& sizes);
/// Bytes that deferred weight gradients of a layer need: inputs of products,
/// and the gradients of their outputs.
double deferred_by_layer(const ModelConfig& config, int layer,
                         const KeptSizes& sizes);
/// Bytes kept by the whole model, and the loss; kNoClaim (report.h) for experts
/// without capacity, which keep as many rows as the busiest one needs.
double kept_by_model(const ModelConfig& config, const KeptSizes& sizes);

}  // namespace shardbook
