#pragma once

// What the readers of a config's sections share.

#include <nlohmann/json.hpp>
#include <string>

#include "chapters/15_engine/deepspeed_config.h"
#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "sim/json_object.h"

namespace shardbook::engine::internal {

/// A section of the file; an empty one where the file has none.
struct Section {
  Section(json_file::JsonObject& parent, const std::string& name)
      : json(parent.find(name)),
        object(json != nullptr ? *json : empty(), parent.file(),
               parent.where(name).substr(parent.file().size() + 2),
               parent.problems()) {}
  static const json_file::Json& empty() {
    static const json_file::Json object = json_file::Json::object();
    return object;
  }

  bool is_object() const { return json != nullptr && json->is_object(); }

  const json_file::Json* json;
  json_file::JsonObject object;
};

std::string lower_case(std::string text);

void read_optimizer(json_file::JsonObject& root, DeepSpeedConfig& config);
void read_scheduler(json_file::JsonObject& root, DeepSpeedConfig& config);
/// Refuses keys of /optimizer/params and /scheduler/params (`parameters`, as
/// SortedKeys has them) that DeepSpeed's class for this config does not have.
void check_parameters(json_file::JsonObject& root,
                      const std::vector<std::string>& parameters,
                      const DeepSpeedConfig& config);

}  // namespace shardbook::engine::internal
