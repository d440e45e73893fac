// Megatron-LM's examples: X A on two ranks, by rows and by columns of A, and
// initialize_model_parallel on 16.
//
//   ./shardbook toy tensor_parallel

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <utility>
#include <vector>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/07_tensor_parallel/parallel_state.h"
#include "chapters/common/toy.h"
#include "comm/launch.h"

using namespace shardbook;
using namespace shardbook::tensor_parallel;

/// Row i of a matrix; blanks below its last row.
std::string row_text(const Tensor& matrix, std::int64_t i) {
  if (i >= matrix.size(0)) return std::string(4 * matrix.size(1), ' ');
  const auto row = matrix.rows_view(i, i + 1).to_vector<double>();
  return fmt::format("{:4.0f}", fmt::join(row, ""));
}

/// Draws each rank's x and a with their product, then the result y.
void draw(const char* title, const Tensor& x, const Tensor& a, const Tensor& y,
          ProcessGroup& tp) {
  std::string text = fmt::format("  rank {}", tp.rank());
  for (std::int64_t i = 0; i < a.size(0); ++i) {
    text += fmt::format("{}{}{}{}{}{}\n", i == 0 ? "" : "        ",
                        row_text(x, i), i == 0 ? "  x" : "   ", row_text(a, i),
                        i == 0 ? "  =" : "   ", row_text(matmul(x, a), i));
  }
  if (tp.rank() == 0) fmt::print("{}\n", title);
  toy::print_in_order(tp, text);
  if (tp.rank() == 0) {
    fmt::print("  X A   {}\n        {}\n", row_text(y, 0), row_text(y, 1));
  }
}

/// Returns whether both ways give the product of one device.
bool multiply(ProcessGroup& tp) {
  const std::vector<float> numbers = {1, 2, 3, 4, 5, 6, 7, 8};
  const Tensor x = Tensor::from_values(numbers, {2, 4});
  const Tensor a = Tensor::from_values(numbers, {4, 2});
  // 1. Rows of A, columns of X: each rank has a term of a sum
  RowParallelLinear rows("A", {4, 2}, {}, tp, /*input_is_parallel=*/false);
  rows.weight.copy_from(take_part(a, {{0, tp.rank(), tp.size()}}));
  draw("Row parallel: X A = X1 A1 + X2 A2", scatter_to(x, tp), rows.weight,
       rows(x), tp);
  // 2. Columns of A: each rank has columns of the result
  ColumnParallelLinear columns("A", {4, 2}, {}, tp, /*gather_output=*/true);
  columns.weight.copy_from(take_part(a, {{1, tp.rank(), tp.size()}}));
  draw("Column parallel: X A = [X A1, X A2]", x, columns.weight, columns(x),
       tp);
  return bitwise_equal(rows(x), matmul(x, a)) &&
         bitwise_equal(columns(x), matmul(x, a));
}

/// Prints all groups for 2 tensor-parallel ranks, 4 stages and v virtual ones.
void print_groups(ProcessGroup& world, int v, int split_rank) {
  const auto own = initialize_model_parallel(world, 2, 4, v, split_rank);
  const std::pair<const char*, ProcessGroup*> groups[] = {
      {"tensor", &own->tensor()},      {"pipeline", &own->pipeline()},
      {"data", &own->data()},          {"model", &own->model()},
      {"embedding", own->embedding()}, {"position", own->position_embedding()}};
  if (world.rank() == 0) {
    fmt::print("initialize_model_parallel(2, 4, {}, {}) on {} ranks\n", v,
               split_rank, world.size());
  }
  for (const auto& [name, group] : groups) {
    const std::string text = toy::groups_text(world, group);
    if (world.rank() == 0) fmt::print("  {:9}{}\n", name, text);
  }
}

int main() {
  const int status = toy::run(2, multiply);
  // 3. A model without, and one with an encoder
  run_ranks(16, [](ProcessGroup& world) {
    print_groups(world, /*v=*/1, /*split_rank=*/-1);
    print_groups(world, /*v=*/2, /*split_rank=*/2);
  });
  return status;
}
