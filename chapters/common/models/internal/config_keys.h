#pragma once

// Keys of a config.json, for its readers: values that are read, values that
// no model here can follow, and keys that are misspelt.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shardbook::config_keys {

constexpr std::int64_t kMostOfASize = (std::int64_t{1} << 31) - 1;

/// A list of the layers that are not quantized may have three million bytes.
constexpr std::size_t kMostBytes = std::size_t{8} << 20;

/// The object that a config.json is, as Python reads it: Infinity, -Infinity and
/// NaN are values, here texts. Throws Error that begins with `label` where it is
/// longer than 8 MiB, nested too deep, or no object.
nlohmann::json parse_config(const std::string& text, const std::string& label);

/// Sets `value`, from 1 to `most`, where the key is present.
void read_size(const nlohmann::json& object, const std::string& label,
               const char* key, std::int64_t* value,
               std::int64_t most = kMostOfASize);
/// Sets `value`, from 0 to below 1, where the key is present.
void read_fraction(const nlohmann::json& object, const std::string& label,
                   const char* key, double* value);
/// Sets `value`, above 0 and at most 1e30, where the key is present.
void read_positive(const nlohmann::json& object, const std::string& label,
                   const char* key, double* value);
/// Sets `value`, true or false, where the key is present.
void read_flag(const nlohmann::json& object, const std::string& label,
               const char* key, bool* value);

/// A key that may change the results of a Hugging Face model, and the values
/// with which they equal the results of the models here.
struct FixedKey {
  const char* key;
  std::vector<nlohmann::json> values;
  const char* reason;
};
/// Throws Error for another value; the key may be absent.
void check_fixed(const nlohmann::json& object, const std::string& label,
                 const FixedKey& fixed);

/// The words of a text.
std::vector<std::string> words_of(const std::string& text);

/// Those of GPT-2, and of other programs that write its format.
const std::vector<FixedKey>& fixed_of_gpt();
const std::vector<FixedKey>& fixed_of_resnet();
/// Those of the Llama family.
const std::vector<FixedKey>& fixed_of_llama();

// Keys that change neither the function nor its gradients, at any value.

/// Heads of other tasks, and rounding.
const std::vector<std::string>& harmless_in_gpt();
/// Layers that a backbone returns, and keys of language models.
const std::vector<std::string>& harmless_in_resnet();
/// Remarks in published configs, and how transformers 4.30 cut products.
const std::vector<std::string>& harmless_in_llama();
/// Keys of transformers' PretrainedConfig, 2.0 to 5.24: results that are
/// returned, names, the memory of a run, the types of weights (here --dtype), and
/// heads of other tasks.
const std::vector<std::string>& keys_without_effect();
/// Keys of GenerationConfig, which older releases wrote into config.json.
const std::vector<std::string>& keys_of_generation();

/// Throws Error for a key that is neither in `read`, `fixed`, `sizes` and
/// `harmless` nor in the two lists above: it may change the model, which the
/// message describes by `model`. Throws Error also for a config with none of the
/// sizes, whose author does not mean the default model. Keys that begin with an
/// underscore are remarks.
void check_keys(const nlohmann::json& object, const std::string& label,
                std::vector<std::string> read,
                const std::vector<FixedKey>& fixed,
                const std::vector<std::string>& sizes,
                const std::vector<std::string>& harmless, const char* model);

/// "architectures" is missing, null, or one of `names` alone.
void check_architecture(const nlohmann::json& object, const std::string& label,
                        const std::vector<std::string>& names);

}  // namespace shardbook::config_keys
