#pragma once

// A layer of experts with a gate that prefers some, for tests.

#include <memory>

#include "chapters/13_moe/moe_layer.h"
#include "tests/core/support.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook::moe {

constexpr char kName[] = "transformer.h.0.mlp";
constexpr std::int64_t kLayerWidth = 8;

inline ModelConfig config_of(std::int64_t width = kLayerWidth) {
  ModelConfig config;
  config.n_embd = width;
  config.n_layer = 1;
  return config;
}

inline MoeLayer make_layer(const MoeOptions& options, const MoeGroups& groups,
                           std::shared_ptr<MoeRecord> record = nullptr,
                           const InitOptions& init = f64_init(),
                           const ModelConfig& config = config_of()) {
  if (record == nullptr) record = std::make_shared<MoeRecord>();
  MoeLayer layer =
      moe_mlp(options, groups, record)(kName, config, init, LayerFactory())
          .as<MoeLayer>();
  layer.gate.weight.copy_from(
      to_dtype(noise(layer.gate.weight.shape(), 5, -2, 2), init.dtype));
  return layer;
}

}  // namespace shardbook::moe
