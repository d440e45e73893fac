#pragma once

// The axes of a device mesh that a DTensor lies over.
//
//   DeviceMesh devices(world, Topology({"dp", "tp"}, {2, 4}));
//   Mesh mesh(devices);                    // (dp, tp)
//   Mesh tp(devices, {"tp"});              // a submesh by name
//   Mesh nested(devices, {"tp", "dp"});    // tp cuts first, dp cuts its parts
//
// The order of the axes is the order of cuts. It is independent of the
// numbering of ranks, which the device mesh defines.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/device_mesh.h"
#include "core/tensor.h"

namespace shardbook::dtensor {

/// A handle: the device mesh must outlive it.
class Mesh {
 public:
  /// All axes, in the order of the device mesh.
  explicit Mesh(DeviceMesh& devices);
  /// Some axes, in this order. Throws Error for an axis that is not there.
  Mesh(DeviceMesh& devices, std::vector<std::string> axes);

  std::size_t ndim() const { return axes_.size(); }
  const std::vector<std::string>& axes() const { return axes_; }
  /// Ranks along each axis.
  const Shape& shape() const { return shape_; }
  /// This rank's place along each axis.
  const std::vector<std::int64_t>& coordinate() const { return coordinate_; }
  /// The ranks that differ from this one on one axis.
  ProcessGroup& group(std::size_t axis) const;
  DeviceMesh& devices() const { return *devices_; }
  /// "tp=4 x dp=2"
  std::string text() const;
  /// The same axes of the same device mesh.
  bool is_same(const Mesh& other) const;

 private:
  DeviceMesh* devices_;
  std::vector<std::string> axes_;
  Shape shape_;
  std::vector<std::int64_t> coordinate_;
};

}  // namespace shardbook::dtensor
