// Three dimensions on one screen: l x l x l ranks share every product, and each
// element of every matrix lies on one rank alone.
//
//   ./shardbook lesson 3d
// Needed: 08_tensor_parallel_2d. Next: 11_dtensor.

#include "chapters/common/lesson.h"
#include "comm/device_mesh.h"

namespace shardbook::cube {

// Rank (i, j, k) computes the product of X's block (i, k) and W's block (k, j).
// Each block lies in l pieces, its rows cut, on the ranks that need it:
//
//   X_ik   gathered over j     [M/l, K/l]
//   W_kj   gathered over i     [K/l, N/l]
//   Y_ij   summed over k, and scattered: piece k stays here
//
// --- the strategy
/// Joins the pieces of the group's ranks, end to end.
inline Tensor gather(const Tensor& piece, ProcessGroup& group) {
  const Tensor all = Tensor::empty(
      {group.size() * piece.size(0), piece.size(1)}, piece.options());
  group.all_gather(all, piece.detach()).wait();
  return all;
}

/// Adds the ranks' terms up, and returns this rank's piece of the sum.
inline Tensor scatter(const Tensor& term, ProcessGroup& group) {
  const Tensor piece = Tensor::empty(
      {term.size(0) / group.size(), term.size(1)}, term.options());
  group.reduce_scatter(piece, term).wait();
  return piece;
}

/// Computes a piece of X W. The axes of Y are those of X with `over_x` and
/// `over_y` exchanged, so the next product exchanges them again.
inline Tensor product(const Tensor& x, const Tensor& w, DeviceMesh& mesh,
                      const std::string& over_x, const std::string& over_y) {
  ProcessGroup &gx = mesh.group(over_x), &gw = mesh.group("i");
  ProcessGroup& gy = mesh.group(over_y);
  const Tensor all_x = gather(x, gx), all_w = gather(w, gw);
  return autograd::custom_function(
      "product", {x, w},
      [&](const Tensors&) {
        return Tensors{scatter(matmul(all_x, all_w), gy)};
      },
      [=, &gx, &gw, &gy](const Tensors& grad) {
        const Tensor dy = gather(grad[0], gy);
        return Tensors{scatter(matmul(dy, all_w, false, true), gx),
                       scatter(matmul(all_x, dy, true), gw)};
      })[0];
}
// --- end

inline lesson::Result train(ProcessGroup& world) {
  // 1. l x l x l ranks, and their pieces of the weights
  const int l = lesson::root_of(world.size(), 3);
  DeviceMesh mesh(world, Topology({"i", "j", "k"}, {l, l, l}));
  const int me = world.rank(), i = me / (l * l), j = me / l % l, k = me % l;
  const auto part = [&](const std::string& name, int r) {
    // The table and the biases are whole on every rank
    if (!lesson::is_matrix(name)) return Shards{};
    int of_j = r / l % l, of_k = r % l;
    if (name == "fc2.weight") std::swap(of_j, of_k);  // its axes are exchanged
    return Shards{{0, of_k, l}, {1, of_j, l}, {0, r / (l * l), l}};
  };
  auto p = lesson::take_parts(world, part);
  const auto optimizer = lesson::sgd(lesson::values_of(p));
  const auto layer = [&](const Tensor& x, const std::string& name,
                         bool turned) {
    const Tensor y = product(x, p[name + ".weight"], mesh, turned ? "k" : "j",
                             turned ? "j" : "k");
    return add(y, lesson::columns_of(p[name + ".bias"], turned ? k : j, l));
  };
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Samples by (i, j), columns by k; the products turn that into (i, k)
    // and j
    const Tensor ids = lesson::batch(step, i * l + j, l * l).inputs;
    const Tensor targets = lesson::batch(step, i * l + k, l * l).targets;
    Tensor x = lesson::columns_of(
        embedding(p["wte.weight"], reshape(ids, {-1})), k, l);
    x = relu(layer(x, "fc1", false));
    x = relu(layer(x, "fc2", true));
    x = lesson::gather_columns(layer(x, "fc3", false), mesh.group("j"));
    const Tensor mean =
        scale(language_loss(x, reshape(targets, {-1})), 1.0 / (l * l));
    mean.backward();
    lesson::sum_whole(p, world, part);
    optimizer->step();
    lesson::clear_gradients(p);
    loss = lesson::sum_over(mean, mesh.group("i-k"));
  }
  return lesson::finish(world, loss, p, part);
}

/// Ten steps: X, W and Y of each product move once forward and once backward;
/// the logits; what every rank has whole; the loss.
inline double bill(int /*rank*/, int ranks) {
  const int l = lesson::root_of(ranks, 3);
  const double h = lesson::mlp_layers()[0].first, tokens = lesson::num_tokens();
  double elements = 0;
  for (const auto& [in, out] : lesson::mlp_layers()) {
    elements += 2 * (tokens * in + in * out + tokens * out) / (l * l);
  }
  const double logits = tokens * h / (l * l), whole = h * h + 6 * h;
  const double sums = whole * (ranks - 1) / ranks + (l * l - 1.0) / (l * l);
  return lesson::kSteps * ((l - 1.0) / l * (elements + logits) + 2 * sums) * 8;
}

inline lesson::Lesson this_lesson() {
  return {/*ranks=*/{8}, train, bill, lesson::mlp_on_one_device};
}

}  // namespace shardbook::cube

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::cube::this_lesson()); }
#endif
