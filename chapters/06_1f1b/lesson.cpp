// 1F1B on one screen: each stage goes back as soon as it can, so it keeps the
// activations of p - s micro-batches, and not of all.
//
//   ./shardbook lesson 1f1b
// Needed: 05_gpipe. Next: 07_tensor_parallel.

#include "chapters/05_gpipe/lesson.cpp"

namespace shardbook::pipeline {

// The same stages, micro-batches and messages as GPipe's, in another order
using gpipe::bill, gpipe::kMicroBatches, gpipe::sum_tied;

// tick   stage 0   stage 1   stage 2      (F b forward, B b backward)
//  0      F 0
//  1      F 1       F 0
//  2      F 2       F 1       F 0         stage s begins with p - 1 - s more
//  3                          B 0         forwards than backwards,
//  4                B 0       F 1
//  5      B 0       F 2       B 1         then takes turns,
//  6      F 3       B 1       F 2         and ends with the backwards left.

// --- the strategy
// Returns the mean loss over the batch on the last rank, zero on the others.
inline Tensor run_stages(Module& stage, const Batch& batch, ProcessGroup& pp,
                         const LossFunction& loss_of = language_loss) {
  const int s = pp.rank(), last = pp.size() - 1;
  const std::int64_t n = batch.inputs.size(0) / kMicroBatches;
  const Shape between = {n, lesson::sequence(), lesson::config().n_embd};
  std::vector<std::pair<Tensor, Tensor>> alive;  // input and output, with graph
  std::size_t done = 0;
  std::vector<std::pair<Work, Tensor>> sent;
  Tensor loss = Tensor::zeros({}, {DType::kF64, {}});
  const auto rows = [n](const Tensor& all, int b) {
    return slice(all, 0, b * n, b * n + n);
  };
  const auto receive = [&](int from) {
    const Tensor x = Tensor::empty(between, {DType::kF64, {}});
    pp.recv(x, from).wait();
    return x;
  };
  const auto forward = [&](int b) {
    const Tensor x =
        s == 0 ? rows(batch.inputs, b) : autograd::graph_input(receive(s - 1));
    Tensor y = stage(x);
    if (s == last) {
      y = scale(loss_of(y, rows(batch.targets, b)), 1.0 / kMicroBatches);
      loss = add(loss, y.detach());
    } else {
      // Do not wait here: the next stage may be sending, too
      sent.emplace_back(pp.send(y.detach(), s + 1), y.detach());
    }
    alive.emplace_back(x, y);
  };
  const auto backward = [&] {
    const auto [x, y] = std::exchange(alive[done++], {});
    autograd::backward({y}, s == last ? Tensors{} : Tensors{receive(s + 1)});
    if (s != 0) sent.emplace_back(pp.send(x.grad(), s - 1), x.grad());
  };
  // Warm up, then one forward and one backward in turn, then cool down
  const int warm_up = std::min(last - s, kMicroBatches);
  for (int b = 0; b < warm_up; ++b) forward(b);
  for (int b = warm_up; b < kMicroBatches; ++b) forward(b), backward();
  for (int b = 0; b < warm_up; ++b) backward();
  for (auto& [work, tensor] : sent) work.wait();
  return loss;
}
// --- end

inline lesson::Result train(ProcessGroup& pp) {
  // 1. This rank's layers, with the weights that they have in the whole model
  const auto layers = layers_of(lesson::config());
  const std::vector<int> cuts = cut_uniform(layers->size(), pp.size());
  const auto s = static_cast<std::size_t>(pp.rank());
  Stage stage(*layers, cuts[s], cuts[s + 1], lesson::init());
  const bool is_end = pp.rank() == 0 || pp.rank() + 1 == pp.size();
  const auto ends = pp.split(is_end ? 0 : -1, pp.rank(), "ends");
  const auto optimizer = lesson::sgd(stage.parameters());
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. The first stage reads the inputs, the last one the targets
    const Tensor local = run_stages(stage, lesson::batch(step), pp);
    sum_tied(stage, ends.get());
    // 3. Each rank updates its own layers, when all micro-batches are through
    optimizer->step();
    stage.clear_grad();
    loss = lesson::sum_over(local, pp);
  }
  return lesson::count(pp, loss).with(
      lesson::collect(pp, stage.named_parameters()));
}

inline lesson::Lesson this_lesson() {
  return {{3, 2}, train, bill, nullptr, /*peak_bytes=*/628424, /*chain=*/169};
}

}  // namespace shardbook::pipeline

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::pipeline::this_lesson()); }
#endif
