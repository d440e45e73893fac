#pragma once

// ResNets over replicas and stages, and what a run leaves of them.

#include "chapters/common/models/resnet.h"
#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::hybrid {

/// Eight layers: stem, six blocks of which one halves the maps, head.
inline Options image_options(int world_size) {
  Options options = nano_options(world_size);
  options.model = R"({"model_type": "resnet", "depths": [3, 3],
      "embedding_size": 4, "num_labels": 5})";
  options.image_size = 16;
  options.seq = 1;
  options.data = "random";
  return options;
}

/// Eight micro-batches on any mesh, unless they are given.
inline HybridOptions image_mesh(int dp, int pp, int zero = 0,
                                int micro_batches = 0) {
  HybridOptions setup;
  setup.dp = dp, setup.pp = pp;
  setup.zero_stage = zero;
  setup.micro_batches = micro_batches > 0 ? micro_batches : 8 / dp;
  return setup;
}

inline std::map<std::string, std::vector<double>> values_of(
    const std::vector<NamedTensor>& tensors) {
  std::map<std::string, std::vector<double>> values;
  for (const NamedTensor& each : tensors) {
    values[each.name] = each.tensor.to_vector<double>();
  }
  return values;
}

/// Parameters and running statistics of a file, bit for bit.
inline std::map<std::string, std::vector<double>> state_in(
    const std::string& path) {
  const Options options = image_options(1);
  InitOptions init;
  init.dtype = options.dtype;
  const auto model = make_model(model_config(options), init);
  load_model(path, *model);
  return values_of(state_of(*model));
}

}  // namespace shardbook::hybrid
