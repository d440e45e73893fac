#pragma once

// Cubes of ranks for tests, and layers held against one device.

#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "core/marks.h"
#include "tests/chapters/08_tensor_parallel_2d/summa_support.h"
#include "tests/support/larger.h"

namespace shardbook::cube_test {

using cube::Cube;
using cube::Layout;
using summa_test::calls;
using summa_test::drawn;
using summa_test::drawn_ids;
using summa_test::elements_sent;

/// What `body(cube, world)` returns on each rank of a cube of side l.
template <typename Body>
auto on_cube(int l, Body body, bool keep_gathered = true) {
  return on_ranks(l * l * l, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, cube::cube_of(l));
    Cube cube = cube::cube_on(mesh);
    cube.keep_gathered = keep_gathered;
    world.clear_records();
    return body(cube, world);
  });
}

/// How a tensor lies on the cube, for a straight activation or (swapped) for one
/// after a linear layer.
enum class Lies {
  kBlock,
  kWeight,
  kTable,
  kColumns,
  kTableColumns,
  kRows,
  kWhole
};

inline Tensor part_of(const Tensor& whole, Lies setup, const Cube& cube,
                      Layout layout) {
  const NoGrad no_grad;
  switch (setup) {
    case Lies::kBlock:
      return cube::with_layout(cube::own_block(whole, cube, layout).clone(),
                               layout);
    case Lies::kWeight:
      return take_part(whole, cube::weight_part(cube.place, layout));
    case Lies::kTable:
      return take_part(whole, cube::table_part(cube.place));
    case Lies::kColumns:
      return take_part(whole, cube::column_part(cube.place, layout));
    case Lies::kTableColumns:
      return take_part(whole, cube::column_part(cube.place, layout, 1));
    case Lies::kRows:
      return cube::own_rows(whole, cube, layout).clone();
    default:
      return whole.clone();
  }
}

struct Input {
  Shape shape;
  Lies lies = Lies::kBlock;
  Layout layout = Layout::kStraight;
};

/// A layer on one device and on a cube.
struct Layer {
  std::vector<Input> inputs;
  Input output;  ///< without a shape
  std::function<Tensor(const Tensors& inputs)> whole;
  std::function<Tensor(const Tensors& inputs, const Cube& cube)> split;
};

/// The largest difference between the rank's parts of one device's output and
/// gradients and those of the layer in parts.
inline double difference(const Layer& layer, const Cube& cube, DType dtype) {
  Tensors whole, parts;
  for (std::size_t i = 0; i < layer.inputs.size(); ++i) {
    const Input& input = layer.inputs[i];
    whole.push_back(drawn(input.shape, dtype, i + 1));
    parts.push_back(part_of(whole[i], input.lies, cube, input.layout));
    parts[i].set_requires_grad();
    whole[i].set_requires_grad();
  }
  const Tensor y = layer.whole(whole);
  const Tensor own = layer.split(parts, cube);
  const Tensor dy = drawn(y.shape(), dtype, 99);
  autograd::backward({y}, {dy});
  const Input& output = layer.output;
  autograd::backward({own}, {part_of(dy, output.lies, cube, output.layout)});
  double largest = max_abs_difference(
      own.detach(), part_of(y.detach(), output.lies, cube, output.layout));
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const Input& input = layer.inputs[i];
    largest = larger(
        largest,
        max_abs_difference(parts[i].grad(), part_of(whole[i].grad(), input.lies,
                                                    cube, input.layout)));
  }
  return largest;
}

inline double difference(const Layer& layer, int l, DType dtype,
                         bool keep_gathered = true) {
  double largest = 0;
  for (const double each : on_cube(
           l,
           [&](const Cube&cube, ProcessGroup&) {
             return difference(layer, cube, dtype);
           },
           keep_gathered)) {
    largest = larger(largest, each);
  }
  return largest;
}

}  // namespace shardbook::cube_test
