#pragma once

// Unties a head's token embedding.
//
// If every stage updates its weights at its own time, two copies of a parameter
// cannot stay equal: each update would need both gradients. Asynchronous
// schedules train the head's copy as a parameter of its own, "lm_head.weight"
// (Hugging Face's name), which starts with the embedding's values.

#include <memory>

#include "chapters/common/pipeline/stages.h"

namespace shardbook::pipeline {

/// The same layers, except that the head of a GPT has weights of its own.
/// Models without shared parameters are returned unchanged.
std::shared_ptr<const LayerList> untied(
    std::shared_ptr<const LayerList> layers);

}  // namespace shardbook::pipeline
