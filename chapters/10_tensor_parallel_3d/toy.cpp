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

#include <string>

#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "comm/launch.h"
#include "core/context.h"

using namespace shardbook;

namespace {

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
  const std::string line = fmt::format(
      "rank {} ({}, {}, {})  X {}  W {}  Y {}  sum {:.0f}", world.rank(), at.i,
      at.j, at.k, text(x), text(w), text(y), sum(y).item());
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank == world.rank()) fmt::print("{}\n", line);
    world.barrier();
  }
}

/// Returns whether the output in parts is that of one device.
bool multiply(ProcessGroup& world) {
  // 1. A cube of ranks
  DeviceMesh mesh(world, cube::cube_of(2));
  const cube::Cube cube = cube::cube_on(mesh);
  // 2. The MLP on one device, and this rank's parts of it
  ModelConfig config;
  config.n_embd = 256;
  config.gelu = GeluForm::kErf;
  config.dropout = 0.1;
  InitOptions init;
  init.dtype = DType::kF64;
  GptMlp whole("mlp", config, init);
  GptMlp mlp("mlp", config, init, cube::layers(cube));
  std::string lines;
  const auto watch = [&lines](const std::string& name, Module& layer) {
    lines += fmt::format("Weight of the {} linear layer: {}\n", name,
                         shape_text(layer.parameters()[0].shape()));
    layer.add_forward_hook([&lines, name](Module&, Tensors& y) {
      lines += fmt::format("Output of the {} linear layer: {}\n", name,
                           shape_text(y[0].shape()));
    });
  };
  watch("first", *mlp.c_fc);
  watch("second", *mlp.c_proj);
  // 3. Cut the input: rows among the ranks of a weight group, then of an input
  // group; columns among those of an output group. Two linear layers return to
  // this layout
  const Tensor input = Tensor::empty({16, 256}, {DType::kF64, Device()});
  fill_normal(input, /*seed=*/0, /*stream=*/0, 0, 1);
  const cube::Roles& roles = cube.straight;
  const Shards own = {{0, roles.weight->rank(), 2},
                      {0, roles.input->rank(), 2},
                      {1, roles.output->rank(), 2}};
  const Tensor x = with_layout(take_part(input, own), cube::Layout::kStraight);
  lines += "Input: " + shape_text(x.shape()) + "\n";
  // 4. Forward, on one device as well. Dropout draws for each element by its
  // place in the whole output, so both draw the same
  const Tensor expected = take_part(whole(input), own);
  RankContext::current().random = {};
  const Tensor y = mlp(x);
  // 5. Print what rank 0 has, and whether all ranks have what one device has
  const Tensor worst =
      Tensor::full({1}, max_abs_difference(y, expected), x.options());
  world.all_reduce(worst, ReduceOp::kMax).wait();
  const bool is_equal = worst.item() < 1e-12;
  if (world.rank() == 0) {
    fmt::print("{}Blocks of all ranks and one device's: {}\n", lines,
               is_equal ? "equal" : "DIFFERENT");
  }
  return is_equal;
}

}  // namespace

int main() {
  bool equal = true;
  run_ranks(8, [&](ProcessGroup& world) {
    multiply_numbers(world);
    const bool is_equal = multiply(world);
    if (world.rank() == 0) equal = is_equal;
  });
  return equal ? 0 : 1;
}
