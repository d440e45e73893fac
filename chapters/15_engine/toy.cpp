// DeepSpeed's example: initialize's four results, for gpt2's layers and batches
// of 16 in f16, with AdamW and ZeRO-2 on two ranks.
//
//   ./shardbook toy engine
//
//   engine, optimizer, loader, scheduler = deepspeed.initialize(
//       model=model, config_params=config, training_data=data)

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <string>
#include <vector>

#include "chapters/15_engine/engine.h"
#include "comm/launch.h"

using namespace shardbook;

const char* const kConfig = R"({
  "train_batch_size": 16,
  "gradient_accumulation_steps": 1,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.00001}},
  "fp16": {"enabled": true},
  "zero_optimization": {"stage": 2}
})";

/// Trains an epoch of two steps; returns the mean losses of the ranks.
std::vector<double> train(ProcessGroup& world) {
  // 1. gpt2's layers with random weights, and 32 short samples
  const ModelConfig sizes = ModelConfig::read("gpt2");
  InitOptions init;
  init.dtype = DType::kF16;
  Gpt model(sizes, init);
  engine::InitializeArgs args;
  args.training_data = engine::training_data(
      Dataset::open("walk", /*seq=*/2, sizes.vocab_size, /*seed=*/0), 32);
  // 2. The four results
  const auto config = engine::DeepSpeedConfig::parse(kConfig, "the documents");
  const auto [engine, optimizer, loader, scheduler] =
      engine::initialize(model, config, world, args);
  std::int64_t elements = 0;
  for (const Tensor& each : optimizer->parameters()) elements += each.numel();
  const std::string lines = fmt::format(
      "{} ranks, {} parameters in {}\n"
      "engine     ZeRO-{}, {} of {} samples on each rank, loss scale {}\n"
      "optimizer  {}, rate {}, {} elements on each rank\n"
      "loader     {} micro-batches\n"
      "scheduler  {}\n",
      world.size(), model.num_parameters(),
      dtype_name(model.parameters()[0].dtype()), engine->config().zero.stage,
      engine->train_micro_batch_size_per_gpu(), engine->train_batch_size(),
      engine->loss_scale(), engine->config().optimizer.type,
      optimizer->options().lr, elements, loader->size(),
      scheduler == nullptr ? "none" : "one");
  // 3. Three calls for each batch
  std::vector<double> losses;
  while (const auto batch = loader->next()) {
    const Tensor loss = language_loss((*engine)(batch->inputs), batch->targets);
    engine->backward(loss);
    engine->step();
    losses.push_back(loss.item() / world.size());
  }
  const Tensor sums =
      Tensor::from_values(losses, {static_cast<std::int64_t>(losses.size())});
  world.all_reduce(sums).wait();
  losses = sums.to_vector<double>();
  // 4. The losses, and the steps that overflowed
  if (world.rank() == 0) {
    fmt::print("{}losses     {:.6f}, {} steps skipped\n", lines,
               fmt::join(losses, " "), engine->skipped_steps());
  }
  return losses;
}

int main() {
  // 5. The same with all of it on one device
  std::vector<double> one_device, losses;
  run_ranks(2, [&](ProcessGroup& world) {
    const auto all = train(world);
    if (world.rank() == 0) losses = all;
  });
  run_ranks(1, [&](ProcessGroup& world) { one_device = train(world); });
  bool equal = losses.size() == 2;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    equal = equal && std::abs(losses[i] - one_device[i]) < 1e-3;
  }
  fmt::print("one device {:.6f}: {}\n", fmt::join(one_device, " "),
             equal ? "equal" : "DIFFERENT");
  return equal ? 0 : 1;
}
