#pragma once

// Long skip connections, as in U-Nets; in a pipeline they cross many stages.
//
//   embedding  h.0  h.1  h.2  h.3  h.4  h.5  head
//               |    |              ^    ^
//               |    +--------------+    |
//               +------------------------+
//
// The output of block i is added to the input of block L-1-i. On one device
// this is an addition; in a pipeline, a tensor must travel from an early stage
// to a late one.
//
// Ronneberger et al. 2015, "U-Net"; Bao et al. 2023, "All are Worth Words: A
// ViT Backbone for Diffusion Models" (which joins by a linear layer).

#include <memory>

#include "chapters/common/pipeline/stages.h"

namespace shardbook::gpipe {

/// The same layers, with a skip "long/i" from block i to block L-1-i wherever
/// at least one block lies between them. The first and the last layer have
/// none. Throws Error for a model whose layers change the shape of their input.
std::unique_ptr<LayerList> with_long_skips(
    std::shared_ptr<const LayerList> layers, const ModelConfig& config);

}  // namespace shardbook::gpipe
