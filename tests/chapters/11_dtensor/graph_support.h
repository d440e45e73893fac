#pragma once

// Random graphs of operations, as plain computation and on DTensors.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "chapters/11_dtensor/dtensor_ops.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"

namespace shardbook::dtensor_test {

inline constexpr double kTolerance = 1e-10;  // f64, values near 1, sums of tens

inline double error_of(const Tensor& got, const Tensor& expected) {
  if (got.shape() != expected.shape()) return 1e300;
  const auto a = got.to_vector<double>();
  const auto b = expected.to_vector<double>();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i]) < 1e100)) return 1e300;
    worst =
        std::max(worst, std::abs(a[i] - b[i]) / std::max(1.0, std::abs(b[i])));
  }
  return worst;
}

/// Draws the same graph for the same seed.
class Draw {
 public:
  Draw(unsigned seed, std::size_t axes) : random_(seed), axes_(axes) {}

  std::size_t below(std::size_t n) {
    return static_cast<std::size_t>(random_() % n);
  }
  /// One of the choices for each axis of the mesh.
  Placements placements(const Placements& choices) {
    Placements drawn;
    for (std::size_t i = 0; i < axes_; ++i) {
      drawn.push_back(choices[below(choices.size())]);
    }
    return drawn;
  }

 private:
  std::mt19937 random_;
  std::size_t axes_;
};

/// One operation: its kind, its operands among the values, and a layout.
struct Step {
  int kind;
  std::size_t a, b;
  Placements placements;
};

struct Leaf {
  Shape shape;
  Placements placements;
};

inline Tensor leaf_values(std::size_t index, const Shape& shape) {
  const Tensor x = Tensor::empty(shape, {DType::kF64, Device()});
  fill_normal(x, 3, index, 0, 1);
  return x;
}

/// One program for both kinds of tensors: these are all that differs.
struct Plain {
  using T = Tensor;
  static T redistribute(const T& x, const Placements&) { return x; }
};
struct Distributed {
  using T = DTensor;
  static T redistribute(const T& x, const Placements& to) {
    // S -> P(avg) does not exist
    Placements open = to;
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (to[i] == partial(PartialOp::kAvg)) open[i] = replicate();
    }
    return x.redistribute(open).redistribute(to);
  }
};

/// A term of `whole` on this rank, whose sum (or mean) over the axis is it.
inline Tensor spread(const Tensor& whole, const Leaf& leaf, const Mesh& mesh) {
  NoGrad no_grad;
  Tensor x = block_of(whole, local_part(leaf.shape, leaf.placements,
                                        mesh.shape(), mesh.coordinate()));
  for (std::size_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (!leaf.placements[axis].is_partial()) continue;
    const auto n = static_cast<double>(mesh.shape()[axis]);
    const auto c = static_cast<double>(mesh.coordinate()[axis]);
    const bool is_sum = leaf.placements[axis].op == PartialOp::kSum;
    x = add_scalar(is_sum ? scale(x, 1 / n) : x, c - (n - 1) / 2);
  }
  return x.clone();
}

/// The leaves on this rank: arrays that need gradients, and DTensors of them.
struct Leaves {
  Tensors locals;
  std::vector<DTensor> tensors;

  Leaves(const std::vector<Leaf>& leaves, const Mesh& mesh) {
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const Leaf& leaf = leaves[i];
      locals.push_back(spread(leaf_values(i, leaf.shape), leaf, mesh));
      locals.back().set_requires_grad();
      tensors.push_back(
          from_local(locals.back(), mesh, leaf.placements, leaf.shape));
    }
  }
};

struct PlainRun {
  double loss = 0;
  Tensors gradients;
};

/// Which of loss and gradients differ from plain computation: "" for none.
inline std::string differences(const std::vector<Leaf>& leaves,
                               const Tensors& locals, const Tensor& loss,
                               const PlainRun& expected, const Mesh& mesh) {
  std::string wrong;
  if (!(std::abs(loss.item() - expected.loss) <=
        kTolerance * std::max(1.0, std::abs(expected.loss)))) {
    wrong += "loss ";
  }
  for (std::size_t i = 0; i < locals.size(); ++i) {
    const Block block =
        local_part(leaves[i].shape, normalized(leaves[i].placements),
                   mesh.shape(), mesh.coordinate());
    const Tensor right = block_of(expected.gradients[i], block);
    const Tensor got =
        locals[i].grad().defined() ? locals[i].grad() : right.zeros_like();
    if (error_of(got, right) > kTolerance) {
      wrong += "gradient of leaf " + std::to_string(i) + " ";
    }
  }
  return wrong;
}

}  // namespace shardbook::dtensor_test
