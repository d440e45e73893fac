// Random graphs over tensors of three dims, with a loss that ignores targets:
// all layouts of the input in turn, values and gradients of plain computation.

#include <gtest/gtest.h>

#include "tests/chapters/11_dtensor/graph_support.h"

namespace shardbook::dtensor_test {
namespace {

struct Graph3 {
  Shape shape;               // [p, q, r]
  std::vector<Leaf> leaves;  // x, y, weight, gamma, beta
  Placements targets;
  std::vector<Step> steps;
};

constexpr int kKinds3 = 13;

Graph3 random_graph_3d(unsigned seed, std::size_t axes) {
  Draw draw(seed, axes);
  const Placements cut = {replicate(), shard(0),  shard(1),
                          shard(2),    partial(), partial(PartialOp::kAvg)};
  // Even, uneven, and with ranks that have nothing
  const std::vector<Shape> shapes = {{4, 6, 12}, {5, 3, 4}, {1, 7, 5}};
  Graph3 graph;
  graph.shape = shapes[draw.below(shapes.size())];
  const std::int64_t r = graph.shape[2];
  // All layouts of x in turn
  const std::vector<Placements> all = all_placements(cut, axes);
  graph.leaves.push_back({graph.shape, all[seed % all.size()]});
  graph.leaves.push_back({graph.shape, draw.placements(cut)});
  graph.leaves.push_back(
      {{r, r}, draw.placements({replicate(), shard(0), shard(1), partial()})});
  for (int i = 0; i < 2; ++i) {
    graph.leaves.push_back(
        {{r}, draw.placements({replicate(), shard(0), partial()})});
  }
  graph.targets = draw.placements({replicate(), shard(0), shard(1)});
  const std::size_t length = 3 + draw.below(5);
  for (std::size_t i = 0; i < length; ++i) {
    graph.steps.push_back({static_cast<int>(draw.below(kKinds3)),
                           draw.below(2 + i), draw.below(2 + i),
                           draw.placements(cut)});
  }
  return graph;
}

/// The first row of tokens does not count, and of the others every fourth one.
Tensor targets_of(const Shape& shape) {
  std::vector<std::int64_t> targets;
  for (std::int64_t i = 0; i < shape[0] * shape[1]; ++i) {
    const bool counts = i >= (shape[0] == 1 ? 2 : shape[1]) && i % 4 != 1;
    targets.push_back(counts ? (3 * i + 1) % shape[2] : -100);
  }
  return Tensor::from_values(targets, {shape[0], shape[1]});
}

template <typename World>
typename World::T run_graph_3d(const Graph3& graph,
                               const std::vector<typename World::T>& leaves,
                               const typename World::T& targets) {
  using T = typename World::T;
  const std::int64_t p = graph.shape[0], q = graph.shape[1], r = graph.shape[2];
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
        y = mul(a, tanh(b));
        break;
      case 2:
        y = gelu(a);
        break;
      case 3:
      case 4:
        y = scale(matmul(reshape(a, {p * q, r}), leaves[2]), 0.3);
        y = reshape(y, {p, q, r});
        break;
      case 5:
        y = softmax(a);
        break;
      case 6:
        y = layer_norm(a, leaves[3], leaves[4], 1e-2);
        break;
      case 7:
        y = transpose(tanh(transpose(a, 0, 1)), 0, 1);
        break;
      case 8:
        y = transpose(relu(transpose(a, 1, 2)), 1, 2);
        break;
      case 9:
        y = add(a, mean(b, 0));
        break;
      case 10:
        y = add(a, reshape(scale(sum(b, 1), 0.1), {p, 1, r}));
        break;
      case 11:
        y = add(a, reshape(mean(b, 2), {p, q, 1}));
        break;
      default:
        y = scale(sub(a, b), -0.5);
        break;
    }
    values.push_back(World::redistribute(y, step.placements));
  }
  return add(mean(square(add(values.back(), values[0]))),
             cross_entropy(values.back(), targets));
}

PlainRun run_plain_3d(const Graph3& graph) {
  std::vector<Tensor> leaves;
  for (std::size_t i = 0; i < graph.leaves.size(); ++i) {
    leaves.push_back(leaf_values(i, graph.leaves[i].shape));
    leaves.back().set_requires_grad();
  }
  const Tensor loss =
      run_graph_3d<Plain>(graph, leaves, targets_of(graph.shape));
  loss.backward();
  PlainRun run{loss.item(), {}};
  for (const Tensor& leaf : leaves) {
    run.gradients.push_back(leaf.grad().defined() ? leaf.grad()
                                                  : leaf.zeros_like());
  }
  return run;
}

class DTensorProperty3d : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Meshes, DTensorProperty3d,
                         testing::Values(std::vector<int>{2},
                                         std::vector<int>{3},
                                         std::vector<int>{4},
                                         std::vector<int>{2, 2},
                                         std::vector<int>{3, 2}));

TEST_P(DTensorProperty3d, RandomGraphsEqualPlainComputation) {
  const std::vector<int> shape = GetParam();
  // Each layout of x once, or several times
  const unsigned count = 36;
  const auto wrong = on_ranks(ranks_of(shape), [&](ProcessGroup& world) {
    DeviceMesh devices = devices_of(world, shape);
    const Mesh mesh(devices);
    std::string wrong;
    for (unsigned seed = 0; seed < count; ++seed) {
      const Graph3 graph = random_graph_3d(seed, shape.size());
      const Leaves leaves(graph.leaves, mesh);
      const DTensor targets =
          cut_tensor(targets_of(graph.shape), mesh, graph.targets);
      const Tensor loss =
          run_graph_3d<Distributed>(graph, leaves.tensors, targets)
              .full_tensor();
      loss.backward();
      const std::string result = differences(graph.leaves, leaves.locals, loss,
                                             run_plain_3d(graph), mesh);
      if (result.empty()) continue;
      wrong += "seed " + std::to_string(seed) + ": " + result;
      for (const Step& step : graph.steps) {
        wrong += std::to_string(step.kind) + " ";
      }
      wrong += "\n";
    }
    return wrong;
  });
  EXPECT_EQ(wrong[0], "");
  EXPECT_EQ(wrong.back(), "");
}

}  // namespace
}  // namespace shardbook::dtensor_test
