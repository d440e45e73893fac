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
/// config as JSON in the metadata. The old file survives any failure. `names` are
/// those of a ResNet's weights; all others are transformers' in any case. Weights
/// of the Llama family are written apart and transposed, as files have them
/// (internal/llama_files.h); until the file is written, they are in memory twice.
void save_model(const std::string& path, Module& model,
                const ModelConfig& config,
                WeightNames names = WeightNames::kTorchvision);

/// The first parameter or buffer with a value that is infinite or not a number;
/// empty where there is none.
std::string first_not_finite(Module& model);

/// The part of a tensor that a module holds; `shards` cut it as it is in memory.
/// Padded to `rows` rows with
/// zeros where the file has fewer; 0: the file has them all.
struct PartOfFile {
  Shards shards;
  std::int64_t rows = 0;
};
using PartOf = std::function<PartOfFile(const std::string& name)>;

/// Fills the model from FILE.safetensors, or from a FILE.safetensors.index.json
/// with its shards. Names may lack the leading "transformer.", have the prefixes
/// of PyTorch's wrappers, and for a ResNet be torchvision's or transformers'
/// (internal/weight_names.h). Floating dtypes are converted; further tensors in
/// the file are ignored, except an output layer that differs from the token
/// embedding: that is refused.
/// `part_of`: the parts that the module holds, where it has not all.
/// Throws Error that names the file, the tensor, and what differs.
void load_model(const std::string& path, Module& model,
                const PartOf& part_of = {});

/// The same for a model of `config`, which decides how a file has its weights:
/// those of the Llama family are joined and transposed while they are read, one
/// tensor at a time, and a rank reads its own part only. Their names may lack
/// the leading "model.". Of such a model, an lm_head.weight that a tied one does
/// not need must equal the token embedding, further tensors of its blocks are
/// refused, and so is a folder with both model.safetensors and
/// model.safetensors.index.json, which may be two models.
void load_model(const std::string& path, Module& model,
                const ModelConfig& config, const PartOf& part_of = {});

/// Throws Error where the config in the file, or the config.json in the folder
/// `path`, describes another computation than `config`.
void check_config_of_file(const std::string& path, const ModelConfig& config);

/// Writes named tensors as they are.
void save_tensors(const std::string& path,
                  const std::vector<NamedTensor>& tensors);

}  // namespace shardbook
