#pragma once

// Models in files: safetensors under the published names.

#include <functional>
#include <string>

#include "chapters/common/models/models.h"
#include "core/shards.h"

namespace shardbook {

/// The parameters of a model, then its buffers.
std::vector<NamedTensor> state_of(Module& model);

/// The same tensors; those on a GPU as copies on the host.
std::vector<NamedTensor> on_host(std::vector<NamedTensor> tensors);

/// Writes all parameters (and buffers) by name, each in its own dtype, with the
/// config as JSON in the metadata. The old file survives any failure.
void save_model(const std::string& path, Module& model,
                const ModelConfig& config);

/// The first parameter or buffer with a value that is infinite or not a number;
/// empty where there is none.
std::string first_not_finite(Module& model);

/// Fills the model from FILE.safetensors, or from a FILE.safetensors.index.json
/// with its shards. Names may lack the leading "transformer."; floating dtypes
/// are converted; further tensors in the file are ignored. Throws Error that
/// names the file, the tensor, and what differs.
void load_model(const std::string& path, Module& model);

/// The part of a file's tensor that a module's tensor is. A tensor of `rows` rows
/// that the file has only the first of is zero behind them; 0: it has them all.
struct PartOfFile {
  Shards shards;
  std::int64_t rows = 0;
};
using PartOf = std::function<PartOfFile(const std::string& name)>;
/// The same for a module that holds parts of the tensors.
void load_model(const std::string& path, Module& model, const PartOf& part_of);

/// The config that a saved model carries; Error when it has none.
ModelConfig config_of_file(const std::string& path);

/// Writes named tensors as they are.
void save_tensors(const std::string& path,
                  const std::vector<NamedTensor>& tensors);

}  // namespace shardbook
