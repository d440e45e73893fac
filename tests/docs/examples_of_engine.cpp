// The examples in the comments of the engine chapter's headers, as code that
// compiles.

#include <vector>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/strategies.h"

namespace shardbook::engine::examples {

// --- chapters/15_engine/deepspeed_config.h
void config_of_a_text(const std::string& text) {
  DeepSpeedConfig config = DeepSpeedConfig::parse(text, "ds.json");
  BatchSizes sizes = resolve_batch(config.batch, /*dp=*/4);
  config.to_json();  // every key, with its value
}

// --- chapters/15_engine/engine.h
void three_calls(Module& model, ProcessGroup& world,
                 const std::vector<Batch>& batches) {
  DeepSpeedConfig config = DeepSpeedConfig::read("ds.json");
  auto engine = engine::initialize(model, config, world);
  for (const Batch& batch : batches) {
    Tensor loss = language_loss((*engine)(batch.inputs), batch.targets);
    engine->backward(loss);
    engine->step();
  }
}

// --- chapters/15_engine/strategies.h
void choose_a_strategy(const Options& options, const DeepSpeedConfig& config,
                       ProcessGroup& world) {
  Choice choice = choose(options, config);  // or an Error with the reason
  DeviceMesh mesh(world, choice.topology);
  const auto strategy = choice.make(options, mesh);
}

}  // namespace shardbook::engine::examples
