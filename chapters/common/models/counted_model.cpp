#include "chapters/common/models/counted_model.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "chapters/common/models/internal/config_keys.h"
#include "chapters/common/models/internal/counted_families.h"
#include "chapters/common/models/internal/counted_json.h"
#include "chapters/common/models/internal/llama_json.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook {
namespace {

using nlohmann::json;

BlockPart table(std::int64_t rows, std::int64_t width) {
  BlockPart part;
  part.kind = PartKind::kTable;
  part.in = rows;
  part.out = width;
  return part;
}

/// The group of a part of `block`.
std::string group_of(const BlockTable& block, const BlockPart& part) {
  if (part.is_norm()) return "norm";
  if (!block.router.empty() && part.name == block.router[0].name)
    return "router";
  if (part.kind == PartKind::kAttention ||
      part.name.rfind(block.attention_module + ".", 0) == 0) {
    return "attention";
  }
  if (part.experts > 1) return "experts";
  return part.name.find(".shared_experts.") != std::string::npos
             ? "shared_experts"
             : "mlp";
}

/// Operations of attention, where a token sees so many.
double attention_over(double tokens, const CountedPart& row) {
  const BlockPart& part = row.part;
  if (part.kind != PartKind::kAttention) return 0;
  return row.times * 2 * tokens *
         static_cast<double>(part.columns[0].width + part.out);
}

double operations_of(const CountedPart& row, double seq, Mask mask) {
  return mask == Mask::kIgnored && row.part.kind == PartKind::kAttention
             ? attention_over(seq, row)
             : row.times * row.part.operations(seq);
}

/// Keys that training may refuse and the count does not need.
json without_training(json object) {
  using namespace counted_families;
  for (const auto* keys : {&keys_of_training(), &keys_passed_over()}) {
    for (const std::string& key : *keys) object.erase(key);
  }
  return object;
}

/// A classifier has no output layer over the vocabulary.
void note_architecture(const json& object, std::vector<std::string>& remarks) {
  const auto names = object.find("architectures");
  if (names == object.end() || !names->is_array() || names->empty()) return;
  const json& name = names->front();
  if (!name.is_string()) return;
  for (const char* of_text :
       {"ForCausalLM", "LMHeadModel", "ForConditionalGeneration"}) {
    if (name.get<std::string>().find(of_text) != std::string::npos) return;
  }
  remarks.push_back("a " + json_file::printable(name.get<std::string>()) +
                    " is counted as a language model, with an output layer");
}

/// Latent attention, shared experts, or dense blocks among others: what no Llama
/// or Mixtral has.
bool has_more_parts(const CountedSizes& sizes) {
  const auto has_experts = [](const CountedLayer& layer) {
    return layer.has_experts;
  };
  const bool has_both =
      std::any_of(sizes.layers.begin(), sizes.layers.end(), has_experts) &&
      !std::all_of(sizes.layers.begin(), sizes.layers.end(), has_experts);
  return sizes["kv_rank"] > 0 || sizes["shared"] > 0 || has_both;
}

/// Of a model that the book does not train.
CountedModel counted_from_json(const json& object, const std::string& label,
                               const std::string& type) {
  const CountedSizes sizes = counted_sizes(object, label, type);
  CountedModel model;
  model.type = type;
  model.positions = sizes["positions"];
  model.rows = counted_rows(sizes);
  model.remarks = {"the book does not train a " + type};
  for (const char* key :
       {"num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"}) {
    const auto further = object.find(key);
    if (further == object.end() || further->is_null() || *further == 0)
      continue;
    model.remarks.push_back(
        std::string("layers that predict further tokens (\"") + key +
        "\") are not counted, as transformers does not build them");
    break;
  }
  if (has_more_parts(sizes)) model.nearest = nearest_config(sizes, type);
  return model;
}

bool is_trained(const std::string& type) {
  const std::vector<std::string>& llamas = llama_types();
  return type == "gpt2" ||
         std::find(llamas.begin(), llamas.end(), type) != llamas.end();
}

/// Throws Error for a type that is not counted.
void check_type(const json& object, const std::string& label) {
  const json type = object.value("model_type", json("gpt2"));
  if (type.is_string() &&
      (is_trained(type) || counted_families::is_known(type))) {
    return;
  }
  const std::string begin =
      label + ": \"model_type\" is " + json_file::shown(type);
  for (const auto& [key, value] : object.items()) {
    for (const char* name : {"linear_", "mamba_", "ssm_", "lru_", "conv_"}) {
      SB_CHECK(key.rfind(name, 0) != 0 || value.is_null(), begin,
               ", with layers of linear attention or state spaces (\"",
               json_file::printable(key),
               "\"); only decoders with attention in all layers are counted");
    }
  }
  std::vector<std::string> others = counted_families::types();
  others.erase(std::remove(others.begin(), others.end(), "gpt2"), others.end());
  SB_FAIL(begin, "; the book trains gpt2, ", json_file::list(llama_types()),
          ", and these are counted, too: ", json_file::list(others));
}

CountedModel trained_from_json(const json& object, const std::string& label) {
  const std::string type = object.value("model_type", "gpt2");
  const auto read = [&](const json& keys) {
    return CountedModel::of(type == "gpt2"
                                ? ModelConfig::from_json(keys.dump(), label)
                                : llama_from_json(keys, label, type));
  };
  std::string refusal;
  try {
    return read(object);
  } catch (const Error& error) {
    refusal = error.what();
    if (refusal.rfind(label + ": ", 0) == 0) refusal.erase(0, label.size() + 2);
  }
  CountedModel model = counted_families::is_known(type)
                           ? counted_from_json(object, label, type)
                           : read(without_training(object));
  model.remarks.push_back("training refuses this file: " + refusal);
  return model;
}

/// The language model of a config with images or sound: "text_config", or its own
/// keys in releases before that.
json text_of(json object, const std::string& label,
             std::vector<std::string>& remarks) {
  const auto found = object.find("text_config");
  const auto type = object.find("model_type");
  const std::string name = type != object.end() && type->is_string()
                               ? type->get<std::string>()
                               : "model";
  if (found == object.end() || found->is_null()) {
    // Files of transformers 4 have the sizes beside "vision_config"
    if (name != "qwen2_vl" && name != "qwen2_5_vl") return object;
    object["model_type"] = name + "_text";
    remarks.push_back("the text model alone is counted, without images");
    for (const char* key : {"vision_config", "audio_config"}) object.erase(key);
    return object;
  }
  SB_CHECK(found->is_object(), label, ": \"text_config\" is ",
           json_file::shown(*found), "; give an object");
  json text = std::move(*found);
  // transformers' classes know the type of their text model
  if (!text.contains("model_type") &&
      counted_families::is_known(name + "_text")) {
    text["model_type"] = name + "_text";
  }
  SB_CHECK(text.contains("model_type"), label, ": \"text_config\" of this ",
           json_file::printable(name), " has no model_type; give one of ",
           json_file::list(counted_families::types()));
  if (object.contains("tie_word_embeddings")) {
    text["tie_word_embeddings"] = object["tie_word_embeddings"];
  }
  remarks.push_back(
      "the text model alone is counted, of \"text_config\"; other "
      "parts of this " +
      json_file::printable(name) + " are not");
  return text;
}

}  // namespace

