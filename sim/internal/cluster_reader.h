#pragma once

// From the keys of a file to the fields of a Cluster.

#include "sim/cluster.h"
#include "sim/internal/sources.h"

namespace shardbook::sim::internal {

/// The largest cluster.
constexpr int kMaxDevices = 1 << 20;

/// Applies the file that `source` extends, then `source` itself. Throws Error
/// that names the file, the path in it, the value and what is allowed. Does not
/// check whether the parts fit together.
void read_cluster(const Source& source, Chain& chain, Cluster& cluster);

}  // namespace shardbook::sim::internal
