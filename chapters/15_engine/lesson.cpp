// The engine on one screen: three calls train a model, and a config chooses the
// strategy.
//
//   ./shardbook lesson engine
// Needed: 14_hybrid_3d. The last chapter.

#include "chapters/common/lesson.h"
#include "chapters/15_engine/engine.h"

namespace shardbook::engine {

// --- the strategy
/// Chooses batches of 12, no clipping, SGD with a rate of 0.1 and a stage of
/// ZeRO, by DeepSpeed's keys. Stage 0 is DDP; 1, 2 and 3 shard optimizer state,
/// gradients and parameters, of SGD only if the config allows it.
inline std::string config_of(int stage) {
  return R"({"train_batch_size": 12, "gradient_clipping": 0,
             "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
             "zero_allow_untested_optimizer": true,
             "zero_optimization": {"stage": )" +
         std::to_string(stage) + "}}";
}
// --- end

inline lesson::Result train_stage(ProcessGroup& world, int stage) {
  // 1. The model knows nothing of ranks
  Gpt model(lesson::config(), lesson::init());
  // 2. The config chooses what wraps it
  const Initialized made = initialize(
      model, DeepSpeedConfig::parse(config_of(stage), "lesson"), world);
  Engine& engine = *made.engine;
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 3. Three calls, whatever was chosen
    const Batch batch = lesson::batch(step, world.rank(), world.size());
    const Tensor mean = language_loss(engine(batch.inputs), batch.targets);
    engine.backward(mean);
    engine.step();
    loss = lesson::mean_over(mean, world);
  }
  return lesson::count(world, loss).with(engine.full_state());
}

inline lesson::Result train(ProcessGroup& world) {
  return train_stage(world, /*stage=*/2);
}

/// Rank 0's weights travel once. Ten times follow stage 2's reduce-scatter of
/// gradients and all-gather of weights, the loss, and the norm.
inline double bill(int /*rank*/, int d) {
  const double weights = lesson::num_parameters();
  const double elements = weights + lesson::kSteps * 2 * (weights + 2);
  return elements * (d - 1) / d * 8;
}

inline lesson::Lesson this_lesson() { return {/*ranks=*/{4, 2}, train, bill}; }

}  // namespace shardbook::engine

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::engine::this_lesson()); }
#endif
