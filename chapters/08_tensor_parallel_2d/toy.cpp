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
#include "chapters/common/toy.h"

using namespace shardbook;

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
  toy::print_in_order(world, line);
}

/// Returns whether the output in parts is that of one device.
bool multiply(ProcessGroup& world) {
  // 1. A square of ranks
  DeviceMesh mesh(world, summa::square(2));
  const summa::Grid grid = summa::grid_of(mesh);
  // 2. Cut the input: rows among the ranks of a column, then columns among the
  // ranks of a row
  const Shards own = {{0, grid.col->rank(), 2}, {1, grid.row->rank(), 2}};
  return toy::run_mlp(world, summa::layers(grid), own);
}

int main() {
  return toy::run(4, [](ProcessGroup& world) {
    show_terms(world);
    return multiply(world);
  });
}
