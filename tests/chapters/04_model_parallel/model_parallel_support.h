#pragma once

// A ResNet small enough to be trained in two halves by every test.

#include <functional>
#include <string>

#include "chapters/common/run/options.h"
#include "core/check.h"

namespace shardbook::model_parallel::test {

// A ResNet of two bottlenecks on each side of the cut.
inline const char* const kTiny =
    R"({"model_type": "resnet", "depths": [1, 1, 1, 1],
    "layer_type": "bottleneck", "embedding_size": 4, "num_labels": 7})";

inline Options tiny_options(DType dtype = DType::kF32) {
  Options options;
  options.chapter = "04_model_parallel";
  options.world_size = 2;
  options.model = kTiny;
  options.dtype = dtype;
  options.data = "random";
  options.batch = 10;
  options.seq = 1;
  options.image_size = 32;
  options.steps = 3;
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.1;
  options.deterministic = true;
  options.cluster = "none";
  return options;
}

inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace shardbook::model_parallel::test
