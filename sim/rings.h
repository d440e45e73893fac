#pragma once

// Rings over a mesh of links: they bound collectives on machines without a
// switch.

#include <vector>

#include "sim/cluster.h"

namespace shardbook::sim {

/// The largest number of rings through all of `devices` that can run at the
/// same time, with each direction of each link in at most one ring. A closed
/// round of three or more devices gives two rings, one per direction; two
/// devices give one ring per link. Where the links among three or more
/// `devices` do not close a round, rings may also pass through devices outside,
/// as NCCL's do (path type NVB, src/graph/paths.cc): two links then replace
/// one. 0 if that does not help either.
///
///   0 === 1      four links, of which 0-1 and 2-3 are double:
///   |     |      one round 0-1-3-2-0, so two rings
///   2 === 3
///
/// Cost: a search over rounds, fine for the 8 to 16 devices of a node.
int num_rings(const std::vector<MeshLink>& mesh,
              const std::vector<int>& devices);

}  // namespace shardbook::sim
