#pragma once

// Tied embeddings, untied.
//
// Where every stage updates its weights by itself, at its own time, two copies
// of one parameter cannot stay equal: the sum of their gradients exists only
// when the last of them is known. Asynchronous schedules train the head's copy
// as a parameter of its own, "lm_head.weight" (Hugging Face's name), which
// begins with the embedding's values.

#include <memory>

#include "chapters/common/pipeline/stages.h"

namespace shardbook::pipeline {

/// The same layers; the last one of a GPT has its own weights. Others are
/// returned as they are.
std::shared_ptr<const LayerList> untied(
    std::shared_ptr<const LayerList> layers);

}  // namespace shardbook::pipeline
