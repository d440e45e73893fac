// DDP on one screen: a replica per rank, different samples, one average of the
// gradients.
//
//   ./shardbook lesson ddp
// Needed: 00_single_device. Next: 03_zero_fsdp.

#include "chapters/common/lesson.h"

namespace shardbook::ddp {

// --- the strategy
// Each rank has the gradient of its own samples. The mean over the ranks is the
// gradient of the whole batch.
inline void average_gradients(Module& model, ProcessGroup& dp) {
  for (const Tensor& parameter : model.parameters()) {
    const Tensor gradient = parameter.grad();
    // Divide first: in 16 bits the sum could overflow
    scale_into(gradient, gradient, 1.0 / dp.size());
    dp.all_reduce(gradient, ReduceOp::kSum, "gradient").wait();
  }
}
// --- end

inline lesson::Result train(ProcessGroup& dp) {
  // 1. The same model from the same seed on every rank
  Gpt model(lesson::config(), lesson::init());
  const auto optimizer = lesson::sgd(model.parameters());
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. Its own samples: rank r of d takes r, r + d, r + 2d, ...
    const Batch batch = lesson::batch(step, dp.rank(), dp.size());
    // 3. Forward and backward
    const Tensor mean = language_loss(model(batch.inputs), batch.targets);
    mean.backward();
    // 4. The one difference from one device
    average_gradients(model, dp);
    // 5. The same update everywhere
    optimizer->step();
    model.clear_grad();
    loss = lesson::mean_over(mean, dp);
  }
  return lesson::count(dp, loss).with(model.named_parameters());
}

/// Ten steps send an all-reduce of every gradient, and of the loss.
inline double bill(int /*rank*/, int ranks) {
  const double elements = lesson::num_parameters() + 1;
  return lesson::kSteps * 2.0 * (ranks - 1) / ranks * elements * 8;
}

inline lesson::Lesson this_lesson() { return {/*ranks=*/{4, 2}, train, bill}; }

}  // namespace shardbook::ddp

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::ddp::this_lesson()); }
#endif
