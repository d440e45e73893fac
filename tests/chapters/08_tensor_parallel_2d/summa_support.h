#pragma once

// Squares of ranks for tests, and layers compared with one device.

#include <gtest/gtest.h>
#include <algorithm>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "core/autograd.h"
#include "tests/support/larger.h"
#include "tests/support/on_ranks.h"

namespace shardbook::summa_test {

using summa::Grid;

/// Sides and depths; a depth of 1 is the plain square.
struct Sizes {
  int q = 1, d = 1;
};

inline Topology topology_of(const Sizes& sizes) {
  if (sizes.d == 1) return summa::square(sizes.q);
  return Topology({"dep", "col", "row"}, {sizes.d, sizes.q, sizes.q});
}

/// The results of `body(grid, world)` on each rank of the grid.
template <typename Body>
auto on_grid(const Sizes& sizes, Body body) {
  return on_ranks(sizes.d * sizes.q * sizes.q, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, topology_of(sizes));
    const Grid grid = summa::grid_of(mesh);
    world.clear_records();
    return body(grid, world);
  });
}

inline void expect_all(const std::vector<int>& conditions) {
  for (const int each : conditions) EXPECT_TRUE(each);
}

/// Standard normal values, the same on every rank, different for each stream.
inline Tensor drawn(const Shape& shape, DType dtype, std::uint64_t stream) {
  const Tensor x = Tensor::empty(shape, {dtype, Device()});
  fill_normal(x, 3, stream, 0, 1);
  return x;
}

/// Numbers 0 .. below - 1 without a pattern.
inline Tensor drawn_ids(const Shape& shape, std::int64_t below) {
  const Tensor ids = Tensor::empty(shape, {DType::kI64, Device()});
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    ids.data<std::int64_t>()[i] = (i * i * 7 + 5 * i + 3) % below;
  }
  return ids;
}

/// The same, but the first half of the samples and every third other token are
/// ignored: on every grid some rank has nothing to count.
inline Tensor uneven_targets(const Shape& shape, std::int64_t below) {
  const Tensor targets = drawn_ids(shape, below);
  for (std::int64_t i = 0; i < targets.numel(); ++i) {
    if (i < targets.numel() / 2 || i % 3 == 0) {
      targets.data<std::int64_t>()[i] = -100;
    }
  }
  return targets;
}

/// How a tensor lies on the grid.
enum class Lies { kBlock, kMatrix, kVector, kTable, kRows, kWhole };

inline Tensor part_of(const Tensor& whole, Lies setup, const Grid& grid) {
  const NoGrad no_grad;
  switch (setup) {
    case Lies::kBlock:
      return summa::own_block(whole, grid).clone();
    case Lies::kMatrix:
      return take_part(whole, summa::matrix_part(grid.place()));
    case Lies::kVector:
      return take_part(whole, summa::vector_part(grid.place()));
    case Lies::kTable:
      return take_part(whole, summa::vector_part(grid.place(), 1));
    case Lies::kRows:
      return summa::own_rows(whole, grid).clone();
    default:
      return whole.clone();
  }
}

struct Input {
  Shape shape;
  Lies lies = Lies::kBlock;
};

/// A layer on one device and on a grid.
struct Layer {
  std::vector<Input> inputs;
  Lies output = Lies::kBlock;
  std::function<Tensor(const Tensors& inputs)> whole;
  std::function<Tensor(const Tensors& inputs, const Grid& grid)> split;
};

inline Tensor part_of(const Tensor& whole, const Input& input,
                      const Grid& grid) {
  return part_of(whole, input.lies, grid);
}

