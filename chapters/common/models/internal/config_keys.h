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

/// Throws Error for a key that looks like one of `read`, `fixed` or `sizes` and
/// is none of them, and for a config with none of the sizes: its author does
/// not mean the default model. Other unknown keys are harmless: configs of
/// Hugging Face have many.
void check_keys(const nlohmann::json& object, const std::string& label,
                std::vector<std::string> read,
                const std::vector<FixedKey>& fixed,
                const std::vector<std::string>& sizes);

}  // namespace shardbook::config_keys
