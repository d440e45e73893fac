#include "chapters/15_engine/engine.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <utility>

#include "chapters/15_engine/internal/data_parallel_model.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/stream.h"

namespace shardbook::engine {

// --- The log -------------------------------------------------------------------

namespace {

/// Seconds, after the device has finished its work.
double now_s() {
  if (RankContext::current().device.is_cuda()) {
    Event event;
    event.record();
    event.synchronize();
  }
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

namespace internal {

/// The lines that an engine writes: every n steps, and how long its calls took.
class StepLog {
 public:
  /// Writes to stderr, on the main rank.
  StepLog(const DeepSpeedConfig& config, bool is_main)
      : is_main_(is_main),
        times_calls_(config.wall_clock_breakdown),
        is_adam_(config.optimizer.type != "SGD"),
        every_(config.steps_per_print) {}

  /// Time a call. With wall_clock_breakdown the device is synchronised on both
  /// ends, so nothing that it does overlaps another call.
  void begin(const std::string& call) {
    if (times_calls_) began_s_[call] = now_s();
  }
  void end(const std::string& call) {
    const auto began = began_s_.find(call);
    if (began == began_s_.end()) return;
    seconds_[call] += now_s() - began->second;
    began_s_.erase(began);
  }

  /// An optimizer step has ended.
  void step(std::int64_t global_steps, std::int64_t skipped,
            const OptimizerOptions& options) {
    if (is_main_ && every_ > 0 && global_steps % every_ == 0) {
      write(fmt::format(
          "step={}, skipped={}, lr={}, mom={}", global_steps, skipped,
          options.lr,
          is_adam_ ? fmt::format("({}, {})", options.beta1, options.beta2)
                   : fmt::format("{}", options.momentum)));
    }
    if (is_main_ && times_calls_) {
      std::string line = "time (ms)";
      for (const auto& [call, seconds] : seconds_) {
        line += fmt::format(" | {}: {:.2f}", call, seconds * 1e3);
      }
      write(line);
    }
    seconds_.clear();
  }

  std::function<void(const std::string& line)> write =
      [](const std::string& line) {
        std::fprintf(stderr, "%s\n", line.c_str());
      };

 private:
  const bool is_main_, times_calls_, is_adam_;
  const std::int64_t every_;
  std::map<std::string, double> began_s_, seconds_;
};

}  // namespace internal

// --- The engine ----------------------------------------------------------------

NoSync::NoSync(Engine& engine) : engine_(engine) {
  engine_.no_sync_depth_ += 1;
}
NoSync::~NoSync() { engine_.no_sync_depth_ -= 1; }

Engine::Engine(const DeepSpeedConfig& config, const BatchSizes& sizes,
               ProcessGroup& world,
               std::unique_ptr<internal::DataParallelModel> model,
               std::unique_ptr<Strategy> strategy,
               std::shared_ptr<LrScheduler> scheduler)
    : config_(config),
      sizes_(sizes),
      world_(world),
      model_(std::move(model)),
      strategy_(std::move(strategy)),
      log_(std::make_unique<internal::StepLog>(config, world.rank() == 0)) {
  // A strategy scales its loss itself
  if (model_ && config.fp16.enabled) {
    scaler_ = std::make_unique<DynamicLossScaler>(config.loss_scale());
  }
  set_lr_scheduler(std::move(scheduler));
}

Engine::~Engine() = default;

// --- Forward, backward, step -----------------------------------------------------

void Engine::check_module(const char* call) const {
  SB_CHECK(model_ != nullptr, "engine: ", call,
           " of a model that its strategy trains as a whole: stages run "
           "forward and backward in an order of their own; call train_batch");
}

bool Engine::is_gradient_accumulation_boundary() const {
  if (no_sync_depth_ > 0) return false;
  return boundary_.value_or((micro_steps_ + 1) % sizes_.accumulation == 0);
}

Tensor Engine::forward(const Tensor& inputs) {
  check_module("forward");
  log_->begin("fwd");
  Tensor x = inputs;
  if (config_.fp16.auto_cast && is_floating(x.dtype())) {
    x = to_dtype(x, DType::kF16);
  }
  // The forward decides whether gradients will leave during its backward
  const bool reduces = is_gradient_accumulation_boundary();

  // A forward for evaluation has no backward
  if (RankContext::current().grad_enabled) forward_reduces_ = reduces;
  const Tensor outputs = model_->forward(x, reduces);
  log_->end("fwd");
  return outputs;
}

void Engine::backward(const Tensor& loss) {
  check_module("backward");
  SB_CHECK(loss.numel() == 1, "engine: backward of a loss of shape ",
           shape_text(loss.shape()), "; give one number, such as a mean");
  const bool reduces = is_gradient_accumulation_boundary();
  SB_CHECK(reduces == forward_reduces_,
           "engine: the gradient accumulation boundary has changed between "
           "forward and backward; no_sync covers both, and "
           "set_gradient_accumulation_boundary comes before the forward");
  log_->begin("bwd");
  const double factor = loss_scale() / static_cast<double>(sizes_.accumulation);
  model_->before_backward(reduces, loss_scale(), factor);
  if (config_.wall_clock_breakdown) time_backward(loss);
  autograd::backward({loss},
                     {Tensor::full(loss.shape(), factor, loss.options())});
  log_->end("bwd-reduce");
  log_->end("bwd");
}

// Callbacks at the end of a backward run in the order in which they were added.
// The loss is first, before parameters whose owners wait for their messages.
void Engine::time_backward(const Tensor& loss) {
  log_->begin("bwd-inner");
  loss.add_grad_hook([this](const Tensor&) {
    autograd::at_end_of_backward([this] {
      log_->end("bwd-inner");
      log_->begin("bwd-reduce");
    });
    return Tensor();
  });
}

void Engine::step() {
  check_module("step");
  SB_CHECK(no_sync_depth_ == 0,
           "engine: step inside no_sync, where gradients have not been "
           "reduced; call it after the block has ended");
  const bool acts = is_gradient_accumulation_boundary();
  micro_steps_ += 1;
  was_applied_ = false;
  if (!acts) return;
  log_->begin("step");
  const double norm = model_->update(loss_scale());
  log_->end("step");
  finish_step(norm, config_.fp16.enabled && !std::isfinite(norm));
}

void Engine::finish_step(double norm, bool is_skipped) {
  grad_norm_ = norm;
  if (scaler_) scaler_->update(is_skipped);
  global_steps_ += 1;
  global_samples_ += sizes_.train;
  was_applied_ = !is_skipped;
  if (is_skipped) {
    skipped_steps_ += 1;
  } else if (scheduler_) {
    scheduler_->step();
    set_lr(scheduler_->lr());
  }
  log_->step(global_steps_, skipped_steps_, optimizer().options());
}

NoSync Engine::no_sync() {
  check_module("no_sync");
  SB_CHECK(config_.zero.stage < 2,
           "engine: no_sync with /zero_optimization/stage ", config_.zero.stage,
           ": its ranks keep shards of gradients, which every backward "
           "reduces; give stage 0 or 1");
  return NoSync(*this);
}

double Engine::train_batch(const std::function<Batch()>& next,
                           const LossFunction& loss_of) {
  check_module("train_batch with batches");
  RandomState& random = RankContext::current().random;
  double sum = 0;
  for (std::int64_t i = 0; i < sizes_.accumulation; ++i) {
    const Batch batch = next();
    random.step = static_cast<std::uint64_t>(global_steps_);
    random.batch = batch.slice;
    random.next_op = 0;
    const Tensor loss = loss_of(forward(batch.inputs), batch.targets);
    sum += loss.item();
    backward(loss);
    step();
  }
  random.batch = BatchSlice{};
  ProcessGroup& dp = model_->group();
  const double parts = static_cast<double>(sizes_.accumulation * dp.size());
  return sum_over_ranks(dp, sum / parts, "loss");
}

double Engine::train_batch() {
  SB_CHECK(strategy_ != nullptr,
           "engine: train_batch of a module needs its batches; give a function "
           "that returns the next one, such as the loader's next_repeating");
  RandomState& random = RankContext::current().random;
  random.step = static_cast<std::uint64_t>(global_steps_);
  random.next_op = 0;
  const StepResult result = strategy_->step(global_steps_);
  micro_steps_ += sizes_.accumulation;
  finish_step(result.grad_norm, result.was_skipped);
  return result.loss;
}

void Engine::begin_at(std::int64_t global_steps, std::int64_t skipped_steps) {
  global_steps_ = global_steps;
  skipped_steps_ = skipped_steps;
  micro_steps_ = global_steps * sizes_.accumulation;
  global_samples_ = global_steps * sizes_.train;
}

// --- What it knows -----------------------------------------------------------

Optimizer& Engine::optimizer() {
  return model_ ? model_->optimizer() : strategy_->optimizer();
}

StepResult Engine::step_result(double loss) const {
  StepResult result;
  result.loss = loss;
  result.grad_norm = grad_norm_;
  result.was_skipped = !was_applied_;
  return result;
}

double Engine::get_lr() const {
  return (model_ ? model_->optimizer() : strategy_->optimizer()).options().lr;
}

void Engine::set_lr(double lr) { optimizer().set_lr(lr); }

void Engine::set_lr_scheduler(std::shared_ptr<LrScheduler> scheduler) {
  scheduler_ = std::move(scheduler);
  if (scheduler_) set_lr(scheduler_->lr());
}

void Engine::set_log(std::function<void(const std::string& line)> log) {
  log_->write = std::move(log);
}

double Engine::loss_scale() const { return scaler_ ? scaler_->scale() : 1; }

Module& Engine::module() {
  check_module("module");
  return model_->module();
}

ProcessGroup& Engine::data_parallel_group() {
  check_module("data_parallel_group");
  return model_->group();
}

std::vector<NamedTensor> Engine::full_state() {
  return model_ ? model_->full_state() : strategy_->full_state();
}

}  // namespace shardbook::engine
