// Sizes of models: presets, and config.json.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/models/internal/config_keys.h"
#include "chapters/common/models/internal/llama_json.h"
#include "chapters/common/models/models.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook {
namespace {

using nlohmann::json;
using namespace config_keys;

ModelConfig resnet_config(const std::vector<std::int64_t>& depths,
                          bool bottleneck) {
  ModelConfig config;
  config.type = "resnet";
  config.depths = depths;
  config.bottleneck = bottleneck;
  return config;
}

std::map<std::string, ModelConfig> make_presets() {
  std::map<std::string, ModelConfig> presets = {
      {"mlp", {"mlp", 256, 4096, 64, 3, 1}},
      {"gpt-nano", {"gpt2", 256, 256, 64, 4, 4}},
      {"gpt-micro", {"gpt2", 256, 256, 256, 4, 8}},
      {"gpt2", {"gpt2", 50257, 1024, 768, 12, 12}},
      {"gpt2-medium", {"gpt2", 50257, 1024, 1024, 24, 16}},
      {"gpt2-large", {"gpt2", 50257, 1024, 1280, 36, 20}},
      {"gpt2-xl", {"gpt2", 50257, 1024, 1600, 48, 25}},
      // Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1
      {"gpt-1.3b", {"gpt2", 50257, 2048, 2048, 24, 16}},
      {"gpt-6.7b", {"gpt2", 50257, 2048, 4096, 32, 32}},
      {"gpt-13b", {"gpt2", 50257, 2048, 5120, 40, 40}},
      // MPT-70B's sizes: mosaicml/llm-foundry
      {"gpt-70b", {"gpt2", 50257, 2048, 8192, 80, 64}},
      {"gpt-175b", {"gpt2", 50257, 2048, 12288, 96, 96}},
      {"resnet18", resnet_config({2, 2, 2, 2}, /*bottleneck=*/false)},
      {"resnet50", resnet_config({3, 4, 6, 3}, /*bottleneck=*/true)}};
  for (const auto& [name, text] : llama_presets()) {
    presets[name] = ModelConfig::from_json(text, name);
  }
  return presets;
}

const std::map<std::string, ModelConfig>& presets() {
  static const auto kPresets = make_presets();
  return kPresets;
}

// Larger than any that fits; keeps products of sizes below 2^63.
constexpr std::int64_t kMaxResNetSize = 1 << 16;

/// Channels behind each stage.
std::vector<std::int64_t> hidden_sizes(const ModelConfig& config) {
  std::vector<std::int64_t> sizes;
  for (std::size_t stage = 0; stage < config.depths.size(); ++stage) {
    sizes.push_back((config.width << stage) * (config.bottleneck ? 4 : 1));
  }
  return sizes;
}

/// "num_labels", or the length of "id2label", which Hugging Face writes instead.
void read_labels(const json& object, const std::string& label,
                 std::int64_t* num_labels) {
  const bool is_given = object.contains("num_labels");
  read_size(object, label, "num_labels", num_labels);
  const auto names = object.find("id2label");
  if (names != object.end() && !names->is_null()) {
    SB_CHECK(names->is_object() && !names->empty(), label, ": \"id2label\" is ",
             json_file::shown(*names),
             "; give an object with a name for each label");
    const auto count = static_cast<std::int64_t>(names->size());
    SB_CHECK(!is_given || *num_labels == count, label, ": \"num_labels\" is ",
             *num_labels, ", but \"id2label\" has ", count, " labels");
    *num_labels = count;
  } else if (!is_given && object.contains("transformers_version")) {
    *num_labels = 2;  // the default there, which it does not write
  }
}

ModelConfig resnet_from_json(const json& object, const std::string& label) {
  ModelConfig config = resnet_config({2, 2, 2, 2}, /*bottleneck=*/false);
  if (object.contains("depths")) {
    const json& depths = object["depths"];
    const auto good = [](const json& depth) {
      return depth.is_number_integer() && depth > 0 && depth <= 1000;
    };
    SB_CHECK(depths.is_array() && !depths.empty() && depths.size() <= 8 &&
                 std::all_of(depths.begin(), depths.end(), good),
             label, ": \"depths\" is ", json_file::shown(depths),
             "; give a list of 1 to 8 numbers from 1 to 1000, such as "
             "[2, 2, 2, 2]");
    config.depths = depths.get<std::vector<std::int64_t>>();
  }
  if (object.contains("layer_type")) {
    const json& type = object["layer_type"];
    SB_CHECK(type == "basic" || type == "bottleneck", label,
             ": \"layer_type\" is ", json_file::shown(type),
             "; give \"basic\" or \"bottleneck\"");
    config.bottleneck = type == "bottleneck";
  }
  read_size(object, label, "embedding_size", &config.width);
  read_labels(object, label, &config.num_labels);
  SB_CHECK(config.width <= kMaxResNetSize &&
               config.num_labels <= (std::int64_t{1} << 24),
           label, ": \"embedding_size\" ", config.width, " and \"num_labels\" ",
           config.num_labels, "; give at most ", kMaxResNetSize, " and ",
           std::int64_t{1} << 24);
  for (const FixedKey& fixed : fixed_of_resnet()) {
    check_fixed(object, label, fixed);
  }
  if (config.bottleneck) {
    check_fixed(object, label,
                {"downsample_in_bottleneck",
                 {false},
                 "the 3x3 convolution of a bottleneck has the stride here"});
  }
  check_keys(
      object, label,
      {"model_type", "architectures", "layer_type", "num_labels", "id2label",
       "label2id", "hidden_sizes", "downsample_in_bottleneck"},
      fixed_of_resnet(), {"depths", "embedding_size"}, harmless_in_resnet(),
      "torchvision's ResNet");
  check_architecture(object, label,
                     {"ResNetForImageClassification", "ResNet", "ResNetModel"});
  check_fixed(object, label,
              {"hidden_sizes",
               {hidden_sizes(config)},
               "a stage is twice as wide as the one before it here"});
  return config;
}

/// A size of a GPT, and the name that all models of Hugging Face have for it.
struct SizeKey {
  const char* key;
  const char* alias;
  std::int64_t ModelConfig::*value;
  /// Larger than any that fits; keeps products of sizes below 2^63.
  std::int64_t most = kMostOfASize;
};
constexpr SizeKey kSizes[] = {
    {"n_positions", "max_position_embeddings", &ModelConfig::n_positions},
    {"n_embd", "hidden_size", &ModelConfig::n_embd, 1 << 20},
    {"n_layer", "num_hidden_layers", &ModelConfig::n_layer, 1 << 12},
    {"n_head", "num_attention_heads", &ModelConfig::n_head}};

void read_sizes(const json& object, const std::string& label,
                ModelConfig& config) {
  read_size(object, label, "vocab_size", &config.vocab_size);
  read_size(object, label, "n_ctx", &config.n_positions);
  for (const SizeKey& size : kSizes) {
    std::int64_t& value = config.*size.value;
    read_size(object, label, size.key, &value, size.most);
    std::int64_t alias = value;
    read_size(object, label, size.alias, &alias, size.most);
    SB_CHECK(!object.contains(size.key) || alias == value, label, ": \"",
             size.key, "\" is ", value, ", but \"", size.alias,
             "\", another name of it, is ", alias);
    value = alias;
  }
}

/// Two forms, each under several names.
GeluForm gelu_named(const json& name, const std::string& label) {
  for (const char* tanh :
       {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"}) {
    if (name == tanh) return GeluForm::kTanh;
  }
  SB_CHECK(name == "gelu" || name == "gelu_python", label,
           ": \"activation_function\" is ", json_file::shown(name),
           "; give \"gelu_new\" (the tanh form) or \"gelu\" (exact)");
  return GeluForm::kErf;
}

constexpr char kTypeWithExperts[] = "gpt2-with-experts";

/// The dropout of a published model's own training: ours is --dropout.
constexpr const char* kDropouts[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop",
                                     "dropout"};

ModelConfig gpt_from_json(const json& object, const std::string& label,
                          const std::string& type) {
  ModelConfig config;
  config.has_experts = type == kTypeWithExperts;
  config.type = config.has_experts ? "gpt2" : type;
  read_sizes(object, label, config);
  read_fraction(object, label, "layer_norm_epsilon",
                &config.layer_norm_epsilon);
  read_fraction(object, label, "initializer_range", &config.initializer_range);
  for (const char* key : kDropouts) {
    double unused = 0;
    read_fraction(object, label, key, &unused);
  }
  if (object.contains("activation_function")) {
    config.gelu = gelu_named(object["activation_function"], label);
  }
  if (object.contains("n_inner") && !object["n_inner"].is_null()) {
    SB_CHECK(object["n_inner"] == 4 * config.n_embd, label, ": \"n_inner\" is ",
             json_file::shown(object["n_inner"]), "; give null or 4 * n_embd");
  }
  for (const FixedKey& fixed : fixed_of_gpt()) {
    check_fixed(object, label, fixed);
  }
  std::vector<std::string> sizes;
  for (const SizeKey& size : kSizes) sizes.push_back(size.key);
  for (const SizeKey& size : kSizes) sizes.push_back(size.alias);
  sizes.push_back("n_ctx");
  std::vector<std::string> read = {"model_type",        "architectures",
                                   "vocab_size",        "n_inner",
                                   "initializer_range", "activation_function",
                                   "layer_norm_epsilon"};
  read.insert(read.end(), std::begin(kDropouts), std::end(kDropouts));
  check_keys(object, label, read, fixed_of_gpt(), sizes, harmless_in_gpt(),
             type == "mlp"
                 ? "an MLP of GPT-2's layers"
                 : "a GPT-2 with learned positions, biases and a tied output "
                   "layer");
  using Names = std::vector<std::string>;
  check_architecture(object, label,
                     config.has_experts ? Names{"Gpt2WithExperts"}
                     : type == "mlp"    ? Names{"MlpModel"}
                                     : Names{"GPT2LMHeadModel", "GPT2Model"});
  SB_CHECK(config.n_embd % config.n_head == 0, label, ": n_embd ",
           config.n_embd, " is not a multiple of n_head ", config.n_head);
  return config;
}

/// For --model: a chapter without experts would train another model.
ModelConfig without_experts(const ModelConfig& config,
                            const std::string& label) {
  SB_CHECK(!config.has_experts, label, ": \"model_type\" is \"",
           kTypeWithExperts,
           "\", and experts are options of a run; give \"gpt2\" and the "
           "options of 13_moe");
  return config;
}

}  // namespace

bool ModelConfig::is_named(const std::string& name_or_file) {
  return presets().count(name_or_file) > 0 || name_or_file.rfind('{', 0) == 0 ||
         std::filesystem::path(name_or_file).extension() == ".json";
}

ConfigText ModelConfig::text_of(const std::string& name_or_file) {
  if (presets().count(name_or_file) > 0) return {};
  // The text of a config itself, from programs that make models
  if (name_or_file.rfind('{', 0) == 0) return {name_or_file, "--model"};
  std::string names;
  for (const auto& [name, config] : presets()) names += name + ", ";
  SB_CHECK(is_named(name_or_file), "--model ", name_or_file, ": give one of ",
           names, "or the config FILE.json of a GPT-2 or ResNet or Llama");
  const std::string label = "--model " + name_or_file;
  // Opening a pipe would wait for its writer
  SB_CHECK(std::filesystem::is_regular_file(name_or_file), label,
           ": the file cannot be read");
  std::ifstream file(name_or_file, std::ios::binary);
  SB_CHECK(file, label, ": the file cannot be read");
  const auto bytes = std::min<std::uintmax_t>(
      std::filesystem::file_size(name_or_file), config_keys::kMostBytes + 1);
  std::string text(static_cast<std::size_t>(bytes), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  SB_CHECK(!text.empty(), label, ": the file is empty");
  return {text, label};
}

ModelConfig ModelConfig::read(const std::string& name_or_file) {
  const auto preset = presets().find(name_or_file);
  if (preset != presets().end()) return preset->second;
  const ConfigText config = text_of(name_or_file);
  return without_experts(from_json(config.text, config.label), config.label);
}

ModelConfig ModelConfig::from_json(const std::string& text,
                                   const std::string& label) {
  const json object = parse_config(text, label);
  const auto type = object.find("model_type");
  if (type == object.end()) return gpt_from_json(object, label, "gpt2");
  const std::vector<std::string>& llamas = llama_types();
  if (std::any_of(llamas.begin(), llamas.end(),
                  [&](const std::string& name) { return *type == name; })) {
    return llama_from_json(object, label, type->get<std::string>());
  }
  SB_CHECK(*type == "gpt2" || *type == kTypeWithExperts || *type == "mlp" ||
               *type == "resnet",
           label, ": \"model_type\" is ", json_file::shown(*type),
           "; give \"gpt2\", \"mlp\", \"resnet\" or one of the Llama family: ",
           json_file::list(llamas));
  if (*type == "resnet") return resnet_from_json(object, label);
  return gpt_from_json(object, label, type->get<std::string>());
}

std::string ModelConfig::to_json(WeightNames names) const {
  if (is_llama()) return llama_to_json(*this).dump();
  if (is_image()) {
    const bool is_theirs = names == WeightNames::kTransformers;
    return json{{"model_type", type},
                // torchvision's class has torchvision's names
                {"architectures",
                 {is_theirs ? "ResNetForImageClassification" : "ResNet"}},
                {"depths", depths},
                {"layer_type", bottleneck ? "bottleneck" : "basic"},
                {"embedding_size", width},
                {"hidden_sizes", hidden_sizes(*this)},
                {"hidden_act", "relu"},
                {"num_channels", 3},
                {"downsample_in_first_stage", false},
                {"downsample_in_bottleneck", false},
                {"num_labels", num_labels}}
        .dump();
  }
  json object = {{"model_type", type},           {"vocab_size", vocab_size},
                 {"n_positions", n_positions},   {"n_embd", n_embd},
                 {"n_layer", n_layer},           {"n_head", n_head},
                 {"architectures", {"MlpModel"}}};
  if (type == "mlp") return object.dump();
  object.update(
      {{"architectures", {"GPT2LMHeadModel"}},
       {"n_inner", nullptr},
       {"activation_function", gelu == GeluForm::kErf ? "gelu" : "gelu_new"},
       {"layer_norm_epsilon", layer_norm_epsilon},
       {"initializer_range", initializer_range},
       {"attn_pdrop", dropout},
       {"embd_pdrop", dropout},
       {"resid_pdrop", dropout},
       {"tie_word_embeddings", true},
       // Bytes have no token that begins or ends a text.
       {"bos_token_id", nullptr},
       {"eos_token_id", nullptr}});
  if (has_experts) {
    // A type that transformers does not know: as "gpt2" it would load all but
    // the experts, and go on with random MLPs
    object["model_type"] = kTypeWithExperts;
    object["architectures"] = {"Gpt2WithExperts"};
  }
  return object.dump();
}

}  // namespace shardbook
