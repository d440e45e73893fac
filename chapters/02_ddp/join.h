#pragma once

// Uneven inputs: ranks with different numbers of batches.
//
// Inside DistributedDataParallel::join, all ranks say before each forward
// whether they have samples. A rank that has none left answers the calls of the
// others with zeros until nobody has samples (join.cpp).

#include <cstdint>
#include <vector>

namespace shardbook::ddp {

struct JoinOptions {
  /// Divide by the world size to the end (a rank without samples counts as one
  /// with zero gradients), or by the number of ranks that still have samples.
  bool divide_by_initial_world_size = true;
  /// All ranks throw as soon as one has no more samples, for models that
  /// communicate in their forward as well (SyncBatchNorm).
  bool throw_on_early_termination = false;
};

/// The answers of all ranks before a forward.
struct JoinStatus {
  std::vector<std::int32_t> has_samples;  ///< by rank
  int num_reducing = 0;                   ///< ranks whose backward reduces

  int num_active() const;
  /// The lowest rank that has samples.
  int first_active() const;
};

}  // namespace shardbook::ddp
