// Colossal-AI's example of 2.5D tensor parallelism: an MLP 256 -> 1024 -> 256
// with exact GELU and dropout 0.1 on two squares of 2 x 2 ranks. Then a product
// of small numbers, whose weights' gradient is summed over the depth.
//
//   ./shardbook toy tensor_parallel_2p5d
//
//   x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(PARALLEL_2P5D_DEP)]
//   x = torch.chunk(x, 2, dim=0)[gpc.get_local_rank(PARALLEL_2P5D_COL)]
//   x = torch.chunk(x, 2, dim=-1)[gpc.get_local_rank(PARALLEL_2P5D_ROW)]

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/common/toy.h"

using namespace shardbook;

/// Returns whether the output in parts is that of one device.
bool multiply(ProcessGroup& world) {
  // 1. Two squares of ranks, one above the other
  DeviceMesh mesh(world, tesseract::squares(/*q=*/2, /*depth=*/2));
  const summa::Grid grid = summa::grid_of(mesh);
  // 2. Cut the input: rows among the squares, the rows of a square among the
  // ranks of a column, then columns among the ranks of a row
  const Shards own = {{0, grid.depth->rank(), 2},
                      {0, grid.col->rank(), 2},
                      {1, grid.row->rank(), 2}};
  return toy::run_mlp(world, summa::layers(grid), own);
}

/// Numbers from 1 on, row by row.
Tensor count_up(const Shape& shape) {
  const Tensor x = Tensor::empty(shape, {DType::kF64, Device()});
  double* at = x.data<double>();
  for (std::int64_t i = 0; i < x.numel(); ++i) at[i] = 1.0 + double(i);
  return x;
}

/// Prints the loss sum(X W), and the gradient of W's first column: that of each
/// square, and their sum. Returns whether both are those of one device.
bool add_over_depth(ProcessGroup& world) {
  DeviceMesh mesh(world, tesseract::squares(/*q=*/2, /*depth=*/2));
  const summa::Grid grid = summa::grid_of(mesh);
  // 1. Blocks of X [4, 4], two rows in each square, and of W [4, 2]
  const Tensor whole_x = count_up({4, 4}), whole_w = count_up({4, 2});
  const Tensor x = take_part(whole_x, {{0, grid.depth->rank(), 2},
                                       {0, grid.col->rank(), 2},
                                       {1, grid.row->rank(), 2}});
  const Shards block = summa::matrix_part(grid.place());
  const Tensor y = summa::multiply_ab(x, take_part(whole_w, block), grid);
  const Tensor loss = reshape(sum(y), {1});
  world.all_reduce(loss).wait();
  // 2. The gradient of this square's rows, then of all rows
  const Tensor dw =
      summa::multiply_atb(x, Tensor::full({1, 1}, 1, y.options()), grid);
  const auto rows = [](const Tensor& part) {
    return fmt::format("{:4.0f}", fmt::join(part.to_vector<double>(), ""));
  };
  const std::vector<std::string> squares = world.exchange(rows(dw));
  grid.depth->all_reduce(dw).wait();
  const std::vector<std::string> sums = world.exchange(rows(dw));
  if (world.rank() == 0) {
    fmt::print("Loss: {:.0f}\nGradient of W's first column\n", loss.item());
    fmt::print("  square 0{}{}\n", squares[0], squares[2]);
    fmt::print("  square 1{}{}\n", squares[4], squares[6]);
    fmt::print("  sum     {}{}\n", sums[0], sums[2]);
  }
  const Tensor ones = Tensor::full({4, 2}, 1, x.options());
  return loss.item() == sum(matmul(whole_x, whole_w)).item() &&
         bitwise_equal(dw, take_part(matmul(whole_x, ones, true), block));
}

int main() {
  return toy::run(8, [](ProcessGroup& world) {
    const bool is_multiplied = multiply(world);
    return add_over_depth(world) && is_multiplied;
  });
}
