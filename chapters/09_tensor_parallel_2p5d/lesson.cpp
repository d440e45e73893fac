// Tesseract on one screen: d layers of q x q ranks. Each layer multiplies its
// own samples by SUMMA; the gradients of weights are summed over the layers.
//
//   ./shardbook lesson 2p5d
// Needed: 08_tensor_parallel_2d. Next: 10_tensor_parallel_3d.

#include "chapters/08_tensor_parallel_2d/lesson.cpp"

namespace shardbook::tesseract {

// 4 ranks are one layer of 2 x 2, 8 are two: every layer has the same B, and
// rows of A of its own, so dB is summed over the depth.
inline int side(int ranks) { return ranks >= 4 ? 2 : 1; }

// --- the strategy
/// C = A B in every layer of ranks: SUMMA, for rows of A that are its own.
inline Tensor tesseract(const Tensor& a, const Tensor& b, DeviceMesh& mesh) {
  const auto same = [](const Tensors& in) { return Tensors{in[0].clone()}; };
  // Every layer of ranks has the same weights and its own samples
  const auto add_up = [&mesh](const Tensors& grad) {
    mesh.group("depth").all_reduce(grad[0]).wait();
    return grad;
  };
  return summa::summa(
      a, autograd::custom_function("layers", {b}, same, add_up)[0], mesh);
}
// --- end

inline lesson::Result train(ProcessGroup& world) {
  // 1. q x q ranks in d layers, and their blocks of the weights
  const int q = side(world.size()), d = world.size() / (q * q);
  DeviceMesh mesh(world, Topology({"depth", "row", "col"}, {d, q, q}));
  const int i = mesh.coordinate("row"), j = mesh.coordinate("col");
  const auto part = [&](const std::string& name, int r) {
    if (!lesson::is_matrix(name)) return Shards{};
    return Shards{{0, r / q % q, q}, {1, r % q, q}};  // equal in each layer
  };
  auto p = lesson::take_parts(world, part);
  const auto optimizer = lesson::sgd(lesson::values_of(p));
  const auto layer = [&](const Tensor& x, const std::string& name) {
    const Tensor bias = lesson::columns_of(p[name + ".bias"], j, q);
    return add(tesseract(x, p[name + ".weight"], mesh), bias);
  };
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Samples for each layer and row of ranks; columns of their activations
    const Batch batch =
        lesson::batch(step, mesh.coordinate("depth") * q + i, d * q);
    Tensor x = lesson::columns_of(
        embedding(p["wte.weight"], reshape(batch.inputs, {-1})), j, q);
    // 3. Three products of blocks
    x = relu(layer(relu(layer(x, "fc1")), "fc2"));
    x = lesson::gather_columns(layer(x, "fc3"), mesh.group("col"));
    const Tensor mean =
        scale(language_loss(x, reshape(batch.targets, {-1})), 1.0 / (d * q));
    mean.backward();
    lesson::sum_whole(p, world, part);
    optimizer->step();
    lesson::clear_gradients(p);
    loss = lesson::sum_over(mean, mesh.group("depth-row"));
  }
  return lesson::finish(world, loss, p, part);
}

/// Ten steps: two kinds of blocks move in each product and in its two
/// gradients, and dB over the depth; logits, what every rank has whole, and the
/// loss.
inline double bill(int /*rank*/, int ranks) {
  const int q = side(ranks), d = ranks / (q * q);
  const double h = lesson::mlp_layers()[0].first,
               tokens = lesson::num_tokens() / (d * q);
  double elements = 0;
  for (const auto& [in, out] : lesson::mlp_layers()) {
    const double b = in / q * out / q;
    elements += 3 * (q - 1) * (tokens * in / q + b) + 2.0 * (d - 1) / d * b;
  }
  elements += (q - 1.0) / q * tokens * h + 2.0 * (d * q - 1) / (d * q);
  elements += 2.0 * (ranks - 1) / ranks * (h * h + 6 * h);
  return lesson::kSteps * elements * 8;
}

inline lesson::Lesson this_lesson() {
  return {/*ranks=*/{8, 4}, train, bill, lesson::mlp_on_one_device};
}

}  // namespace shardbook::tesseract

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::tesseract::this_lesson()); }
#endif
