#pragma once

// Named axes over ranks.
//
//   DeviceMesh mesh(world, Topology::megatron(2, 1, 2, 2));
//   mesh.group("tp").all_reduce(x).wait();     // my tensor-parallel peers
//   mesh.group("dp-cp").size();                // both axes together
//   mesh.coordinate("pp");                     // my stage

#include <map>
#include <memory>
#include <string>

#include "comm/process_group.h"
#include "comm/topology.h"

namespace shardbook {

/// The groups of one rank on a topology. Like a process group, a mesh belongs
/// to one rank; all ranks of `world` make the same meshes in the same order.
class DeviceMesh {
 public:
  /// Makes a group per axis, named as the axis; the group of an axis over all
  /// ranks is `world` itself. `world` must outlive the mesh and have
  /// exactly the topology's ranks. Collective.
  DeviceMesh(ProcessGroup& world, Topology topology);

  const Topology& topology() const { return topology_; }
  ProcessGroup& world() const { return world_; }
  int size(const std::string& axis) const { return topology_.size(axis); }
  /// This rank's place along an axis; equal to its rank in group(axis).
  int coordinate(const std::string& axis) const;

  /// The ranks that differ from this one on the given axis, or axes joined by
  /// '-' in any order ("dp-cp"), ascending by world rank. A group of several
  /// axes is made at its first use, which is collective over `world`.
  ProcessGroup& group(const std::string& axes);

 private:
  ProcessGroup& world_;
  Topology topology_;
  std::map<std::string, std::shared_ptr<ProcessGroup>> groups_;
};

}  // namespace shardbook
