#pragma once

// Layouts, meshes and values for the tests of DTensor.

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chapters/11_dtensor/dtensor.h"
#include "chapters/11_dtensor/redistribute.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/module.h"
#include "core/ops.h"
#include "tests/core/support.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook::dtensor_test {

using namespace dtensor;

inline DeviceMesh devices_of(ProcessGroup& world,
                             const std::vector<int>& shape) {
  std::vector<std::string> axes;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    axes.push_back("axis" + std::to_string(i));
  }
  return DeviceMesh(world, Topology(axes, shape));
}

inline int ranks_of(const std::vector<int>& shape) {
  int ranks = 1;
  for (const int n : shape) ranks *= n;
  return ranks;
}

/// The results of `body(mesh, world)` on each rank of a mesh of this shape;
/// axes are called "axis0", "axis1", or as given.
template <typename Body>
auto on_mesh(const std::vector<int>& shape, Body body,
             const std::vector<std::string>& axes = {}) {
  return on_ranks(ranks_of(shape), [&](ProcessGroup& world) {
    DeviceMesh devices = axes.empty()
                             ? devices_of(world, shape)
                             : DeviceMesh(world, Topology(axes, shape));
    const Mesh mesh(devices);
    if constexpr (std::is_void_v<decltype(body(mesh, world))>) {
      body(mesh, world);
      return 0;
    } else {
      return body(mesh, world);
    }
  });
}
template <typename Body>
auto on_tp(int t, Body body) {
  return on_mesh({t}, body, {"tp"});
}

/// The error of `body` on some rank; "" if none threw.
template <typename Body>
std::string error_on_mesh(const std::vector<int>& shape, Body body,
                          const std::vector<std::string>& axes = {}) {
  return shardbook::error_of([&] { on_mesh(shape, body, axes); });
}
template <typename Body>
std::string error_on_tp(int t, Body body) {
  return error_on_mesh({t}, body, {"tp"});
}

/// Every choice of one placement per axis.
inline std::vector<Placements> all_placements(const Placements& choices,
                                              std::size_t axes) {
  std::vector<Placements> all = {{}};
  for (std::size_t axis = 0; axis < axes; ++axis) {
    std::vector<Placements> longer;
    for (const Placements& begin : all) {
      for (const Placement& next : choices) {
        longer.push_back(begin);
        longer.back().push_back(next);
      }
    }
    all = longer;
  }
  return all;
}

/// Element i of a whole tensor: multiples of 36, so that sums and their halves
/// and thirds stay exact.
inline double value_at(std::int64_t i) {
  return static_cast<double>(36 * ((i * 7) % 23 - 11));
}

inline Tensor whole_values(const Shape& shape) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < shape_numel(shape); ++i) {
    values.push_back(value_at(i));
  }
  return Tensor::from_values(values, shape);
}

/// Rows and columns of a block, cut by slices.
inline Tensor block_of(const Tensor& whole, const Block& block) {
  NoGrad no_grad;
  Tensor x = whole;
  for (std::int64_t dim = 0; dim < whole.ndim(); ++dim) {
    const auto d = static_cast<std::size_t>(dim);
    x = slice(x, dim, block.offset[d], block.offset[d] + block.shape[d]);
  }
  return x;
}

/// This rank's array of whole_values(shape): its block; each axis with partial
/// terms adds a term of its own, and these sum to zero.
inline Tensor local_values(const Shape& shape, const Placements& placements,
                           const Mesh& mesh) {
  NoGrad no_grad;
  Tensor x =
      block_of(whole_values(shape),
               local_part(shape, placements, mesh.shape(), mesh.coordinate()));
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_partial()) continue;
    const std::int64_t n = mesh.shape()[axis];
    const std::int64_t c = mesh.coordinate()[axis];
    // Terms x/n + 72 c - 36 (n - 1): the last two have the sum zero
    const bool is_sum = placements[axis].op == PartialOp::kSum;
    const double extra = static_cast<double>(72 * c - 36 * (n - 1));
    switch (placements[axis].op) {
      case PartialOp::kMax:
        x = c == 1 % n ? x : add_scalar(x, -1.0 - static_cast<double>(c));
        break;
      case PartialOp::kMin:
        x = c == 1 % n ? x : add_scalar(x, 1.0 + static_cast<double>(c));
        break;
      default:
        x = add_scalar(is_sum ? scale(x, 1.0 / static_cast<double>(n)) : x,
                       extra);
    }
  }
  return x.clone();
}

/// The calls since `first` as text: "all_gather 12".
inline std::string log_since(const ProcessGroup& world, std::size_t first) {
  std::string log;
  const auto& records = world.records();
  for (std::size_t i = first; i < records.size(); ++i) {
    log += std::string(log.empty() ? "" : ", ") + comm_op_name(records[i].op) +
           " " + records[i].group + " " + std::to_string(records[i].numel);
  }
  return log;
}

inline std::string text_of(const std::vector<Call>& calls, const Mesh& mesh) {
  std::string log;
  for (const Call& call : calls) {
    log += std::string(log.empty() ? "" : ", ") + comm_op_name(call.op) + " " +
           mesh.group(call.axis).name() + " " + std::to_string(call.numel);
  }
  return log;
}

/// All messages of all ranks.
inline std::string joined(const std::vector<std::string>& messages) {
  std::string all;
  for (const std::string& message : messages) all += message;
  return all;
}

inline double error_between(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() ? max_abs_difference(a, b) : 1e300;
}

inline Shape to_shape(const std::vector<int>& sizes) {
  return Shape(sizes.begin(), sizes.end());
}

}  // namespace shardbook::dtensor_test
