// Random graphs over tensors of three dims, with a loss that ignores some
// targets: for all layouts of the input, the results of plain computation.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "chapters/11_dtensor/dtensor_ops.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"

namespace shardbook::dtensor_test {
namespace {

constexpr double kTolerance = 1e-10;  // f64, values near 1, sums of tens

double error_of(const Tensor& got, const Tensor& expected) {
  if (got.shape() != expected.shape()) return 1e300;
  const auto a = got.to_vector<double>();
  const auto b = expected.to_vector<double>();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i]) < 1e100)) return 1e300;
    worst =
        std::max(worst, std::abs(a[i] - b[i]) / std::max(1.0, std::abs(b[i])));
  }
  return worst;
}

/// Draws the same graph for the same seed.
class Draw {
 public:
  Draw(unsigned seed, std::size_t axes) : random_(seed), axes_(axes) {}

  std::size_t below(std::size_t n) {
    return static_cast<std::size_t>(random_() % n);
  }
  /// One of the choices for each axis of the mesh.
  Placements placements(const Placements& choices) {
    Placements drawn;
    for (std::size_t i = 0; i < axes_; ++i) {
      drawn.push_back(choices[below(choices.size())]);
    }
    return drawn;
  }

 private:
  std::mt19937 random_;
  std::size_t axes_;
};

/// One operation: its kind, its operands among the values, and a layout.
struct Step {
  int kind;
  std::size_t a, b;
  Placements placements;
};

struct Leaf {
  Shape shape;
  Placements placements;
};

/// One program for both kinds of tensors: only these functions differ.
struct Plain {
  using T = Tensor;
  static T redistribute(const T& x, const Placements&) { return x; }
};
struct Distributed {
  using T = DTensor;
  static T redistribute(const T& x, const Placements& to) {
    // S -> P(avg) does not exist
    Placements open = to;
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (to[i] == partial(PartialOp::kAvg)) open[i] = replicate();
    }
    return x.redistribute(open).redistribute(to);
  }
};

/// This rank's term of `whole`, the sum (or mean) of the axis' terms.
Tensor spread(const Tensor& whole, const Leaf& leaf, const Mesh& mesh) {
  NoGrad no_grad;
  Tensor x = block_of(whole, local_part(leaf.shape, leaf.placements,
                                        mesh.shape(), mesh.coordinate()));
  for (std::size_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (!leaf.placements[axis].is_partial()) continue;
    const auto n = static_cast<double>(mesh.shape()[axis]);
    const auto c = static_cast<double>(mesh.coordinate()[axis]);
    const bool is_sum = leaf.placements[axis].op == PartialOp::kSum;
    x = add_scalar(is_sum ? scale(x, 1 / n) : x, c - (n - 1) / 2);
  }
  return x.clone();
}

/// The leaves on this rank: arrays that need gradients, and DTensors of them.
struct Leaves {
  Tensors locals;
  std::vector<DTensor> tensors;

  Leaves(const std::vector<Leaf>& leaves, const Mesh& mesh) {
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const Leaf& leaf = leaves[i];
      locals.push_back(spread(noise(leaf.shape, i, -2, 2), leaf, mesh));
      locals.back().set_requires_grad();
      tensors.push_back(
          from_local(locals.back(), mesh, leaf.placements, leaf.shape));
    }
  }
};

struct PlainRun {
  double loss = 0;
  Tensors gradients;
};

/// Names loss or gradients that differ from plain computation: "" if none.
std::string differences(const std::vector<Leaf>& leaves, const Tensors& locals,
                        const Tensor& loss, const PlainRun& expected,
                        const Mesh& mesh) {
  std::string wrong;
  if (!(std::abs(loss.item() - expected.loss) <=
        kTolerance * std::max(1.0, std::abs(expected.loss)))) {
    wrong += "loss ";
  }
  for (std::size_t i = 0; i < locals.size(); ++i) {
    const Block block =
        local_part(leaves[i].shape, normalized(leaves[i].placements),
                   mesh.shape(), mesh.coordinate());
    const Tensor right = block_of(expected.gradients[i], block);
    const Tensor got =
        locals[i].grad().defined() ? locals[i].grad() : right.zeros_like();
    if (error_of(got, right) > kTolerance) {
      wrong += "gradient of leaf " + std::to_string(i) + " ";
    }
  }
  return wrong;
}

struct Graph {
  Shape shape;               // [p, q, r]
  std::vector<Leaf> leaves;  // x, y, weight, gamma, beta, bias, table
  Placements targets, ids;
  std::vector<Step> steps;
};

constexpr int kKinds = 17;

Graph random_graph(unsigned seed, std::size_t axes) {
  Draw draw(seed, axes);
  const Placements cut = {replicate(), shard(0),  shard(1),
                          shard(2),    partial(), partial(PartialOp::kAvg)};
  // Even, uneven, and with ranks that have nothing
  const std::vector<Shape> shapes = {{4, 6, 12}, {5, 3, 4}, {1, 7, 5}};
  Graph graph;
  graph.shape = shapes[draw.below(shapes.size())];
  const std::int64_t r = graph.shape[2];
  // All layouts of x in turn
  const std::vector<Placements> all = all_placements(cut, axes);
  graph.leaves.push_back({graph.shape, all[seed % all.size()]});
  graph.leaves.push_back({graph.shape, draw.placements(cut)});
  graph.leaves.push_back(
      {{r, r}, draw.placements({replicate(), shard(0), shard(1), partial()})});
  for (int i = 0; i < 3; ++i) {
    graph.leaves.push_back(
        {{r}, draw.placements({replicate(), shard(0), partial()})});
  }
  graph.leaves.push_back(
      {{5, r},
       draw.placements({replicate(), shard(0), shard(1), partial(),
                        partial(PartialOp::kAvg)})});
  graph.ids = draw.placements({replicate(), shard(0), shard(1)});
  graph.targets = draw.placements({replicate(), shard(0), shard(1)});
  const std::size_t length = 3 + draw.below(5);
  for (std::size_t i = 0; i < length; ++i) {
    graph.steps.push_back({static_cast<int>(draw.below(kKinds)),
                           draw.below(2 + i), draw.below(2 + i),
                           draw.placements(cut)});
  }
  return graph;
}

