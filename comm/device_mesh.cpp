#include "comm/device_mesh.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook {

DeviceMesh::DeviceMesh(ProcessGroup& world, Topology topology)
    : world_(world), topology_(std::move(topology)) {
  SB_CHECK(topology_.world_size() == world.size(), "device mesh ",
           topology_.text(), " needs ", topology_.world_size(),
           " ranks, and group '", world.name(), "' has ", world.size());
  for (const std::string& axis : topology_.axes()) group(axis);
}

int DeviceMesh::coordinate(const std::string& axis) const {
  return topology_.coordinate(world_.rank(), axis);
}

ProcessGroup& DeviceMesh::group(const std::string& axes) {
  // The order of the axes does not matter: the topology's order names the
  // group.
  const std::vector<std::string> wanted = split_axes(axes);
  SB_CHECK(!wanted.empty(), "device mesh ", topology_.text(),
           ": name at least one axis");
  for (const std::string& axis : wanted) {
    topology_.size(axis);  // or an Error
    SB_CHECK(std::count(wanted.begin(), wanted.end(), axis) == 1,
             "device mesh ", topology_.text(), ": a group names axis '", axis,
             "' twice");
  }
  std::string name;
  for (const std::string& axis : topology_.axes()) {
    if (std::count(wanted.begin(), wanted.end(), axis) == 0) continue;
    name += (name.empty() ? "" : "-") + axis;
  }
  std::shared_ptr<ProcessGroup>& made = groups_[name];
  if (made != nullptr) return *made;

  // All ranks together are a group already
  const auto lists = topology_.groups(wanted);
  made = lists.size() == 1
             ? std::shared_ptr<ProcessGroup>(&world_, [](ProcessGroup*) {})
             : world_.partition(lists, name);
  return *made;
}

}  // namespace shardbook
