#pragma once

// What a model's sizes alone tell: parameters, operations, and memory without a
// plan.

#include <string>

#include "chapters/common/models/counted_model.h"
#include "core/dtype.h"

namespace shardbook::planner {

/// A model, and the samples that it is counted on.
struct CountRequest {
  std::string name;  ///< "llama-3.1-8b", or a file
  CountedModel model;
  std::int64_t seq = 0;  ///< tokens of a sample
  DType dtype = DType::kBF16;
};

/// Parameters in all and per part, operations per token, keys and values, and the
/// memory of one device that trains on one sample at a time.
std::string count_text(const CountRequest& request);
/// The same as one JSON object. Activations are null where they are not known.
std::string count_json(const CountRequest& request);

}  // namespace shardbook::planner
