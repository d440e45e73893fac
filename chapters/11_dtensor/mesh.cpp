#include "chapters/11_dtensor/mesh.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::dtensor {

Mesh::Mesh(DeviceMesh& devices) : Mesh(devices, devices.topology().axes()) {}

Mesh::Mesh(DeviceMesh& devices, std::vector<std::string> axes)
    : devices_(&devices), axes_(std::move(axes)) {
  SB_CHECK(!axes_.empty(), "mesh of ", devices.topology().text(),
           ": name at least one axis");
  for (const std::string& axis : axes_) {
    SB_CHECK(std::count(axes_.begin(), axes_.end(), axis) == 1, "mesh of ",
             devices.topology().text(), ": axis '", axis, "' comes twice");
    shape_.push_back(devices.size(axis));
    coordinate_.push_back(devices.coordinate(axis));
  }
}

ProcessGroup& Mesh::group(std::size_t axis) const {
  return devices_->group(axes_[axis]);
}

std::string Mesh::text() const {
  std::string line;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (i > 0) line += " x ";
    line += axes_[i] + "=" + std::to_string(shape_[i]);
  }
  return line;
}

bool Mesh::is_same(const Mesh& other) const {
  return devices_ == other.devices_ && axes_ == other.axes_;
}

}  // namespace shardbook::dtensor
