// GPipe on one screen: a stage of layers per rank. All micro-batches go forward
// through the stages, then all go back.
//
//   ./shardbook lesson gpipe
// Needed: 00_single_device. Next: 06_1f1b.

#include "chapters/common/lesson.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/stages.h"

namespace shardbook::gpipe {

constexpr int kMicroBatches = 6;

// time      0  1  2  3  4  5  6  7      (F b: micro-batch b goes forward)
// stage 0  F0 F1             B0 B1
// stage 1     F0 F1       B0 B1
// stage 2        F0 F1 B0 B1

// --- the strategy
// Returns the mean loss over the batch on the last rank, zero on the others.
inline Tensor run_stages(Module& stage, const Batch& batch, ProcessGroup& pp) {
  const int s = pp.rank(), last = pp.size() - 1;
  const std::int64_t n = batch.inputs.size(0) / kMicroBatches;
  const Shape between = {n, lesson::sequence(), lesson::config().n_embd};
  Tensors inputs;
  const auto rows = [n](const Tensor& all, int b) {
    return slice(all, 0, b * n, b * n + n);
  };
  const auto receive = [&](int from) {
    const Tensor x = Tensor::empty(between, {DType::kF64, {}});
    pp.recv(x, from).wait();
    return x;
  };
  // While a message is under way, the next one is computed
  Work sent;
  Tensor message;
  const auto send = [&](const Tensor& x, int to) {
    sent.wait();
    sent = pp.send(message = x, to);
  };
  // Fill the pipeline. A stage keeps its inputs alone
  for (int b = 0; b < kMicroBatches; ++b) {
    inputs.push_back(s == 0 ? rows(batch.inputs, b) : receive(s - 1));
    if (s == last) continue;  // its forward comes with the backward
    const NoGrad no_graph;
    send(stage(inputs.back()), s + 1);
  }
  // Drain it: compute the graph again, then its gradients
  Tensor loss = Tensor::zeros({}, {DType::kF64, {}});
  for (int b = 0; b < kMicroBatches; ++b) {
    Tensor& input = inputs[static_cast<std::size_t>(b)];
    const Tensor x = s == 0 ? input : autograd::graph_input(input);
    Tensor y = stage(x);
    if (s == last) {
      y = scale(language_loss(y, rows(batch.targets, b)), 1.0 / kMicroBatches);
      loss = add(loss, y.detach());
    }
    autograd::backward({y}, s == last ? Tensors{} : Tensors{receive(s + 1)});
    if (s != 0) send(x.grad(), s - 1);
    input = Tensor();
  }
  sent.wait();
  return loss;
}

// The first and the last stage share the embedding: its gradient has two terms.
inline void sum_tied(Module& stage, ProcessGroup* ends) {
  for (const auto& [name, parameter] : stage.named_parameters()) {
    if (ends == nullptr || name != "transformer.wte.weight") continue;
    ends->all_reduce(parameter.grad(), ReduceOp::kSum, "tied").wait();
  }
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

/// Ten steps send an activation or a gradient over each cut per micro-batch,
/// the tied gradient between two ranks, and an all-reduce of the loss.
inline double bill(int rank, int p) {
  const double h = lesson::config().n_embd, v = lesson::config().vocab_size;
  const double sent = ((rank > 0) + (rank + 1 < p)) * lesson::num_tokens() * h;
  const bool is_end = p > 1 && (rank == 0 || rank + 1 == p);
  const double tied = is_end * v * h;
  return lesson::kSteps * (sent + tied + 2.0 * (p - 1) / p) * 8;
}

inline lesson::Lesson this_lesson() {
  return {{3, 2}, train, bill, nullptr, /*peak_bytes=*/456392, /*chain=*/179};
}

}  // namespace shardbook::gpipe

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::gpipe::this_lesson()); }
#endif
