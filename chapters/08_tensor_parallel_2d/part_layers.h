#pragma once

// The layers of a decoder whose parameters lie in parts on a square or a cube of
// ranks. Each is a function of its input and of this rank's parts, so squares
// and cubes differ only in these functions.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
#include "comm/process_group.h"
#include "core/shards.h"

namespace shardbook::summa {

/// What a parameter of a decoder is; from this follows the part on each rank.
struct Parameter {
  enum Kind {
    kTable,      ///< of tokens, or of the output layer
    kPositions,  ///< a table, too
    kWeight,
    kBias,
    kNorm,
    kHeadNorm  ///< of each head (Qwen3): whole on all ranks
  } kind = kTable;
  /// The product or the norm whose it is.
  BlockPart part = {};
};

/// The parameters of a model by their names.
class Parameters {
 public:
  explicit Parameters(const ModelConfig& config);
  /// Throws Error where the model has no such layer.
  Parameter of(const std::string& name) const;

 private:
  /// Behind the last names on a module's path.
  std::vector<std::pair<std::string, Parameter>> modules_;
};

/// A rank's functions for each type of layer.
struct PartLayers {
  /// The part of a parameter that this rank holds.
  std::function<Shards(const Parameter& parameter)> layout;
  /// `name` is the layer's name; bias may be undefined.
  std::function<Tensor(const std::string& name, const BlockPart& part,
                       const Tensor& x, const Tensor& weight,
                       const Tensor& bias)>
      linear;
  /// RMSNorm has no beta.
  std::function<Tensor(const std::string& name, const Tensor& x,
                       const Tensor& gamma, const Tensor& beta, double eps)>
      norm;
  std::function<Tensor(const Tensor& table, const Tensor& ids)> embedding;
  /// The vectors of the first positions, from this rank's part of their rows.
  std::function<Tensor(const Tensor& rows)> positions;
  std::function<Tensor(const Tensor& x, double p)> dropout;
  std::function<Tensor(const Tensor& x, const Tensor& table)> logits;
};

/// Single-device layers with these functions in their place. Every parameter
/// starts with its single-device values.
LayerFactory factory_of(const PartLayers& parts);

/// ShardedModel::finish_gradients: each rank has a term of the gradients of norms
/// of heads, of its own rows and heads. Adds them over all ranks.
std::function<void(const std::vector<NamedTensor>& parameters)> sum_head_norms(
    const ModelConfig& config, ProcessGroup& world);

}  // namespace shardbook::summa
