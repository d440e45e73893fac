// A product of numbers on 2 x 2 ranks, and Colossal-AI's example of 2D tensor
// parallelism: an MLP 256 -> 1024 -> 256 with exact GELU and dropout 0.1.
//
//   ./shardbook toy tensor_parallel_2d
//   x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(PARALLEL_2D_COL)]
//   x = torch.chunk(x, 2, dim=-1)[gpc.get_local_rank(PARALLEL_2D_ROW)]

#include <fmt/format.h>

#include <string>

#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "comm/launch.h"
#include "core/context.h"

using namespace shardbook;

namespace {

/// Prints Y = X W for X = [1 2; 3 4] and W = [5 6; 7 8], a number per rank.
void show_terms(ProcessGroup& world) {
  DeviceMesh mesh(world, summa::square(2));
  const summa::Grid grid = summa::grid_of(mesh);
  const Tensor x = Tensor::full({1, 1}, 1 + world.rank());
  const Tensor w = Tensor::full({1, 1}, 5 + world.rank());
  std::string line = fmt::format("rank ({}, {}):", grid.i(), grid.j());
  for (int k = 0; k < grid.q(); ++k) {
    const Tensor x_k = x.clone(), w_k = w.clone();
    grid.row->broadcast(x_k, k).wait();
    grid.col->broadcast(w_k, k).wait();
    line += fmt::format(" {} x {} {}", x_k.item(), w_k.item(), "+="[k]);
  }
  line += fmt::format(" {}\n", summa::multiply_ab(x, w, grid).item());
  for (int turn = 0; turn < world.size(); ++turn) {
    if (turn == world.rank()) fmt::print("{}", line);
    world.barrier();
  }
}

/// Returns whether the output in parts is that of one device.
bool multiply(ProcessGroup& world) {
  // 1. A square of ranks
  DeviceMesh mesh(world, summa::square(2));
  const summa::Grid grid = summa::grid_of(mesh);
  // 2. The MLP on one device, and this rank's parts of it
  ModelConfig config;
  config.n_embd = 256;
  config.gelu = GeluForm::kErf;
  config.dropout = 0.1;
  InitOptions init;
  init.dtype = DType::kF64;
  GptMlp whole("mlp", config, init);
  GptMlp mlp("mlp", config, init, summa::layers(grid));
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
  // 3. Cut the input: rows among the ranks of a column, then columns among the
  // ranks of a row
  const Tensor input = Tensor::empty({16, 256}, {DType::kF64, Device()});
  fill_normal(input, /*seed=*/0, /*stream=*/0, 0, 1);
  const Shards own = {{0, grid.col->rank(), 2}, {1, grid.row->rank(), 2}};
  const Tensor x = take_part(input, own);
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
  run_ranks(4, [&](ProcessGroup& world) {
    show_terms(world);
    const bool is_equal = multiply(world);
    if (world.rank() == 0) equal = is_equal;
  });
  return equal ? 0 : 1;
}
