#pragma once

// Which part of a model's parameters each rank of dp x tp holds, by name.

#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "comm/topology.h"
#include "core/shards.h"

namespace shardbook::dtensor {

/// Parameters of one shape: a name, in which * is each block, and how many.
struct ParameterKind {
  std::string name;
  double count = 1;
};
std::vector<ParameterKind> parameter_kinds(const ModelConfig& config);
/// The layer of this module; a default one for tables and the last norm.
BlockPart part_named(const std::string& module, const ModelConfig& config);
/// Behind the last dot.
std::string leaf_of(const std::string& name);

/// A model's parameters on a mesh: tp cuts first, and dp cuts the rows of tp's
/// part. Rows that the ranks do not divide leave the last ones shorter parts.
struct DTensorLayout {
  ModelConfig config;
  Topology grid;              ///< of axes dp and tp
  bool dp_cuts_rows = false;  ///< FSDP
  /// tp cuts the rows of tables, too.
  bool tp_cuts_vocabulary = false;

  /// The shape of a parameter on one device.
  Shape whole(const std::string& name) const;
  /// The shape of the part on `rank`, before dp cuts it.
  Shape on_tp(const std::string& name, int rank) const;
  /// The part on `rank`.
  Shards part(const std::string& name, int rank) const;

 private:
  bool is_table(const std::string& name) const;
  Shards cuts_of_tp(const std::string& name, int rank) const;
};

}  // namespace shardbook::dtensor
