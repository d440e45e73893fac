#pragma once

// Keys of a config.json, for model_config.cpp: values that are read, values that
// no model here can follow, and keys that are misspelt.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shardbook::config_keys {

constexpr std::int64_t kMostOfASize = (std::int64_t{1} << 31) - 1;

/// Sets `value`, from 1 to `most`, where the key is present.
void read_size(const nlohmann::json& object, const std::string& label,
               const char* key, std::int64_t* value,
               std::int64_t most = kMostOfASize);
/// Sets `value`, from 0 to below 1, where the key is present.
void read_fraction(const nlohmann::json& object, const std::string& label,
                   const char* key, double* value);

/// A key with which a model of Hugging Face may compute something else, and the
/// values with which it computes what the models here do.
struct FixedKey {
  const char* key;
  std::vector<nlohmann::json> values;
  const char* reason;
};
/// Throws Error for another value; the key may be absent.
void check_fixed(const nlohmann::json& object, const std::string& label,
                 const FixedKey& fixed);

/// Throws Error for a key that looks like one of `read`, `fixed` or `sizes` and
/// is none of them, and for a config with none of the sizes: its author means
/// another model than the default. Other unknown keys are harmless: configs of
/// Hugging Face have many.
void check_keys(const nlohmann::json& object, const std::string& label,
                std::vector<std::string> read,
                const std::vector<FixedKey>& fixed,
                const std::vector<std::string>& sizes);

}  // namespace shardbook::config_keys
