#pragma once

// The smallest model that falls into two: a linear layer with ReLU, and
// another linear layer.

#include <memory>

#include "chapters/common/stages.h"

namespace shardbook::model_parallel {

/// [n, 10] -> Linear 10 -> 10 and ReLU ("net1") -> Linear 10 -> 5 ("net2").
std::unique_ptr<LayerList> toy_layers();

}  // namespace shardbook::model_parallel