/// The first row of tokens is ignored, and every fourth token of the others.
Tensor targets_of(const Shape& shape) {
  std::vector<std::int64_t> targets;
  for (std::int64_t i = 0; i < shape[0] * shape[1]; ++i) {
    const bool counts = i >= (shape[0] == 1 ? 2 : shape[1]) && i % 4 != 1;
    targets.push_back(counts ? (3 * i + 1) % shape[2] : -100);
  }
  return Tensor::from_values(targets, {shape[0], shape[1]});
}

Tensor ids_of(const Shape& shape) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < shape[0] * shape[1]; ++i) {
    ids.push_back((3 * i + 1) % 5);
  }
  return Tensor::from_values(ids, {shape[0], shape[1]});
}

/// The result of one operation.
template <typename T>
T result_of(const Step& step, const Shape& shape, const T& a, const T& b,
            const std::vector<T>& leaves, const T& ids) {
  const std::int64_t p = shape[0], q = shape[1], r = shape[2];
  switch (step.kind) {
    case 0:
      return add(a, b);
    case 1:
      return mul(a, tanh(b));
    case 2:
      return gelu(a);
    case 3:
    case 4:
      return reshape(scale(matmul(reshape(a, {p * q, r}), leaves[2]), 0.3),
                     {p, q, r});
    case 5:
      return softmax(a);
    case 6:
      return layer_norm(a, leaves[3], leaves[4], 1e-2);
    case 7:
      return transpose(tanh(transpose(a, 0, 1)), 0, 1);
    case 8:
      return transpose(relu(transpose(a, 1, 2)), 1, 2);
    case 9:
      return add(a, mean(b, 0));
    case 10:
      return add(a, reshape(scale(sum(b, 1), 0.1), {p, 1, r}));
    case 11:
      return add(a, reshape(mean(b, 2), {p, q, 1}));
    case 12:
      return add(a, leaves[5]);
    case 13:
      return add(a, embedding(leaves[6], ids));
    case 14:
      return reshape(scale(reshape(a, {p * q * r}), 0.7), {p, q, r});
    case 15:
      return tanh(a);
    default:
      return scale(sub(a, b), -0.5);
  }
}

template <typename World>
typename World::T run_graph(const Graph& graph,
                            const std::vector<typename World::T>& leaves,
                            const typename World::T& targets,
                            const typename World::T& ids) {
  std::vector<typename World::T> values = {leaves[0], leaves[1]};
  for (const Step& step : graph.steps) {
    values.push_back(
        World::redistribute(result_of(step, graph.shape, values[step.a],
                                      values[step.b], leaves, ids),
                            step.placements));
  }
  return add(mean(square(add(values.back(), values[0]))),
             cross_entropy(values.back(), targets));
}

PlainRun run_plain(const Graph& graph) {
  std::vector<Tensor> leaves;
  for (std::size_t i = 0; i < graph.leaves.size(); ++i) {
    leaves.push_back(noise(graph.leaves[i].shape, i, -2, 2));
    leaves.back().set_requires_grad();
  }
  const Tensor loss = run_graph<Plain>(graph, leaves, targets_of(graph.shape),
                                       ids_of(graph.shape));
  loss.backward();
  PlainRun run{loss.item(), {}};
  for (const Tensor& leaf : leaves) {
    run.gradients.push_back(leaf.grad().defined() ? leaf.grad()
                                                  : leaf.zeros_like());
  }
  return run;
}

class DTensorProperty : public testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(
    Meshes, DTensorProperty,
    testing::Values(std::vector<int>{1}, std::vector<int>{2},
                    std::vector<int>{3}, std::vector<int>{4},
                    std::vector<int>{2, 2}, std::vector<int>{2, 3},
                    std::vector<int>{3, 2}));

TEST_P(DTensorProperty, RandomGraphsEqualPlainComputation) {
  const std::vector<int> shape = GetParam();
  // Each layout of x once, or several times
  const unsigned count = 72;
  const auto wrong = on_mesh(shape, [&](const Mesh& mesh, ProcessGroup&) {
    std::string wrong;
    for (unsigned seed = 0; seed < count; ++seed) {
      const Graph graph = random_graph(seed, shape.size());
      const Leaves leaves(graph.leaves, mesh);
      const DTensor targets =
          cut_tensor(targets_of(graph.shape), mesh, graph.targets);
      const DTensor ids = cut_tensor(ids_of(graph.shape), mesh, graph.ids);
      const Tensor loss =
          run_graph<Distributed>(graph, leaves.tensors, targets, ids)
              .full_tensor();
      loss.backward();
      const std::string result = differences(graph.leaves, leaves.locals, loss,
                                             run_plain(graph), mesh);
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
