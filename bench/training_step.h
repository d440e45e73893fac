#pragma once

// The training step that the benchmarks beside PyTorch measure.

#include <memory>
#include <string>

#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"
#include "core/optim.h"

namespace shardbook::bench {

/// A model, its optimizer and one batch of random data.
struct TrainingStep {
  std::unique_ptr<Module> model;
  std::unique_ptr<Optimizer> optimizer;
  Batch batch;

  /// Zeroes the gradients, forward, loss, backward, update. `forward` is `*model`,
  /// or a strategy's wrapper around it.
  template <typename Forward>
  void run(Forward& forward) {
    model->clear_grad();
    language_loss(forward(batch.inputs), batch.targets).backward();
    optimizer->step();
  }
};

/// With the options' model, dtype and sizes. The batch differs from rank to rank.
inline std::shared_ptr<TrainingStep> make_step(Options options,
                                               const std::string& optimizer,
                                               int rank = 0) {
  options.data = "random";
  auto step = std::make_shared<TrainingStep>();
  const ModelConfig config = ModelConfig::read(options.model);
  InitOptions init;
  init.dtype = options.dtype;
  step->model = make_model(config, init);
  step->optimizer = make_optimizer(optimizer, step->model->parameters(),
                                   options.optimizer_options);
  step->batch = Dataset::open(options, config)
                    .batch(rank, options.batch, BatchSlice{}, options.batch);
  return step;
}

}  // namespace shardbook::bench
