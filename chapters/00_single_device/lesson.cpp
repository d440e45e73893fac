// One device on one screen: the yardstick of all other lessons. A batch that
// does not fit goes through the model in pieces, whose gradients add up.
//
//   ./shardbook lesson single_device
// Needed: nothing. Next: 01_data_parallel.

#include "chapters/common/lesson.h"

namespace shardbook::single_device {

constexpr int kPieces = 3;

// --- the strategy
/// Adds the gradient of the batch's mean loss, and returns that loss. Only one
/// piece's activations are alive at a time.
inline double accumulate_gradients(Module& model, const Batch& batch) {
  const std::int64_t rows = batch.inputs.size(0) / kPieces;
  double loss = 0;
  for (std::int64_t first = 0; first < kPieces * rows; first += rows) {
    const Tensor inputs = slice(batch.inputs, 0, first, first + rows);
    const Tensor targets = slice(batch.targets, 0, first, first + rows);
    // A piece counts by its share: the mean of the means is the batch's mean
    const Tensor share =
        scale(language_loss(model(inputs), targets), 1.0 / kPieces);
    share.backward();  // adds to the gradients that are there
    loss += share.item();
  }
  return loss;
}
// --- end

inline lesson::Result train(ProcessGroup& world) {
  // 1. The model; recomputation drops the activations inside of its blocks
  Gpt model(lesson::config(), lesson::init());
  set_recompute(model, true);
  const auto optimizer = lesson::sgd(model.parameters());
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Forward and backward in pieces
    loss = accumulate_gradients(model, lesson::batch(step));
    // 3. One update for the whole batch
    optimizer->step();
    model.clear_grad();
  }
  return lesson::count(world, loss).with(model.named_parameters());
}

/// One device sends nothing.
inline double bill(int /*rank*/, int /*ranks*/) { return 0; }

inline lesson::Lesson this_lesson() { return {/*ranks=*/{1}, train, bill}; }

}  // namespace shardbook::single_device

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::single_device::this_lesson()); }
#endif
