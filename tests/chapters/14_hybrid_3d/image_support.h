#pragma once

// ResNets over replicas and stages, and the results of a run.

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

/// Eight micro-batches on any mesh by default.
inline HybridOptions image_mesh(int dp, int pp, int zero = 0,
                                int micro_batches = 0) {
  return {.dp = dp,
          .pp = pp,
          .zero_stage = zero,
          .micro_batches = micro_batches > 0 ? micro_batches : 8 / dp};
}

/// Parameters and running statistics of a file, bit for bit.
inline Values state_in(const std::string& path) {
  const Options options = image_options(1);
  InitOptions init;
  init.dtype = options.dtype;
  const auto model = make_model(model_config(options), init);
  load_model(path, *model);
  return values_of(state_of(*model));
}

}  // namespace shardbook::hybrid
