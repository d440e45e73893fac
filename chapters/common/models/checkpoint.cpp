#include "chapters/common/models/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "chapters/common/models/internal/weight_names.h"
#include "core/check.h"
#include "core/context.h"
#include "core/safetensors.h"

namespace shardbook {
namespace {

constexpr char kPrefix[] = "transformer.";

/// The tensors must be on the host
std::vector<SafetensorsItem> items_of(const std::vector<NamedTensor>& tensors) {
  std::vector<SafetensorsItem> items;
  for (const NamedTensor& entry : tensors) {
    items.push_back({entry.name, entry.tensor.dtype(), entry.tensor.shape(),
                     entry.tensor.raw()});
  }
  return items;
}

/// A ResNet's tensors under transformers' names, with num_batches_tracked,
/// without which transformers reinitializes norms; its value has no effect.
std::vector<SafetensorsItem> named_as_in_transformers(
    const std::vector<SafetensorsItem>& items) {
  static constexpr std::int64_t kNotCounted = 0;
  const std::string last = "running_var";
  std::vector<SafetensorsItem> renamed;
  for (SafetensorsItem item : items) {
    item.name = resnet_name_in_transformers(item.name);
    renamed.push_back(item);
    const std::size_t at = item.name.rfind(last);
    if (at == std::string::npos) continue;
    renamed.push_back({item.name.substr(0, at) + "num_batches_tracked",
                       DType::kI64,
                       {},
                       &kNotCounted});
  }
  return renamed;
}

CheckpointReader open_to_load(const std::string& path) {
  try {
    return CheckpointReader::open(path);
  } catch (const Error& error) {
    SB_FAIL("--load ", error.what());  // which begins with the path
  }
}

/// Finds a model's tensors in a file by the names that files may have for them.
class Names {
 public:
  Names(const CheckpointReader& file, const std::string& path) : path_(path) {
    for (const std::string& name : file.names()) {
      const std::string plain = without_wrappers(name);
      std::string& found = by_plain_name_[plain];
      // Where the file has both, the one without wrappers counts
      if (found.empty() || name == plain) found = name;
    }
  }

  /// The file's name of this tensor; empty where it has none.
  std::string find(const std::string& name) const {
    const std::string prefix = kPrefix;
    const bool has_prefix = name.compare(0, prefix.size(), prefix) == 0;
    for (const std::string& plain :
         {name, has_prefix ? name.substr(prefix.size()) : "",
          resnet_name_in_transformers(name)}) {
      const auto found = by_plain_name_.find(plain);
      if (!plain.empty() && found != by_plain_name_.end()) return found->second;
    }
    return "";
  }

  std::string at(const std::string& name) const {
    const std::string found = find(name);
    if (!found.empty()) return found;
    std::string some;
    int listed = 0;
    for (const auto& [plain, there] : by_plain_name_) {
      if (++listed > 3) break;
      some += (some.empty() ? "'" : ", '") + there + "'";
    }
    SB_FAIL("--load ", path_, ": no tensor is named '", name, "'; of ",
            by_plain_name_.size(), " names the first are ", some);
  }

 private:
  std::string path_;
  std::map<std::string, std::string> by_plain_name_;
};

/// The output layer is the token embedding: another one would be ignored.
void check_is_tied(const CheckpointReader& file, const std::string& path,
                   const Names& names) {
  const std::string head = names.find("lm_head.weight"),
                    wte = names.find("transformer.wte.weight");
  if (head.empty() || wte.empty()) return;
  const SafetensorsEntry &a = file.find(head), &b = file.find(wte);
  SB_CHECK(a.shape == b.shape && a.dtype == b.dtype &&
               std::memcmp(file.data(head), file.data(wte),
                           static_cast<std::size_t>(a.end - a.begin)) == 0,
           "--load ", path, ": '", head, "' differs from '", wte,
           "', but the output layer has the weights of the token embedding "
           "here");
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
                const ModelConfig& config, WeightNames names) {
  const std::vector<NamedTensor> state = on_host(state_of(model));
  std::vector<SafetensorsItem> items = items_of(state);
  if (config.is_image() && names == WeightNames::kTransformers) {
    items = named_as_in_transformers(items);
  }
  write_safetensors(path, items,
                    {{"format", "pt"}, {"config", config.to_json(names)}});
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

void load_model(const std::string& path, Module& model, const PartOf& part_of) {
  const CheckpointReader file = open_to_load(path);
  struct Source {
    Tensor target;
    std::string name;
    PartOfFile part;
  };
  // Everything is checked before anything is changed.
  const Names names(file, path);
  std::vector<Source> sources;
  for (const NamedTensor& target : state_of(model)) {
    const std::string name = names.at(target.name);
    if (target.name == "transformer.wte.weight") {
      check_is_tied(file, path, names);
    }
    const SafetensorsEntry& entry = file.find(name);
    const PartOfFile part = part_of ? part_of(target.name) : PartOfFile{};
    Shape needed = whole_shape(part.shards, target.tensor.shape());
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
    // Read on the host: the values count for no device
    Tensor staged =
        Tensor::zeros(shape, {entry.dtype, RankContext::current().host()});
    std::copy_n(static_cast<const std::byte*>(file.data(source.name)),
                entry.end - entry.begin, static_cast<std::byte*>(staged.raw()));
    if (is_part) staged = take_part(staged, part.shards);
    source.target.copy_from(staged);
  }
}

void check_config_of_file(const std::string& path, const ModelConfig& config) {
  const CheckpointReader file = open_to_load(path);
  std::string text, label = "--load " + path;
  const auto found = file.metadata().find("config");
  if (found != file.metadata().end()) {
    text = found->second;
  } else {
    label += "/config.json";
    std::ifstream beside(path + "/config.json", std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(beside), {});
  }
  if (text.empty()) return;
  const ModelConfig there = ModelConfig::from_json(text, label);
  const auto check = [&](const char* key, const auto& of_file,
                         const auto& here) {
    SB_CHECK(of_file == here, label, ": \"", key, "\" is ", of_file,
             " in its config, and ", here, " in that of --model");
  };
  // load_model reports another width; no shape depends on the keys below
  if (there.type != config.type || there.n_embd != config.n_embd) return;
  check("n_head", there.n_head, config.n_head);
  check("layer_norm_epsilon", there.layer_norm_epsilon,
        config.layer_norm_epsilon);
  const auto name_of = [](GeluForm form) {
    return form == GeluForm::kErf ? "gelu" : "gelu_new";
  };
  check("activation_function", std::string(name_of(there.gelu)),
        std::string(name_of(config.gelu)));
}

}  // namespace shardbook