CountedModel CountedModel::of(const ModelConfig& config) {
  SB_CHECK(config.has_blocks() && !config.has_experts, "a ", config.type,
           " is not counted; give a GPT-2, or a decoder's config.json");
  CountedModel model;
  const LlamaConfig& llama = config.llama;
  const DecoderNames names = decoder_names(config);
  model.type = config.type;
  model.positions = config.n_positions;
  model.rows.push_back({"embedding", table(config.vocab_size, config.n_embd)});
  if (!names.positions.empty()) {
    model.rows.push_back(
        {"embedding", table(config.n_positions, config.n_embd)});
  }
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    const BlockTable block = block_table(config, i);
    const bool slides =
        std::find(llama.sliding_blocks.begin(), llama.sliding_blocks.end(),
                  i) != llama.sliding_blocks.end();
    for (BlockPart part : block.parts()) {
      if (slides && part.kind == PartKind::kAttention) {
        part.window = llama.sliding_window;
      }
      model.rows.push_back({group_of(block, part), part});
      if (part.kind == PartKind::kAttention && llama.is_latent()) {
        model.rows.back().latent = llama.kv_rank + llama.rope_dim;
      }
    }
  }
  model.rows.push_back({"norm", block_table(config).norm_1});
  BlockPart head;
  head.in = config.n_embd;
  head.out = config.vocab_size;
  model.rows.push_back({"head", head, 1, names.head.empty()});
  model.trained = config;
  return model;
}

