#include "chapters/common/models/checkpoint.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/context.h"
#include "core/safetensors.h"

namespace shardbook {
namespace {

constexpr char kPrefix[] = "transformer.";

/// Of tensors on the host.
std::vector<SafetensorsItem> items_of(const std::vector<NamedTensor>& tensors) {
  std::vector<SafetensorsItem> items;
  for (const NamedTensor& entry : tensors) {
    items.push_back({entry.name, entry.tensor.dtype(), entry.tensor.shape(),
                     entry.tensor.raw()});
  }
  return items;
}

CheckpointReader open_to_load(const std::string& path) {
  try {
    return CheckpointReader::open(path);
  } catch (const Error& error) {
    SB_FAIL("--load ", error.what());  // which begins with the path
  }
}

/// The name under which the file has this tensor.
std::string name_in(const CheckpointReader& file, const std::string& path,
                    const std::string& name) {
  if (file.contains(name)) return name;
  const std::string prefix = kPrefix;
  if (name.compare(0, prefix.size(), prefix) == 0 &&
      file.contains(name.substr(prefix.size()))) {
    return name.substr(prefix.size());
  }
  SB_FAIL("--load ", path, ": no tensor is named '", name, "'");
}

}  // namespace

std::vector<NamedTensor> state_of(Module& model) {
  std::vector<NamedTensor> state = model.named_parameters();
  for (NamedTensor& buffer : model.named_buffers()) {
    state.push_back(std::move(buffer));
  }
  return state;
}

std::vector<NamedTensor> on_host(std::vector<NamedTensor> tensors) {
  const Device& host = RankContext::current().host();
  for (NamedTensor& entry : tensors) {
    if (!entry.tensor.device().is_cuda()) continue;
    const Tensor copy =
        Tensor::empty(entry.tensor.shape(), {entry.tensor.dtype(), host});
    copy.copy_from(entry.tensor);
    entry.tensor = copy;
  }
  return tensors;
}

void save_model(const std::string& path, Module& model,
                const ModelConfig& config) {
  const std::vector<NamedTensor> state = on_host(state_of(model));
  write_safetensors(path, items_of(state),
                    {{"format", "pt"}, {"config", config.to_json()}});
}

std::string first_not_finite(Module& model) {
  for (const NamedTensor& entry : state_of(model)) {
    if (entry.tensor.is_meta() || !is_floating(entry.tensor.dtype())) continue;
    for (const double value : entry.tensor.to_vector<double>()) {
      if (!std::isfinite(value)) return entry.name;
    }
  }
  return "";
}

void save_tensors(const std::string& path,
                  const std::vector<NamedTensor>& tensors) {
  const std::vector<NamedTensor> here = on_host(tensors);
  write_safetensors(path, items_of(here), {{"format", "pt"}});
}

void load_model(const std::string& path, Module& model) {
  load_model(path, model, [](const std::string&) { return PartOfFile{}; });
}

void load_model(const std::string& path, Module& model, const PartOf& part_of) {
  const CheckpointReader file = open_to_load(path);
  struct Source {
    Tensor target;
    std::string name;
    PartOfFile part;
  };
  // Everything is checked before anything is changed.
  std::vector<Source> sources;
  for (const NamedTensor& target : state_of(model)) {
    const std::string name = name_in(file, path, target.name);
    const SafetensorsEntry& entry = file.find(name);
    const PartOfFile part = part_of(target.name);
    Shape needed = target.tensor.shape();
    for (const Shard& shard : part.shards) {
      needed[static_cast<std::size_t>(shard.dim)] *= shard.count;
    }
    const bool is_padded = part.rows > 0 && !entry.shape.empty() &&
                           entry.shape[0] <= part.rows &&
                           needed[0] == part.rows;
    if (is_padded) needed[0] = entry.shape[0];
    SB_CHECK(entry.shape == needed, "--load ", path, ": '", name,
             "' has shape ", shape_text(entry.shape), ", the model needs ",
             shape_text(needed));
    SB_CHECK(entry.supported && is_floating(entry.dtype), "--load ", path,
             ": '", name, "' is ", entry.type_name,
             "; weights are F64, F32, BF16 or F16");
    sources.push_back({target.tensor, name, part});
  }
  for (const Source& source : sources) {
    const Device& device = source.target.device();
    if (device.is_meta()) continue;
    const SafetensorsEntry& entry = file.find(source.name);
    const PartOfFile& part = source.part;
    const bool is_part = !part.shards.empty() || part.rows > 0;
    Shape shape = entry.shape;
    if (part.rows > 0) shape[0] = part.rows;
    // On the host: what is read counts for no device
    Tensor staged =
        Tensor::zeros(shape, {entry.dtype, RankContext::current().host()});
    std::copy_n(static_cast<const std::byte*>(file.data(source.name)),
                entry.end - entry.begin, static_cast<std::byte*>(staged.raw()));
    if (is_part) staged = take_part(staged, part.shards);
    source.target.copy_from(staged);
  }
}

ModelConfig config_of_file(const std::string& path) {
  const CheckpointReader file = CheckpointReader::open(path);
  const auto found = file.metadata().find("config");
  SB_CHECK(found != file.metadata().end(), path,
           ": the metadata has no \"config\"; name the model with --model");
  return ModelConfig::from_json(found->second, path);
}

}  // namespace shardbook
