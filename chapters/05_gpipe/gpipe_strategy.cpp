#include "chapters/05_gpipe/gpipe_strategy.h"

#include <algorithm>
#include <utility>

#include "chapters/05_gpipe/long_skips.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"

namespace shardbook::gpipe {
namespace {

std::shared_ptr<const LayerList> make_layers(const ModelConfig& config,
                                             const StrategyOptions& setup) {
  std::shared_ptr<const LayerList> layers = layers_of(config);
  if (!setup.long_skips) return layers;
  return with_long_skips(std::move(layers), config);
}

std::vector<int> stage_cuts(const Options& options,
                            const StrategyOptions& setup,
                            const LayerList& layers, int num_stages,
                            const pipeline::LanguageFeed& feed) {
  SB_CHECK(num_stages <= layers.size(), "--world-size ", num_stages, ": ",
           options.model, " has ", layers_text(options, layers.size()),
           "; give at most one stage per layer");
  return cuts_of(options, setup.partition, layers, num_stages,
                 [&] { return feed.example(feed.pieces()[0].rows); });
}

}  // namespace

void add_options(CommandLine& line, StrategyOptions& setup) {
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "pieces of a batch, each ceil(batch / n) samples", 1);
  line.add({"--partition", may_differ::kPlace}, &setup.partition,
           kPartitionHelp);
  add_recompute(line, setup.recompute, setup.early_recompute);
  line.add("--long-skips", &setup.long_skips,
           "connect block i with block L-1-i, as U-Nets do");
  line.refuse("--balance", "this option is called --partition");
}

void check_strategy_options(const Options& options,
                            const StrategyOptions& setup) {
  SB_CHECK(!setup.long_skips || (options.save.empty() && options.load.empty()),
           "--long-skips: a saved model does not record them; leave out "
           "--save and --load");
  const ModelConfig config = model_config(options);
  const auto layers = make_layers(config, setup);
  const auto pieces = ceil_micro_batches(options.batch, setup.micro_batches);
  const Dataset data = Dataset::open(options, config);
  stage_cuts(options, setup, *layers, options.world_size,
             pipeline::LanguageFeed(options, data, pieces));
}

std::string figure(const Options& options, const StrategyOptions& setup) {
  const auto pieces = ceil_micro_batches(options.batch, setup.micro_batches);
  const pipeline::Schedule schedule =
      gpipe::schedule(options.world_size, static_cast<int>(pieces.size()));
  return draw(schedule, pipeline::replay(schedule));
}

// --- The mini-batch ----------------------------------------------------------

Tensors GpipeFeed::inputs(int micro_batch) {
  Batch rows = batch(micro_batch);
  if (reads_both_) targets_[micro_batch] = std::move(rows.targets);
  return {std::move(rows.inputs)};
}

Tensor GpipeFeed::loss(int micro_batch, const Tensors& outputs) {
  if (targets_.count(micro_batch) == 0) {
    targets_[micro_batch] = batch(micro_batch).targets;
  }
  return language_loss(outputs[0], targets_.at(micro_batch));
}

// --- Training ----------------------------------------------------------------

GpipeStrategy::GpipeStrategy(const Options& options,
                             const StrategyOptions& setup, ProcessGroup& pp)
    : options_(options),
      pp_(pp),
      data_(Dataset::open(options, model_config(options))),
      feed_(options, data_,
            ceil_micro_batches(options.batch, setup.micro_batches),
            /*reads_both=*/pp.size() == 1) {
  engine_options_.recompute = pipeline::recompute_from_name(setup.recompute);
  engine_options_.early_recompute = setup.early_recompute;
  engine_options_.reads_losses_late = true;
  const auto layers = make_layers(model_config(options), setup);
  const auto cuts = stage_cuts(options, setup, *layers, pp.size(), feed_);
  model_ = std::make_unique<PipelineModel>(options, layers,
                                           one_stage_per_rank(cuts), pp);
  optimizer_ = make_optimizer(options.optimizer, model_->parameters(),
                              options.optimizer_options);
  const int num_micro_batches = static_cast<int>(feed_.pieces().size());
  engine_ = std::make_unique<pipeline::Engine>(
      schedule(pp.size(), num_micro_batches), *model_, pp, feed_, nullptr,
      engine_options_);
}

StepResult GpipeStrategy::step(std::int64_t step) {
  feed_.set_first_step(step);
  engine_->run();
  feed_.end_step();
  // Add losses in the order of the backwards, as one device does
  double loss = 0;
  if (pp_.rank() == pp_.size() - 1) {
    for (int b = engine_->schedule().num_micro_batches; b-- > 0;) {
      loss += engine_->loss(b);
    }
  }
  model_->reduce_shared_gradients();
  return model_->update(options_, *optimizer_, loss);
}

// --- The yardstick -----------------------------------------------------------

ReferenceRun train_one_device_in_reverse(const Options& options,
                                         const StrategyOptions& setup) {
  std::vector<MicroBatch> pieces =
      ceil_micro_batches(options.batch, setup.micro_batches);
  std::reverse(pieces.begin(), pieces.end());
  if (!setup.long_skips) {
    return train_one_device(options, pieces, {.defers_statistics = true});
  }

  // Only this chapter has skips: build all layers as one stage
  const ModelConfig config = model_config(options);
  const auto layers = make_layers(config, setup);
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  Stage model(*layers, 0, layers->size(), init);
  const Dataset data = Dataset::open(options, config);
  const auto optimizer = make_optimizer(options.optimizer, model.parameters(),
                                        options.optimizer_options);
  Options quiet = options;
  quiet.log.clear();
  return train_yardstick(
      quiet, *optimizer, model.named_parameters(), [&](std::int64_t step) {
        StepResult result;
        result.loss = accumulate_gradients(quiet, model, data, step, pieces);
        result.grad_norm = update_parameters(quiet, *optimizer);
        return result;
      });
}

}  // namespace shardbook::gpipe
