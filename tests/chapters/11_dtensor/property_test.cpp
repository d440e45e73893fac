// Random graphs over all layouts: values and gradients of plain computation.

#include <gtest/gtest.h>

#include <cmath>

#include "tests/chapters/11_dtensor/graph_support.h"

namespace shardbook::dtensor_test {
namespace {

struct Graph {
  std::int64_t rows, columns;
  std::vector<Leaf> leaves;  // x, y, weight, bias, gamma, beta, table
  Placements ids;
  std::vector<Step> steps;
};

constexpr int kKinds = 16;

Graph random_graph(unsigned seed, std::size_t axes) {
  Draw draw(seed, axes);
  const Placements of_matrix = {replicate(), shard(0), shard(1), partial(),
                                partial(PartialOp::kAvg)};
  const Placements of_vector = {replicate(), shard(0), partial()};
  const std::vector<std::pair<std::int64_t, std::int64_t>> sizes = {
      {8, 6}, {7, 5}, {12, 12}, {3, 4}};
  const auto [rows, columns] = sizes[draw.below(sizes.size())];
  Graph graph{rows, columns, {}, {}, {}};
  for (int i = 0; i < 7; ++i) {
    const bool is_vector = i >= 3 && i <= 5;
    Shape shape = i < 2       ? Shape{rows, columns}
                  : i == 2    ? Shape{columns, columns}
                  : is_vector ? Shape{columns}
                              : Shape{5, columns};
    graph.leaves.push_back(
        {shape, draw.placements(is_vector ? of_vector : of_matrix)});
  }
  graph.ids = draw.placements({replicate(), shard(0)});
  const std::size_t length = 3 + draw.below(6);
  for (std::size_t i = 0; i < length; ++i) {
    // Operands: the two matrices, and results before this one
    graph.steps.push_back({static_cast<int>(draw.below(kKinds)),
                           draw.below(2 + i), draw.below(2 + i),
                           draw.placements(of_matrix)});
  }
  return graph;
}

std::vector<std::int64_t> ids_of(std::int64_t rows) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < rows; ++i) ids.push_back((3 * i + 1) % 5);
  return ids;
}

template <typename World>
typename World::T run_graph(const Graph& graph,
                            const std::vector<typename World::T>& leaves,
                            const typename World::T& ids) {
  using T = typename World::T;
  std::vector<T> values = {leaves[0], leaves[1]};
  for (const Step& step : graph.steps) {
    const T& a = values[step.a];
    const T& b = values[step.b];
    T y;
    switch (step.kind) {
      case 0:
        y = add(a, b);
        break;
      case 1:
        y = sub(a, b);
        break;
      case 2:
        y = mul(a, tanh(b));
        break;
      case 3:
        y = scale(a, -0.5);
        break;
      case 4:
        y = gelu(a);
        break;
      case 5:
        y = tanh(a);
        break;
      case 6:
      case 15:
        y = scale(matmul(a, leaves[2]), 0.3);
        break;
      case 7:
        y = softmax(a);
        break;
      case 8:
        y = layer_norm(a, leaves[4], leaves[5], 1e-2);
        break;
      case 9:
        y = add(a, leaves[3]);
        break;
      case 10:
        y = transpose(tanh(transpose(a, 0, 1)), 0, 1);
        break;
      case 11:
        y = reshape(scale(reshape(a, {graph.rows * graph.columns}), 0.7),
                    {graph.rows, graph.columns});
        break;
      case 12:
        y = add(a, mean(b, 0));
        break;
      case 13:
        y = add(a, reshape(scale(sum(b, 1), 0.1), {graph.rows, 1}));
        break;
      default:
        y = add(a, embedding(leaves[6], ids));
        break;
    }
    values.push_back(World::redistribute(y, step.placements));
  }
  return mean(square(add(values.back(), values[0])));
}

PlainRun run_plain(const Graph& graph) {
  std::vector<Tensor> leaves;
  for (std::size_t i = 0; i < graph.leaves.size(); ++i) {
    leaves.push_back(leaf_values(i, graph.leaves[i].shape));
    leaves.back().set_requires_grad();
  }
  const Tensor ids = Tensor::from_values(ids_of(graph.rows), {graph.rows});
  const Tensor loss = run_graph<Plain>(graph, leaves, ids);
  loss.backward();
  PlainRun run{loss.item(), {}};
  for (const Tensor& leaf : leaves) {
    run.gradients.push_back(leaf.grad().defined() ? leaf.grad()
                                                  : leaf.zeros_like());
  }
  return run;
}

std::string run_distributed(const Graph& graph, const PlainRun& expected,
                            const Mesh& mesh) {
  const Leaves leaves(graph.leaves, mesh);
  const Tensor all_ids = Tensor::from_values(ids_of(graph.rows), {graph.rows});
  const DTensor ids = cut_tensor(all_ids, mesh, graph.ids);
  const Tensor loss =
      run_graph<Distributed>(graph, leaves.tensors, ids).full_tensor();
  loss.backward();
  return differences(graph.leaves, leaves.locals, loss, expected, mesh);
}

class DTensorProperty : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(
    Meshes, DTensorProperty,
    testing::Values(std::vector<int>{1}, std::vector<int>{2},
                    std::vector<int>{3}, std::vector<int>{4},
                    std::vector<int>{2, 2}, std::vector<int>{2, 3}));

TEST_P(DTensorProperty, RandomGraphsEqualPlainComputation) {
  const std::vector<int> shape = GetParam();
  const unsigned count = shape.size() == 1 ? 40 : 25;
  const auto wrong = on_ranks(ranks_of(shape), [&](ProcessGroup& world) {
    DeviceMesh devices = devices_of(world, shape);
    const Mesh mesh(devices);
    std::string wrong;
    for (unsigned seed = 0; seed < count; ++seed) {
      const Graph graph = random_graph(seed, shape.size());
      const std::string result = run_distributed(graph, run_plain(graph), mesh);
      if (!result.empty()) {
        wrong += "seed " + std::to_string(seed) + ": " + result;
        for (const Step& step : graph.steps) {
          wrong += std::to_string(step.kind) + " ";
        }
        wrong += "\n";
      }
    }
    return wrong;
  });
  EXPECT_EQ(wrong[0], "");
  EXPECT_EQ(wrong.back(), "");
}

}  // namespace
}  // namespace shardbook::dtensor_test