/// The largest difference between the rank's parts of one device's output and
/// gradients and the distributed layer's. `Place` is a grid or a cube.
template <typename LayerOf, typename Place>
double difference(const LayerOf& layer, const Place& place, DType dtype) {
  Tensors whole, parts;
  for (std::size_t i = 0; i < layer.inputs.size(); ++i) {
    whole.push_back(drawn(layer.inputs[i].shape, dtype, i + 1));
    parts.push_back(part_of(whole[i], layer.inputs[i], place));
    parts[i].set_requires_grad();
    whole[i].set_requires_grad();
  }
  const Tensor y = layer.whole(whole);
  const Tensor own = layer.split(parts, place);
  const Tensor dy = drawn(y.shape(), dtype, 99);
  autograd::backward({y}, {dy});
  autograd::backward({own}, {part_of(dy, layer.output, place)});
  double largest = max_abs_difference(own.detach(),
                                      part_of(y.detach(), layer.output, place));
  for (std::size_t i = 0; i < whole.size(); ++i) {
    largest = larger(
        largest,
        max_abs_difference(parts[i].grad(),
                           part_of(whole[i].grad(), layer.inputs[i], place)));
  }
  return largest;
}

inline double largest_of(const std::vector<double>& all) {
  double largest = 0;
  for (const double each : all) largest = larger(largest, each);
  return largest;
}

/// The largest difference over the ranks of a grid.
inline double difference(const Layer& layer, const Sizes& sizes, DType dtype) {
  return largest_of(on_grid(sizes, [&](const Grid& grid, ProcessGroup&) {
    return difference(layer, grid, dtype);
  }));
}

// Sums of a few hundred numbers of size one, in another order.
constexpr double kSameSumF64 = 1e-12, kSameSumF32 = 2e-4;

/// [BIT] The forward of a linear adds in one device's order.
inline void expect_linear_bits(const Sizes& sizes) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    expect_all(on_grid(sizes, [&](const Grid& grid, ProcessGroup&) {
      const Tensor x = drawn({8, 6, 8}, dtype, 1), w = drawn({8, 12}, dtype, 2);
      const Tensor b = drawn({12}, dtype, 3);
      const Tensor y = summa::linear(part_of(x, Lies::kBlock, grid),
                                     part_of(w, Lies::kMatrix, grid),
                                     part_of(b, Lies::kVector, grid), grid);
      return bitwise_equal(y, part_of(linear(x, w, b), Lies::kBlock, grid));
    }));
  }
}

inline void expect_one_device(const Layer& layer, const Sizes& sizes) {
  SCOPED_TRACE("q = " + std::to_string(sizes.q) +
               ", d = " + std::to_string(sizes.d));
  EXPECT_LT(difference(layer, sizes, DType::kF64), kSameSumF64);
  EXPECT_LT(difference(layer, sizes, DType::kF32), kSameSumF32);
}

/// "broadcast row 1024", ...
using Calls = std::vector<std::string>;
inline Calls calls(const ProcessGroup& world) {
  Calls texts;
  for (const CommRecord& record : world.records()) {
    texts.push_back(std::string(comm_op_name(record.op)) + " " + record.group +
                    " " + std::to_string(record.numel));
  }
  return texts;
}

/// Checks the calls of y's forward and backward; the backward's in any order,
/// since gradients of several parameters arrive in any order.
inline void expect_calls(ProcessGroup& world, const Tensor& y,
                         const Calls& forward, Calls backward) {
  EXPECT_EQ(calls(world), forward);
  world.clear_records();
  autograd::backward({y}, {Tensor::full(y.shape(), 1, y.options())});
  Calls made = calls(world);
  world.clear_records();
  std::sort(made.begin(), made.end());
  std::sort(backward.begin(), backward.end());
  EXPECT_EQ(made, backward);
}

/// This rank's part of x along `dim`, in the group.
inline Tensor chunk(const Tensor& x, std::int64_t dim,
                    const ProcessGroup& group) {
  return take_part(x, {{dim, group.rank(), group.size()}});
}

inline Tensor leaf(const Shape& shape) {
  return drawn(shape, DType::kF64, 1).set_requires_grad();
}

inline double elements_sent(const ProcessGroup& world) {
  double elements = 0;
  for (const CommRecord& record : world.records()) {
    elements += wire_elements(record);
  }
  return elements;
}

}  // namespace shardbook::summa_test
