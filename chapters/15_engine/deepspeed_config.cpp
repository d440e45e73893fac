// Reading a config, with every mistake at once, and writing it.

#include "chapters/15_engine/deepspeed_config.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "chapters/common/models/data.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::engine {
namespace {

using json_file::Json;
using json_file::JsonObject;

constexpr std::size_t kMostProblems = 20;

/// A message for each mistake; of very many, the first ones.
void refuse(std::vector<std::string> problems, const std::string& label) {
  if (problems.empty()) return;
  std::string all;
  for (std::size_t i = 0; i < std::min(problems.size(), kMostProblems); ++i) {
    all += (i > 0 ? "\n" : "") + problems[i];
  }
  if (problems.size() > kMostProblems) {
    all += "\n" + label + ": " +
           std::to_string(problems.size() - kMostProblems) +
           " more mistakes like these";
  }
  SB_FAIL(all);
}

/// The path that a message is about.
std::string path_of(const std::string& problem, const std::string& label) {
  const std::string rest = problem.substr(label.size() + 2);
  return rest.substr(0, rest.find(": "));
}

/// Values that DeepSpeed's defaults replace.
void remark_defaults(const std::vector<std::string>& paths,
                     DeepSpeedConfig& config) {
  if (paths.empty()) return;
  const Json written = Json::parse(config.to_json());
  for (const std::string& path : paths) {
    const Json::json_pointer at(path);
    config.remarks.push_back(
        path + " \"auto\": " +
        (written.contains(at) ? json_file::shown(written[at]) + ", " : "") +
        "DeepSpeed's default");
  }
}

/// Removes values that turned out to have no effect.
void keep_acting(DeepSpeedConfig& config) {
  const auto is_idle = [&](const std::string& path) {
    const auto& remarks = config.remarks;
    return std::any_of(remarks.begin(), remarks.end(), [&](const auto& each) {
      const std::size_t end = each.find(": has no effect here");
      return end != std::string::npos &&
             (path + "/").rfind(each.substr(0, end) + "/", 0) == 0;
    });
  };
  config.acts.erase(
      std::remove_if(config.acts.begin(), config.acts.end(), is_idle),
      config.acts.end());
}

}  // namespace

DeepSpeedConfig DeepSpeedConfig::parse(const std::string& text,
                                       const std::string& label) {
  const std::string problem = utf8_problem(text);
  SB_CHECK(problem.empty(), label, ": ", problem);
  SB_CHECK(text.size() < (1 << 20), label, ": longer than 1 MiB");
  const Json json = json_file::parse_json(json_file::plain_json(text), label);
  internal::SortedKeys keys = internal::sort_keys(json, label);
  std::vector<std::string> problems = std::move(keys.problems);
  JsonObject root(keys.acting, label, "", &problems);
  DeepSpeedConfig config;
  config.label = label;
  config.acts = std::move(keys.acts);
  config.remarks = std::move(keys.no_effect);
  internal::read_keys(root, keys.parameters, config);

  // Rules need all values
  std::vector<std::string> doubtful = std::move(keys.meant);
  for (const std::string& each : problems) {
    doubtful.push_back(path_of(each, label));
  }
  for (const std::string& each : internal::broken_rules(config)) {
    const bool is_sure =
        std::none_of(doubtful.begin(), doubtful.end(), [&](const auto& path) {
          return path != "/" && each.find(path) != std::string::npos;
        });
    if (is_sure) problems.push_back(each);
  }
  refuse(std::move(problems), label);
  remark_defaults(keys.defaults, config);
  const auto more =
      internal::remarks_of(config, root.find("gradient_clipping") != nullptr);
  config.remarks.insert(config.remarks.end(), more.begin(), more.end());
  keep_acting(config);
  return config;
}

DeepSpeedConfig DeepSpeedConfig::read(const std::string& file) {
  const auto [text, label] =
      internal::config_text(file, "--config", "--config");
  return parse(text, label);
}

internal::ConfigText internal::config_text(const std::string& file,
                                           const std::string& option,
                                           const std::string& text_label) {
  if (file.rfind('{', 0) == 0) return {file, text_label};
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  // A folder opens like a file, but reads nothing
  text << in.rdbuf();
  SB_CHECK(in && !text.str().empty(), option, " ", file,
           ": cannot be read, or is empty; give a JSON file with DeepSpeed's "
           "keys");
  return {text.str(), file};
}

// --- A config as text, and values for "auto" ---------------------------------------

namespace {

using Ordered = nlohmann::ordered_json;

std::string text_of(const Ordered& json) {
  return json.dump(2, ' ', /*ensure_ascii=*/true) + "\n";
}

}  // namespace

std::string DeepSpeedConfig::to_json() const {
  Ordered json = Ordered::object();
  internal::write_keys(*this, json);
  return text_of(json);
}

std::string DeepSpeedConfig::explained() const {
  Ordered json = Ordered::object();
  std::string paths;
  for (const std::string& path : acts) {
    paths += (paths.empty() ? "" : ", ") + path;
  }
  json["_acts"] = paths;
  for (std::size_t i = 0; i < remarks.size(); ++i) {
    json["_remark " + std::to_string(i + 1)] = remarks[i];
  }
  internal::write_keys(*this, json);
  return text_of(json);
}

FilledConfig fill_auto(const std::string& text, const std::string& label,
                       const AutoValues& values) {
  json_file::Json json =
      json_file::parse_json(json_file::plain_json(text), label);
  FilledConfig filled;
  for (const auto& [path, value] : values) {
    const json_file::Json::json_pointer at(path);
    if (!json.contains(at) || json[at] != "auto") continue;
    if (value.json.empty()) {
      json[at.parent_pointer()].erase(at.back());
      continue;
    }
    json[at] =
        json_file::parse_json(value.json, label + ": the value of " + path);
    filled.remarks.push_back(path + " \"auto\": " + json_file::shown(json[at]) +
                             ", from " + value.source);
  }
  filled.text = json.dump(2);
  return filled;
}

}  // namespace shardbook::engine
