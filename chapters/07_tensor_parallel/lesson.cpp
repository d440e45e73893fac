// Tensor parallelism on one screen: one matrix is cut by columns, the next by
// rows, and the ranks meet once forward and once backward.
//
//   ./shardbook lesson tensor_parallel
// Needed: 00_single_device. Next: 08_tensor_parallel_2d.

#include "chapters/common/lesson.h"

namespace shardbook::tensor_parallel {

/// Copies `x`, and adds up the copies of all ranks.
inline Tensor summed(const Tensor& x, ProcessGroup& tp) {
  const Tensor sum = x.detach().clone();
  tp.all_reduce(sum).wait();
  return sum;
}

// --- the strategy
/// f does nothing forward. Backward, it adds the ranks' terms of the gradient.
inline Tensor f(const Tensor& x, ProcessGroup& tp) {
  return autograd::custom_function(
      "f", {x}, [](const Tensors& in) { return Tensors{in[0].clone()}; },
      [&tp](const Tensors& grad) { return Tensors{summed(grad[0], tp)}; })[0];
}

/// g adds the ranks' terms forward. Backward, it does nothing.
inline Tensor g(const Tensor& x, ProcessGroup& tp) {
  return autograd::custom_function(
      "g", {x}, [&tp](const Tensors& in) { return Tensors{summed(in[0], tp)}; },
      [](const Tensors& grad) { return grad; })[0];
}

/// Maps x [b, s, in], equal on all ranks, to this rank's columns [b, s, out/t];
/// weight is [in, out/t], bias [out/t]. An element-wise function may follow.
inline Tensor column_linear(const Tensor& x, const Tensor& weight,
                            const Tensor& bias, ProcessGroup& tp) {
  return linear(f(x, tp), weight, bias);
}

/// Maps this rank's columns x [b, s, in/t] to [b, s, out], equal on all ranks;
/// weight is [in/t, out], bias [out]. The bias is added once, behind the sum.
inline Tensor row_linear(const Tensor& x, const Tensor& weight,
                         const Tensor& bias, ProcessGroup& tp) {
  return add(g(linear(x, weight), tp), bias);
}
// --- end

/// Returns the part that rank `r` of `t` holds; {} is the whole.
inline Shards part_of(const std::string& name, int r, int t) {
  if (name == "fc1.weight") return {{1, r, t}};
  if (name == "fc1.bias" || name == "fc2.weight") return {{0, r, t}};
  return {};
}

inline lesson::Result train(ProcessGroup& tp) {
  // 1. Take this rank's part of each parameter out of the whole model
  const auto part = [&](const std::string& name, int r) {
    return part_of(name, r, tp.size());
  };
  auto p = lesson::take_parts(tp, part);
  const auto optimizer = lesson::sgd(lesson::values_of(p));
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Every rank reads the whole batch
    const Batch batch = lesson::batch(step);
    Tensor x = embedding(p["wte.weight"], batch.inputs);
    // 3. Columns, then rows: nothing is sent between them
    x = relu(column_linear(x, p["fc1.weight"], p["fc1.bias"], tp));
    x = relu(row_linear(x, p["fc2.weight"], p["fc2.bias"], tp));
    x = linear(x, p["fc3.weight"], p["fc3.bias"]);
    const Tensor mean = language_loss(x, batch.targets);
    mean.backward();
    // 4. Whole parameters have equal gradients everywhere: no average
    optimizer->step();
    lesson::clear_gradients(p);
    loss = mean.item();
  }
  return lesson::finish(tp, loss, p, part);
}

/// Ten steps send an all-reduce of [b, s, h] forward by g, and one backward by
/// f.
inline double bill(int /*rank*/, int t) {
  const double elements =
      lesson::num_tokens() * lesson::config(lesson::mlp()).n_embd;
  return lesson::kSteps * 2 * (2.0 * (t - 1) / t) * elements * 8;
}

inline lesson::Lesson this_lesson() {
  return {/*ranks=*/{4, 2}, train, bill, lesson::mlp_on_one_device};
}

}  // namespace shardbook::tensor_parallel

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::tensor_parallel::this_lesson()); }
#endif
