#pragma once

// Cubes of ranks for tests, and layers compared with one device.

#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "chapters/common/run/program.h"
#include "core/marks.h"
#include "tests/chapters/08_tensor_parallel_2d/summa_support.h"
#include "tests/support/errors.h"

namespace shardbook::cube_test {

using cube::Cube;
using cube::Layout;
using summa_test::calls;
using summa_test::Calls;
using summa_test::difference;
using summa_test::drawn;
using summa_test::drawn_ids;
using summa_test::elements_sent;
using summa_test::expect_all;
using summa_test::expect_calls;
using summa_test::leaf;

/// The results of `body(cube, world)` on each rank of a cube of side l.
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

/// Trains on a cube of side l, and compares with one device.
inline Report trained_on_cube(Options options, int l, bool keep_gathered = true,
                              const Passes& passes = {}) {
  options.world_size = l * l * l;
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, cube::cube_of(l));
    cube::Cube place = cube::cube_on(mesh);
    place.keep_gathered = keep_gathered;
    cube::CubeStrategy strategy(options, place, world, passes);
    run.train(options, strategy);
  };
  chapter.reference = [&](const Options& options) {
    return train_one_device(options, passes.micro_batches);
  };
  return run_and_compare(options, chapter);
}

/// The error that `body(cube)` causes on a cube of side 2.
template <typename Body>
std::string error_on_cube(Body body) {
  return error_of([&] {
    on_cube(2, [&](const Cube& cube, ProcessGroup&) { return body(cube); });
  });
}

/// How a tensor lies on the cube, if straight or (swapped) after a linear
/// layer.
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

inline Tensor part_of(const Tensor& whole, const Input& input,
                      const Cube& cube) {
  return part_of(whole, input.lies, cube, input.layout);
}

inline double difference(const Layer& layer, int l, DType dtype,
                         bool keep_gathered = true) {
  return summa_test::largest_of(on_cube(
      l,
      [&](const Cube& cube, ProcessGroup&) {
        return difference(layer, cube, dtype);
      },
      keep_gathered));
}

}  // namespace shardbook::cube_test
