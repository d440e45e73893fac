#pragma once

// The values of a config, compared as JSON.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "chapters/15_engine/deepspeed_config.h"

namespace shardbook::engine {

/// Each key of the text has its value in the config as it is written.
inline void expect_values(const DeepSpeedConfig& config,
                          const std::string& text) {
  using nlohmann::json;
  const json kept = json::parse(config.to_json());
  const json given = json::parse(text).flatten();
  for (const auto& [path, value] : given.items()) {
    const json::json_pointer at(path);
    if (at.back()[0] == '_') continue;
    ASSERT_TRUE(kept.contains(at)) << path;
    EXPECT_EQ(kept[at], value) << path;
  }
}

}  // namespace shardbook::engine
