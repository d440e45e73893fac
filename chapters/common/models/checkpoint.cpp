#include "chapters/common/models/checkpoint.h"

#include <cmath>
#include <deque>
#include <fstream>
#include <iterator>

#include "chapters/common/models/internal/llama_files.h"
#include "chapters/common/models/internal/llama_json.h"
#include "chapters/common/models/internal/weight_names.h"
#include "chapters/common/models/internal/weight_sources.h"
#include "core/check.h"
#include "core/context.h"
#include "core/safetensors.h"

namespace shardbook {
namespace {

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

/// The weights of the Llama family as files have them; `copies` keeps those that
/// differ from the ones in memory.
std::vector<SafetensorsItem> named_as_in_llama(
    const std::vector<NamedTensor>& tensors, const ModelConfig& config,
    std::deque<std::vector<std::byte>>& copies) {
  std::vector<SafetensorsItem> items;
  for (const NamedTensor& entry : tensors) {
    const TensorInFiles whole = llama_weight(config, entry.name);
    SB_CHECK(entry.tensor.shape() == whole.shape, "save: '", entry.name,
             "' has shape ", shape_text(entry.tensor.shape()), ", not ",
             shape_text(whole.shape));
    const DType dtype = entry.tensor.dtype();
    for (const FilePiece& piece : whole.pieces) {
      const Shape shape = whole.shape_in_file(piece);
      const void* data = entry.tensor.raw();
      if (!whole.is_plain()) {
        std::size_t bytes = dtype_bytes(dtype);
        for (const std::int64_t size : shape) {
          bytes *= static_cast<std::size_t>(size);
        }
        copies.emplace_back(bytes);
        write_piece(whole, piece, entry.tensor, copies.back().data());
        data = copies.back().data();
      }
      items.push_back({piece.name, dtype, shape, data});
    }
  }
  return items;
}

/// Throws Error where the configs of two models compute something else. Another
/// model_type may be the same model: a mistral without a window is a llama.
void check_llamas_agree(const std::string& label, const ModelConfig& there,
                        const ModelConfig& config) {
  if (there.n_embd != config.n_embd) return;  // load_model reports it
  const auto keys = [](const ModelConfig& of) {
    const LlamaConfig& llama = of.llama;
    return nlohmann::json{{"num_attention_heads", of.n_head},
                          {"num_key_value_heads", llama.kv_heads},
                          {"head_dim", llama.head_dim},
                          {"rms_norm_eps", of.layer_norm_epsilon},
                          {"rope_theta", llama.rope_theta},
                          {"rope_scaling", rope_to_json(llama.rope)},
                          {"sliding_window", llama.sliding_window},
                          {"num_experts_per_tok", llama.experts_per_token},
                          {"norm_topk_prob", llama.norm_topk_prob}};
  };
  const nlohmann::json of_file = keys(there), here = keys(config);
  for (const auto& [key, value] : here.items()) {
    SB_CHECK(of_file[key] == value, label, ": \"", key, "\" is ",
             of_file[key].dump(), " in its config, and ", value.dump(),
             " in that of --model");
  }
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
  std::deque<std::vector<std::byte>> copies;
  std::vector<SafetensorsItem> items =
      config.is_llama() ? named_as_in_llama(state, config, copies)
                        : items_of(state);
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
  load_model(path, model, ModelConfig{}, part_of);
}

void load_model(const std::string& path, Module& model,
                const ModelConfig& config, const PartOf& part_of) {
  const bool is_llama = config.is_llama();
  if (is_llama) check_is_one_model(path);
  const CheckpointReader file = open_to_load(path);
  const FileNames names(file, path, is_llama ? "model." : "transformer.");
  if (is_llama) check_has_no_more(config, path, names);
  const std::string tied = is_llama && config.llama.tied
                               ? "model.embed_tokens.weight"
                               : "transformer.wte.weight";
  // Everything is checked before anything is changed.
  std::vector<WeightSource> sources;
  for (const NamedTensor& target : state_of(model)) {
    if (target.name == tied) check_is_tied(file, path, names, tied);
    const PartOfFile part = part_of ? part_of(target.name) : PartOfFile{};
    sources.push_back(
        is_llama
            ? source_of_llama(config, target, part)
            : WeightSource{target.tensor,
                           {target.name,
                            whole_shape(part.shards, target.tensor.shape()),
                            {FilePiece{target.name}}},
                           part});
    WeightSource& source = sources.back();
    for (FilePiece& piece : source.whole.pieces) {
      piece.name = names.at(piece.name);
      check_piece(file, path, source, piece);
    }
  }
  for (const WeightSource& source : sources) {
    const Device& device = source.target.device();
    if (device.is_meta()) continue;
    source.target.copy_from(read_source(file, source));
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
  if (config.is_llama() && there.is_llama()) {
    return check_llamas_agree(label, there, config);
  }
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
