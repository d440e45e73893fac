#pragma once

// A decoder that the book does not train, by its config.json: the numbers of its
// class (counted_families.h) in this file, and the parts that follow from them.

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/counted_model.h"

namespace shardbook {

struct CountedLayer {
  std::int64_t window = 0;
  bool has_experts = false;
  bool has_indexer = false;
  bool shares_keys = false;  ///< with an earlier layer

  bool operator==(const CountedLayer& other) const = default;
};

struct CountedSizes {
  std::map<std::string, std::int64_t> numbers;
  std::vector<CountedLayer> layers;

  std::int64_t operator[](const std::string& name) const {
    return numbers.at(name);
  }
};

/// `type` is one of counted_families::types(). Throws Error that begins with
/// `label`.
CountedSizes counted_sizes(const nlohmann::json& object,
                           const std::string& label, const std::string& type);

/// Its parts. Equal layers share their rows.
std::vector<CountedPart> counted_rows(const CountedSizes& sizes);
/// A model of the block's table (block.h) with these sizes, as far as it has them.
ModelConfig nearest_config(const CountedSizes& sizes, const std::string& type);

}  // namespace shardbook
