#include "chapters/15_engine/engine_strategy.h"

#include <utility>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/15_engine/internal/data_parallel_model.h"
#include "chapters/common/sharded/loss.h"

namespace shardbook::engine {
namespace {

/// The options' optimizer, which already includes the config's.
InitializeArgs args_of(const Options& options) {
  OptimizerConfig optimizer;
  optimizer.type = options.optimizer == "sgd"     ? "SGD"
                   : options.optimizer == "adamw" ? "AdamW"
                                                  : "Adam";
  optimizer.params = options.optimizer_options;
  InitializeArgs args;
  args.optimizer = optimizer;
  return args;
}

DeepSpeedConfig config_of(const Options& options, DeepSpeedConfig config) {
  // The program sets the learning rate before each step, for the run on one
  // device as well
  config.scheduler = {};
  if (options.is_prediction) config.steps_per_print = 0;
  // On shapes, calls take no time that could be measured
  if (options.backend == "sim") config.wall_clock_breakdown = false;
  return config;
}

}  // namespace

ModuleStrategy::ModuleStrategy(const Options& options,
                               const DeepSpeedConfig& config, ProcessGroup& dp)
    : options_(options),
      dp_(dp),
      // ZeRO's shards leave the host one by one
      loaded_(config.zero.stage == 0 ? build_model(options)
                                     : zero_fsdp::build_on_host(options)),
      data_(Dataset::open(options, loaded_.config)),
      engine_(initialize(*loaded_.model, config_of(options, config), dp,
                         args_of(options))
                  .engine) {
  engine_->begin_at(options.first_step);
}

StepResult ModuleStrategy::step(std::int64_t step) {
  bool is_boundary = false;
  const Tensor loss = data_parallel_gradients(
      options_, dp_, data_, step, engine_->gradient_accumulation_steps(),
      [&](bool is_last) {
        // Do not count micro-steps: a run on shapes skips those that are alike
        is_boundary = is_last;
        engine_->set_gradient_accumulation_boundary(is_last);
      },
      [&](const Tensor& inputs) { return (*engine_)(inputs); },
      loss_over_ranks(loaded_.config, *loaded_.model, dp_,
                      engine_->gradient_accumulation_steps()),
      [&](const Tensor& loss) {
        engine_->backward(loss);
        if (!is_boundary) engine_->step();
      });
  const double mean = loss.item();
  engine_->step();
  return engine_->step_result(mean);
}

std::vector<Bill> ModuleStrategy::bills() {
  const double d = dp_.size();
  Bill bill = engine_->model().bill(options_, loaded_.config,
                                    engine_->train_micro_batch_size_per_gpu(),
                                    engine_->gradient_accumulation_steps(),
                                    engine_->skipped_steps() - skipped_before_);
  // The all-reduce of the loss, and of a balancing loss' shares
  bill.bytes +=
      static_cast<double>(options_.steps) *
      (2 * (d - 1) / d * 8 + balancing_bytes(loaded_.config, dp_.size()));
  return {bill};
}

TrainingState ModuleStrategy::state() {
  TrainingState state = engine_->state();
  agree_on_images(
      state, options_,
      strided_micro_batches(options_.batch,
                            engine_->gradient_accumulation_steps())[0]);
  if (options_.dtype != DType::kF16) return state;
  state.numbers["skipped steps"] =
      static_cast<double>(engine_->skipped_steps());
  state.loaded = [this, of_model = state.loaded](
                     const std::map<std::string, double>& numbers) {
    if (of_model) of_model(numbers);
    skipped_before_ = static_cast<std::int64_t>(numbers.at("skipped steps"));
    engine_->begin_at(options_.first_step, skipped_before_);
  };
  if (auto* scaler = engine_->scaler()) add_loss_scale(state, *scaler);
  return state;
}

ConfiguredStrategy::ConfiguredStrategy(const Options& options,
                                       const DeepSpeedConfig& config,
                                       const BatchSizes& sizes,
                                       ProcessGroup& world,
                                       std::unique_ptr<Strategy> inner)
    : inner_(*inner),
      engine_(config_of(options, config), sizes, world, nullptr,
              std::move(inner), nullptr) {
  engine_.begin_at(options.first_step);
}

StepResult ConfiguredStrategy::step(std::int64_t) {
  const double loss = engine_.train_batch();
  return engine_.step_result(loss);
}

}  // namespace shardbook::engine
