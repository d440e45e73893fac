#pragma once

// The layers of a GPT whose parameters lie in parts on a square or a cube of
// ranks. Each is a function of its input and of this rank's parts, so squares
// and cubes differ only in these functions.

#include <functional>
#include <string>

#include "chapters/common/models/models.h"
#include "core/shards.h"

namespace shardbook::summa {

/// A rank's functions for each type of layer.
struct PartLayers {
  /// The part of the parameter `name` that this rank holds.
  std::function<Shards(const std::string& name)> layout;
  /// `name` is the layer's name.
  std::function<Tensor(const std::string& name, const Tensor& x,
                       const Tensor& weight, const Tensor& bias)>
      linear;
  std::function<Tensor(const std::string& name, const Tensor& x,
                       const Tensor& gamma, const Tensor& beta, double eps)>
      layer_norm;
  std::function<Tensor(const Tensor& table, const Tensor& ids)> embedding;
  /// The vectors of the first positions, from this rank's part of their rows.
  std::function<Tensor(const Tensor& rows)> positions;
  std::function<Tensor(const Tensor& x, double p)> dropout;
  std::function<Tensor(const Tensor& x, const Tensor& table)> logits;
};

/// Single-device layers with these functions in their place. Every parameter
/// starts with its single-device values.
LayerFactory factory_of(const PartLayers& parts);

/// Queries, keys and values are three blocks of columns, each cut by heads.
std::int64_t blocks_of(const std::string& name);

}  // namespace shardbook::summa
