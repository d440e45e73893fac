#include "chapters/00_single_device/single_device.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/llama_experts.h"
#include "chapters/common/run/textbook.h"
#include "core/check.h"
#include "core/ops.h"

namespace shardbook::single_device {

// --- Training --------------------------------------------------------------------

void add_options(CommandLine& line, SingleDeviceOptions& setup) {
  line.add({"--micro-batches", may_differ::kSums}, &setup.num_micro_batches,
           "pieces of a batch, one after another", 1);
  line.add({"--recompute", may_differ::kPlace}, &setup.recompute,
           "keep only the blocks' inputs; compute the rest again");
  line.add({"--master-weights",
            "a checkpoint has the copies, and a run without them does not load "
            "it"},
           &setup.master_weights, "f32 copies of 16-bit weights");
  line.add({"--cuda-graphs", may_differ::kPlace}, &setup.cuda_graphs,
           "with --device cuda: record forward and backward, then launch "
           "them as a whole");
}

SingleDevice::SingleDevice(const Options& options,
                           const SingleDeviceOptions& setup)
    : options_(options),
      setup_(setup),
      loaded_(build_model(options)),
      data_(Dataset::open(options, loaded_.config)),
      optimizer_(make_optimizer(options.optimizer, loaded_.model->parameters(),
                                options.optimizer_options)),
      scaler_(options.dtype == DType::kF16 ? DynamicLossScaler(setup.loss_scale)
                                           : DynamicLossScaler({.scale = 1})) {
  strided_micro_batches(options.batch, setup.num_micro_batches);  // or an Error
  SB_CHECK(setup.num_micro_batches == 1 ||
               !loaded_.config.llama.has_balancing_loss(),
           "--micro-batches ", setup.num_micro_batches, ": ",
           kBalancingLossInParts);
  // Recompute activations
  set_recompute(*loaded_.model, setup.recompute);

  // Keep f32 copies of 16-bit weights
  if (setup.master_weights) {
    SB_CHECK(options.dtype == DType::kBF16 || options.dtype == DType::kF16,
             "--master-weights: needs --dtype bf16 or f16; ",
             dtype_name(options.dtype), " weights are their own masters");
    optimizer_->keep_master_copies();
  }

  // Launch graphs
  if (setup.cuda_graphs && RankContext::current().device.is_cuda()) {
    graphs_ = std::make_unique<PieceGraphs>(options, *loaded_.model, data_);
  }
}

StepResult SingleDevice::step(std::int64_t step) {
  StepResult result;
  if (graphs_ != nullptr) {
    result.loss =
        graphs_->accumulate(step, setup_.num_micro_batches, scaler_.scale());
    return update(result);
  }
  // Accumulate the gradients of all pieces
  result.loss = accumulate_gradients(options_, *loaded_.model, data_, step,
                                     setup_.num_micro_batches, scaler_.scale());

  // Keep the balancing loss, which is reported apart
  if (const auto balancing = balancing_loss(*loaded_.model)) {
    balancing_losses_.push_back(*balancing);
  }
  return update(result);
}

StepResult SingleDevice::update(StepResult result) {
  if (options_.dtype != DType::kF16) {
    result.grad_norm = update_parameters(options_, *optimizer_);
    return result;
  }
  result.grad_norm = update_unscaled(options_, *optimizer_, scaler_);
  result.was_skipped = !std::isfinite(result.grad_norm);
  last_step_updated_ = !result.was_skipped;
  if (last_step_updated_) num_updates_ += 1;
  return result;
}

std::vector<NamedTensor> SingleDevice::full_state() {
  return state_of(*loaded_.model);
}

TrainingState SingleDevice::state() {
  TrainingState state;
  add_whole(state, state_of(*loaded_.model), *optimizer_);
  agree_on_images(
      state, options_,
      strided_micro_batches(options_.batch, setup_.num_micro_batches)[0]);
  if (options_.dtype != DType::kF16) return state;
  state.numbers["updates"] = static_cast<double>(num_updates_);
  state.loaded = [this](const std::map<std::string, double>& numbers) {
    num_updates_ = static_cast<std::int64_t>(numbers.at("updates"));
  };
  add_loss_scale(state, scaler_);
  return state;
}

bool SingleDevice::has_predictable_time() const {
  if (options_.dtype != DType::kF16) return true;
  return last_step_updated_ && (num_updates_ > 1 || options_.steps == 1);
}

std::string SingleDevice::remarks() {
  if (balancing_losses_.empty()) return "";
  return fmt::format(
      "balancing loss {:.4f} in the first step, {:.4f} in the last ({} where "
      "all experts are chosen equally often); {} times it is in the loss\n",
      balancing_losses_.front(), balancing_losses_.back(),
      loaded_.config.llama.experts_per_token,
      loaded_.config.llama.router_aux_loss_coef);
}

std::vector<std::pair<std::string, std::string>> SingleDevice::more() {
  if (balancing_losses_.empty()) return {};
  return {{"balancing_losses", nlohmann::json(balancing_losses_).dump()}};
}

ReferenceRun train_plain(const Options& options, std::int64_t num_micro_batches,
                         const LossScaleOptions& loss_scale) {
  if (options.dtype != DType::kF16) {
    return train_one_device(options, num_micro_batches);
  }
  // The plain run scales its loss, too, to skip the same steps
  Options quiet = options;
  quiet.log.clear();
  SingleDeviceOptions plain;
  plain.num_micro_batches = num_micro_batches;
  plain.loss_scale = loss_scale;
  SingleDevice device(quiet, plain);
  ReferenceRun run;
  run.losses = train(quiet, device.optimizer(), /*is_main=*/false,
                     [&](std::int64_t step) { return device.step(step); })
                   .losses;
  run.parameters = device.model().model->named_parameters();
  return run;
}

MemoryBill SingleDevice::bill() const {
  MemoryBill bill = single_device_bill(
      options_, loaded_.config,
      strided_micro_batches(options_.batch, setup_.num_micro_batches),
      setup_.recompute);
  // The first update creates the optimizer's state; f16 may have skipped all
  if (options_.dtype == DType::kF16 && num_updates_ == 0) {
    bill[MemoryKind::kGradient] = bill[MemoryKind::kOptimizerState] = 0;
  }
  if (setup_.master_weights) {
    bill[MemoryKind::kOptimizerState] +=
        4 * static_cast<double>(loaded_.model->num_parameters());
  }
  return bill;
}

double SingleDevice::step_s() const {
  if (!textbook::has_model_times(options_, loaded_.config)) {
    return kNotPredicted;
  }
  // The time does not depend on how the batch is cut
  const auto whole = textbook::model_times(options_, loaded_.config,
                                           static_cast<double>(options_.batch),
                                           setup_.recompute);
  return whole.forward() + whole.backward();
}

}  // namespace shardbook::single_device