CountedModel CountedModel::from_json(const std::string& text,
                                     const std::string& label) {
  json whole = config_keys::parse_config(text, label);
  std::vector<std::string> remarks, further;
  note_architecture(whole, further);
  const json object = text_of(std::move(whole), label, remarks);
  remarks.insert(remarks.end(), further.begin(), further.end());
  check_type(object, label);
  const std::string type = object.value("model_type", "gpt2");
  CountedModel model = is_trained(type)
                           ? trained_from_json(object, label)
                           : counted_from_json(object, label, type);
  // More than any, and every count below is exact in a double
  constexpr double kMost = 1e15;
  SB_CHECK(model.parameters() < kMost, label, ": the model has more than ",
           kMost, " parameters; give a smaller one");
  remarks.insert(remarks.end(), model.remarks.begin(), model.remarks.end());
  model.remarks = remarks;
  return model;
}

CountedModel CountedModel::read(const std::string& name_or_file) {
  const ConfigText config = ModelConfig::text_of(name_or_file);
  return config.text.empty() ? of(ModelConfig::read(name_or_file))
                             : from_json(config.text, config.label);
}

double CountedModel::parameters() const {
  double sum = 0;
  for (const auto& [group, count] : parts()) sum += count;
  return sum;
}

std::map<std::string, double> CountedModel::parts() const {
  std::map<std::string, double> sums;
  for (const CountedPart& row : rows) {
    const double count =
        row.times * (row.is_tied ? (row.part.bias ? row.part.out_on(1) : 0)
                                 : row.part.parameters());
    if (count > 0) sums[row.group] += count;
  }
  return sums;
}

double CountedModel::active() const {
  double idle = 0;
  for (const CountedPart& row : rows) {
    const auto of_all = static_cast<double>(row.part.experts);
    idle += row.times * row.part.parameters() / of_all *
            (of_all - static_cast<double>(row.part.chosen));
  }
  return parameters() - idle;
}

double CountedModel::active_in_blocks() const {
  const std::map<std::string, double> all = parts();
  const auto head = all.find("head");
  return active() - all.at("embedding") -
         (head == all.end() ? 0 : head->second);
}

double CountedModel::operations(double seq, Mask mask) const {
  double sum = 0;
  for (const CountedPart& row : rows) sum += operations_of(row, seq, mask);
  return sum;
}

double CountedModel::backward_operations(double seq, Mask mask) const {
  double sum = 0;
  for (const CountedPart& row : rows) {
    if (!row.is_detached) sum += 2 * operations_of(row, seq, mask);
  }
  return sum;
}

double CountedModel::kv_bytes(double seq, double element, bool latent) const {
  double sum = 0;
  for (const CountedPart& row : rows) {
    if (row.part.kind != PartKind::kAttention || row.keeps_nothing) continue;
    const auto window = static_cast<double>(row.part.window);
    const double tokens =
        window > 0 && !row.keeps_all ? std::min(seq, window) : seq;
    const std::int64_t width =
        latent && row.latent > 0
            ? row.latent
            : row.part.columns[1].width + row.part.columns[2].width;
    sum += row.times * tokens * static_cast<double>(width) * element;
  }
  return sum;
}

bool CountedModel::has_latent() const {
  return std::any_of(rows.begin(), rows.end(),
                     [](const CountedPart& row) { return row.latent > 0; });
}

double CountedModel::palm_operations(double seq) const {
  double sum = 6 * active();
  for (const CountedPart& row : rows) {
    if (!row.is_detached) sum += 3 * attention_over(seq, row);
  }
  return sum;
}

double CountedModel::torchtitan_operations(double seq) const {
  double sum = 6 * active();
  const bool is_tied =
      std::any_of(rows.begin(), rows.end(),
                  [](const CountedPart& row) { return row.is_tied; });
  for (const CountedPart& row : rows) {
    const auto window = static_cast<double>(row.part.window);
    if (!row.is_detached) {
      sum += 3 * attention_over(window > 0 ? std::min(seq, window) : seq, row);
    }
    // The token table comes first
    const bool multiplies = is_tied && &row == rows.data();
    if (row.part.kind == PartKind::kTable && !multiplies) {
      sum -= 6 * row.part.parameters();
    }
  }
  return sum;
}

}  // namespace shardbook
