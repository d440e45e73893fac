// SUMMA on one screen: activations and weights lie in q x q blocks, and blocks
// travel along rows and columns of ranks.
//
//   ./shardbook lesson 2d
// Needed: 07_tensor_parallel. Next: 09_tensor_parallel_2p5d.

#include "chapters/common/lesson.h"
#include "comm/device_mesh.h"

namespace shardbook::summa {

//             B01 B11                      rank (i, j) has A_ij, B_ij and C_ij
//   A00 A01 | C00 C01      C00 = A00 B00 + A01 B10
//
/// Sends the block of the group's rank `root` to the whole group.
inline Tensor broadcast(const Tensor& block, int root, ProcessGroup& group) {
  const Tensor copy = block.detach().clone();
  group.broadcast(copy, root).wait();
  return copy;
}

/// Sets `sum` to the sum of the group's terms on rank `root`.
inline void reduce(const Tensor& term, int root, ProcessGroup& group,
                   Tensor& sum) {
  group.reduce(term, root).wait();
  if (group.rank() == root) sum = term;
}

// --- the strategy
/// C = A B, with a block of each matrix per rank (i, j): in step l, A's block
/// (i, l) goes along the rows of ranks and B's block (l, j) along the columns.
inline Tensor summa(const Tensor& a, const Tensor& b, DeviceMesh& mesh) {
  ProcessGroup &row = mesh.group("col"), &column = mesh.group("row");
  const int q = row.size();
  const auto forward = [&, q](const Tensors& in) {
    Tensor c;
    for (int l = 0; l < q; ++l) {
      const Tensor term =
          matmul(broadcast(in[0], l, row), broadcast(in[1], l, column));
      c = l == 0 ? term : add(c, term);
    }
    return Tensors{c};
  };
  // Each gradient is a product as well: its terms are summed where its block is
  const auto backward = [&, q, a, b](const Tensors& grad) {
    Tensor da, db;
    for (int l = 0; l < q; ++l) {
      reduce(matmul(grad[0], broadcast(b, l, column), false, true), l, row, da);
      reduce(matmul(broadcast(a, l, row), grad[0], true), l, column, db);
    }
    return Tensors{da, db};
  };
  return autograd::custom_function("summa", {a, b}, forward, backward)[0];
}
// --- end

inline lesson::Result train(ProcessGroup& world) {
  // 1. q x q ranks, and their blocks of the weights
  const int q = lesson::root_of(world.size(), 2);
  DeviceMesh mesh(world, Topology({"row", "col"}, {q, q}));
  const int i = mesh.coordinate("row"), j = mesh.coordinate("col");
  const auto part = [&](const std::string& name, int r) {
    // The table and the biases are whole on every rank
    if (!lesson::is_matrix(name)) return Shards{};
    return Shards{{0, r / q, q}, {1, r % q, q}};
  };
  auto p = lesson::take_parts(world, part);
  const auto optimizer = lesson::sgd(lesson::values_of(p));
  const auto layer = [&](const Tensor& x, const std::string& name) {
    return add(summa(x, p[name + ".weight"], mesh),
               lesson::columns_of(p[name + ".bias"], j, q));
  };
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Samples for each row of ranks; columns of their activations
    const Batch batch = lesson::batch(step, i, q);
    Tensor x = lesson::columns_of(
        embedding(p["wte.weight"], reshape(batch.inputs, {-1})), j, q);
    // 3. Three products of blocks
    x = relu(layer(relu(layer(x, "fc1")), "fc2"));
    x = lesson::gather_columns(layer(x, "fc3"), mesh.group("col"));
    const Tensor mean =
        scale(language_loss(x, reshape(batch.targets, {-1})), 1.0 / q);
    mean.backward();
    // 4. What is whole on every rank has a term of its gradient on each
    lesson::sum_whole(p, world, part);
    optimizer->step();
    lesson::clear_gradients(p);
    loss = lesson::sum_over(mean, mesh.group("row"));
  }
  return lesson::finish(world, loss, p, part);
}

/// Ten steps: two kinds of blocks move in each product and in its two
/// gradients; then the logits, what every rank has whole, and the loss.
inline double bill(int /*rank*/, int ranks) {
  const int q = lesson::root_of(ranks, 2);
  const double h = lesson::mlp_layers()[0].first,
               tokens = lesson::num_tokens() / q;
  double elements = 0;
  for (const auto& [in, out] : lesson::mlp_layers()) {
    elements += 3 * (q - 1) * (tokens * in / q + in / q * out / q);
  }
  elements += (q - 1.0) / q * (tokens * h + 2);
  elements += 2.0 * (ranks - 1) / ranks * (h * h + 6 * h);
  return lesson::kSteps * elements * 8;
}

inline lesson::Lesson this_lesson() {
  return {/*ranks=*/{4}, train, bill, lesson::mlp_on_one_device};
}

}  // namespace shardbook::summa

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::summa::this_lesson()); }
#endif
