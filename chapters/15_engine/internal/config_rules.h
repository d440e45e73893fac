#pragma once

// The file of a config, its sections, and which of its values go together.

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/15_engine/deepspeed_config.h"
#include "sim/json_object.h"

namespace shardbook::engine::internal {

/// A config, and its name in messages.
struct ConfigText {
  std::string text, label;
};
/// Reads a file, or returns a text that begins with '{' under the name
/// `text_label`. `option`, which named the file, begins the message of an Error.
ConfigText config_text(const std::string& file, const std::string& option,
                       const std::string& text_label);
/// Values for "auto" from an optimizer and the width `h` of a GPT (0: another
/// model). Sources are options of the program.
AutoValues auto_values(const OptimizerOptions& optimizer, std::int64_t h);

/// A section of the file; an empty one where the file has none.
json_file::JsonObject section(json_file::JsonObject& parent,
                              const std::string& name);
bool has_object(json_file::JsonObject& parent, const std::string& name);

std::string lower_case(std::string text);
/// Whether `text` has this word, between spaces.
bool has_word(const std::string& text, const std::string& word);

/// The largest counts and numbers of a file.
inline constexpr std::int64_t kMostCount = std::int64_t{1} << 40;
inline constexpr double kMostNumber = 1e30;

void read_optimizer(json_file::JsonObject& root, DeepSpeedConfig& config);
void read_scheduler(json_file::JsonObject& root, DeepSpeedConfig& config);
/// Refuses keys of /optimizer/params and /scheduler/params (`parameters`, as
/// SortedKeys has them) that DeepSpeed's class for this config does not have.
void check_parameters(json_file::JsonObject& root,
                      const std::vector<std::string>& parameters,
                      const DeepSpeedConfig& config);

/// Reads the keys that act. `parameters` are those of SortedKeys.
void read_keys(json_file::JsonObject& root,
               const std::vector<std::string>& parameters,
               DeepSpeedConfig& config);
/// Every key with its value, in the file's order.
void write_keys(DeepSpeedConfig config, nlohmann::ordered_json& json);
/// The values of all keys, by path, as the command line writes them.
std::map<std::string, std::string> leaf_values(const DeepSpeedConfig& config);
/// Illegal combinations: a message each, with all keys involved.
std::vector<std::string> broken_rules(const DeepSpeedConfig& config);
/// The remark on a file without gradient_clipping.
inline constexpr const char* kClippingRemark =
    "gradient_clipping is not given: 1.0, as DeepSpeed from 0.19.3 on; older "
    "versions do not clip then";
/// Where versions of DeepSpeed differ from each other or from the book.
std::vector<std::string> remarks_of(const DeepSpeedConfig& config,
                                    bool has_clipping);

}  // namespace shardbook::engine::internal
