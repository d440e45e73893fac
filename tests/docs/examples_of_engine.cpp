// The examples in the comments of the engine chapter's headers, as code that
// compiles.

#include <optional>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/strategies.h"

namespace shardbook::engine::examples {

// --- chapters/15_engine/deepspeed_config.h
void config_of_a_text(const std::string& text) {
  DeepSpeedConfig config = DeepSpeedConfig::parse(text, "ds.json");
  BatchSizes sizes = resolve_batch(config.batch, /*dp=*/4);
  config.to_json();  // every key, with its value
}

// --- chapters/15_engine/loader.h
void loader_of_a_dataset(const Dataset& dataset, std::uint64_t seed,
                         const ProcessGroup& dp) {
  Loader loader(training_data(dataset), {4, seed}, dp);
  while (const std::optional<Batch> batch = loader.next()) {
  }
}

// --- chapters/15_engine/engine.h
void three_calls(Module& model, ProcessGroup& world,
                 const InitializeArgs& args) {
  DeepSpeedConfig config = DeepSpeedConfig::read("ds.json");
  auto [engine, optimizer, loader, scheduler] =
      engine::initialize(model, config, world, args);
  for (std::int64_t i = 0; i < loader->size(); ++i) {
    const Batch batch = loader->next_repeating();
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
