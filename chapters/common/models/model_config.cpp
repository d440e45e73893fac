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
#include "chapters/common/models/models.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook {
namespace {

using nlohmann::json;

ModelConfig resnet_config(const std::vector<std::int64_t>& depths,
                          bool bottleneck) {
  ModelConfig config;
  config.type = "resnet";
  config.depths = depths;
  config.bottleneck = bottleneck;
  return config;
}

const std::map<std::string, ModelConfig>& presets() {
  static const std::map<std::string, ModelConfig> kPresets = {
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
  return kPresets;
}

void read_size(const json& object, const std::string& label, const char* key,
               std::int64_t* value) {
  if (!object.contains(key)) return;
  SB_CHECK(object[key].is_number_integer() && object[key] > 0 &&
               object[key] < (std::int64_t{1} << 31),
           label, ": \"", key, "\" is ", json_file::shown(object[key]),
           "; give a positive integer");
  *value = object[key].get<std::int64_t>();
}

void read_fraction(const json& object, const std::string& label,
                   const char* key, double* value) {
  if (!object.contains(key)) return;
  SB_CHECK(object[key].is_number() && object[key] >= 0 && object[key] < 1,
           label, ": \"", key, "\" is ", json_file::shown(object[key]),
           "; give a number from 0 to below 1");
  *value = object[key].get<double>();
}

// Larger than any that fits; keeps products of sizes below 2^63.
constexpr std::int64_t kMaxResNetSize = 1 << 16;

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
  read_size(object, label, "num_labels", &config.num_labels);
  SB_CHECK(config.width <= kMaxResNetSize &&
               config.num_labels <= (std::int64_t{1} << 24),
           label, ": \"embedding_size\" ", config.width, " and \"num_labels\" ",
           config.num_labels, "; give at most ", kMaxResNetSize, " and ",
           std::int64_t{1} << 24);
  return config;
}

}  // namespace

ModelConfig ModelConfig::read(const std::string& name_or_file) {
  const auto preset = presets().find(name_or_file);
  if (preset != presets().end()) return preset->second;
  // The text of a config itself, from programs that make models
  if (name_or_file.rfind('{', 0) == 0) {
    return from_json(name_or_file, "--model");
  }
  const std::string end = ".json";
  std::string names;
  for (const auto& [name, config] : presets()) names += name + ", ";
  SB_CHECK(name_or_file.size() > end.size() &&
               name_or_file.compare(name_or_file.size() - end.size(),
                                    end.size(), end) == 0,
           "--model ", name_or_file, ": give one of ", names,
           "or a config FILE.json of GPT-2 or ResNet");
  std::ifstream file(name_or_file, std::ios::binary);
  SB_CHECK(file && !std::filesystem::is_directory(name_or_file), "--model ",
           name_or_file, ": the file cannot be read");
  const std::string text((std::istreambuf_iterator<char>(file)),
                         std::istreambuf_iterator<char>());
  return from_json(text, "--model " + name_or_file);
}

ModelConfig ModelConfig::from_json(const std::string& text,
                                   const std::string& label) {
  const std::string problem = utf8_problem(text);
  SB_CHECK(problem.empty(), label, ": ", problem);
  SB_CHECK(text.size() < (1 << 20), label, ": longer than 1 MiB");
  json_file::check_depth(text, label);
  json object;
  try {
    object = json::parse(text);
  } catch (const json::parse_error& error) {
    SB_FAIL(label, ": not JSON (byte ", error.byte, ")");
  } catch (const json::out_of_range&) {
    SB_FAIL(label, ": a number is too large; give numbers below 1.8e308");
  }
  SB_CHECK(object.is_object(), label, ": not a JSON object");
  ModelConfig config;
  if (object.contains("model_type")) {
    SB_CHECK(object["model_type"] == "gpt2" || object["model_type"] == "mlp" ||
                 object["model_type"] == "resnet",
             label, ": \"model_type\" is ",
             json_file::shown(object["model_type"]),
             "; give \"gpt2\", \"mlp\" or \"resnet\"");
    if (object["model_type"] == "resnet") {
      return resnet_from_json(object, label);
    }
    config.type = object["model_type"].get<std::string>();
  }
  if (object.contains("n_ctx")) {
    read_size(object, label, "n_ctx", &config.n_positions);
  }
  read_size(object, label, "vocab_size", &config.vocab_size);
  read_size(object, label, "n_positions", &config.n_positions);
  read_size(object, label, "n_embd", &config.n_embd);
  read_size(object, label, "n_layer", &config.n_layer);
  read_size(object, label, "n_head", &config.n_head);
  read_fraction(object, label, "layer_norm_epsilon",
                &config.layer_norm_epsilon);
  for (const char* key : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) {
    double ignored = 0;
    read_fraction(object, label, key, &ignored);
  }
  if (object.contains("activation_function")) {
    const json& activation = object["activation_function"];
    SB_CHECK(activation == "gelu_new" || activation == "gelu_pytorch_tanh",
             label, ": \"activation_function\" is ",
             json_file::shown(activation), "; give \"gelu_new\"");
  }
  if (object.contains("n_inner") && !object["n_inner"].is_null()) {
    SB_CHECK(object["n_inner"] == 4 * config.n_embd, label, ": \"n_inner\" is ",
             json_file::shown(object["n_inner"]), "; give null or 4 * n_embd");
  }
  SB_CHECK(config.n_embd % config.n_head == 0, label, ": n_embd ",
           config.n_embd, " is not a multiple of n_head ", config.n_head);
  return config;
}

std::string ModelConfig::to_json() const {
  if (is_image()) {
    return json{{"model_type", type},
                {"architectures", {"ResNetForImageClassification"}},
                {"depths", depths},
                {"layer_type", bottleneck ? "bottleneck" : "basic"},
                {"embedding_size", width},
                {"num_labels", num_labels}}
        .dump();
  }
  json object = {
      {"model_type", type},
      {"architectures", {type == "gpt2" ? "GPT2LMHeadModel" : "MlpModel"}},
      {"vocab_size", vocab_size},
      {"n_positions", n_positions},
      {"n_embd", n_embd},
      {"n_layer", n_layer},
      {"n_head", n_head},
      {"n_inner", nullptr},
      {"activation_function", "gelu_new"},
      {"layer_norm_epsilon", layer_norm_epsilon},
      {"attn_pdrop", dropout},
      {"embd_pdrop", dropout},
      {"resid_pdrop", dropout},
      {"tie_word_embeddings", true},
      // Bytes have no token that begins or ends a text.
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr}};
  return object.dump();
}

}  // namespace shardbook
