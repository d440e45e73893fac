// Two examples of 3D tensor parallelism on 2 x 2 x 2 ranks.
//
//   ./shardbook toy tensor_parallel_3d
//
// 1. One product X W with numbers: X and W are both the 4 x 4 matrix 1, 2, ..,
// 16. 2. Colossal-AI's example: an MLP 256 -> 1024 -> 256 with exact GELU and
// dropout 0.1:
//
//   x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(PARALLEL_3D_WEIGHT)]
//   x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(PARALLEL_3D_INPUT)]
//   x = torch.chunk(x, 2, dim=-1)[gpc.get_local_rank(PARALLEL_3D_OUTPUT)]

#include <fmt/format.h>

#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "chapters/common/toy.h"

using namespace shardbook;

/// Joins the parts of a group's ranks, one below the other.
Tensor gathered(const Tensor& part, ProcessGroup& group) {
  const Tensor all = Tensor::empty({group.size() * part.size(0), part.size(1)},
                                   part.options());
  group.all_gather(all, part).wait();
  return all;
}

/// One product: prints each rank's parts, and the sum of its part of Y.
void multiply_numbers(ProcessGroup& world) {
  DeviceMesh mesh(world, cube::cube_of(2));
  const cube::Cube cube = cube::cube_on(mesh);
  const cube::Roles& roles = cube.straight;
  const Tensor numbers = Tensor::empty({4, 4}, {DType::kF64, Device()});
  for (int n = 0; n < 16; ++n) numbers.data<double>()[n] = n + 1;
  const cube::Place& at = cube.place;
  // Rows (i, j), columns k; rows (k, i), columns j
  const Tensor x = take_part(numbers, {{0, 2 * at.i + at.j, 4}, {1, at.k, 2}});
  const Tensor w = take_part(numbers, {{0, 2 * at.k + at.i, 4}, {1, at.j, 2}});
  const Tensor terms =
      matmul(gathered(x, *roles.input), gathered(w, *roles.weight));
  const Tensor y = Tensor::empty({1, 2}, x.options());
  roles.output->reduce_scatter(y, terms).wait();

  const auto text = [](const Tensor& part) {
    const double* values = part.data<double>();
    return fmt::format("[{:3.0f} {:3.0f}]", values[0], values[1]);
  };
  toy::print_in_order(
      world, fmt::format("rank {} ({}, {}, {})  X {}  W {}  Y {}  sum {:.0f}\n",
                         world.rank(), at.i, at.j, at.k, text(x), text(w),
                         text(y), sum(y).item()));
}

/// Returns whether the output in parts is that of one device.
bool multiply(ProcessGroup& world) {
  // 1. A cube of ranks
  DeviceMesh mesh(world, cube::cube_of(2));
  const cube::Cube cube = cube::cube_on(mesh);
  // 2. Cut the input: rows among the ranks of a weight group, then of an input
  // group; columns among those of an output group. Two linear layers return to
  // this layout
  const cube::Roles& roles = cube.straight;
  const Shards own = {{0, roles.weight->rank(), 2},
                      {0, roles.input->rank(), 2},
                      {1, roles.output->rank(), 2}};
  return toy::run_mlp(world, cube::layers(cube), own, [](const Tensor& part) {
    return with_layout(part, cube::Layout::kStraight);
  });
}

int main() {
  return toy::run(8, [](ProcessGroup& world) {
    multiply_numbers(world);
    return multiply(world);
  });
}
