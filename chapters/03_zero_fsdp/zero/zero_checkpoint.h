#pragma once

// Checkpoints in shards: every rank writes what it owns, and any number of
// ranks reads it.
//
//   zero-00001-of-00004.safetensors     parts of rank 0: "exp_avg:h.0.weight"
//   zero-00002-of-00004.safetensors     ...
//
// Parts are kept under the parameter's name, with the first element and the
// whole shape in the metadata. They can be read by another number of ranks, and
// under another stage.

#include <string>

#include "chapters/03_zero_fsdp/zero/zero.h"

namespace shardbook::zero {

/// Writes this rank's file into `folder`, which must exist. Use a fresh folder
/// to keep the previous checkpoint until this one is whole. Collective.
void save_sharded(ZeroOptimizer& zero, const std::string& folder);

/// Reads this rank's parts from the files of all ranks that wrote, and goes on
/// after their last step. Throws Error that names the folder, the file or the
/// tensor when a file is missing or holds something else. Collective.
void load_sharded(ZeroOptimizer& zero, const std::string& folder);

}  // namespace shardbook::zero
