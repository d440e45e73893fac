// The examples in the comments of the Accelerator's headers, as code that
// compiles.

#include <memory>

#include "chapters/15_engine/accelerator.h"

namespace shardbook::accelerate::examples {

// --- chapters/15_engine/plugins.h
void choose_a_plugin() {
  AcceleratorOptions options;
  options.plugin = DeepSpeedPlugin{/*zero_stage=*/2};
}

// --- chapters/15_engine/accelerator.h
void one_script(const AcceleratorOptions& options, ProcessGroup& world,
                Module& gpt, const engine::OptimizerConfig& adamw,
                const engine::TrainingData& data,
                const std::shared_ptr<engine::LrScheduler>& schedule) {
  accelerate::Accelerator acc(options, world);
  auto [model, opt, loader, sched] =
      acc.prepare(gpt, adamw, {data, /*batch_size=*/4}, {schedule});
  while (const auto batch = loader.next()) {
    const auto micro_step = acc.accumulate(model);
    const Tensor loss = model.loss(*batch);
    acc.backward(loss);
    if (acc.sync_gradients()) {
      acc.clip_grad_norm_(model.parameters(), 1.0);
    }
    opt.step();
    sched.step();
    opt.zero_grad();
  }
}

}  // namespace shardbook::accelerate::examples
