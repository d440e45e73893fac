#include "chapters/04_model_parallel/model_parallel_strategy.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "chapters/04_model_parallel/bill.h"
#include "chapters/common/models/checkpoint.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/run/parity.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::model_parallel {

Settings on_one_device(const Settings& settings) {
  Settings one = settings;
  one.variant = "single";
  if (settings.variant != "pipeline") one.split_size = 0;
  return one;
}

Tensor input_on_shapes(const Options& options, std::int64_t rows) {
  if (model_config(options).is_image()) {
    return Tensor::empty({rows, 3, options.image_size, options.image_size},
                         {options.dtype, Device::meta()});
  }
  return Tensor::empty({rows, options.seq}, {DType::kI64, Device::meta()});
}

std::int64_t rows_of_split(const Options& options, const Settings& settings) {
  const bool is_whole =
      settings.variant == "model_parallel" || settings.split_size == 0;
  return is_whole ? options.batch
                  : std::min(settings.split_size, options.batch);
}

int cut_of(const Options& options, const Settings& settings,
           const LayerList& layers) {
  if (settings.partition == "half") return half_of(model_config(options));
  return cuts_of(options, settings.partition, layers, /*num_stages=*/2, [&] {
    return Tensors{input_on_shapes(options, rows_of_split(options, settings))};
  })[1];
}

Tensor one_hot(const Tensor& labels, std::int64_t classes, DType dtype) {
  std::vector<float> values(static_cast<std::size_t>(labels.numel() * classes));
  if (!labels.is_meta()) {
    std::size_t row = 0;
    for (const std::int64_t label : labels.to_vector<std::int64_t>()) {
      SB_CHECK(0 <= label && label < classes, "one_hot: label ", label, " of ",
               classes, " classes");
      values[row++ * static_cast<std::size_t>(classes) +
             static_cast<std::size_t>(label)] = 1;
    }
  }
  const Tensor rows =
      Tensor::from_values(values, {labels.numel(), classes}, labels.device());
  return to_dtype(rows, dtype);
}

ModelParallelStrategy::ModelParallelStrategy(const Options& options,
                                             const Settings& settings,
                                             const std::vector<Device>& devices,
                                             int num_threads)
    : options_(options),
      settings_(settings),
      config_(model_config(options)),
      data_(Dataset::open(options, config_)),
      layers_(layers_of(config_)),
      cut_(cut_of(options, settings, *layers_)) {
  SB_CHECK(settings.loss == "cross_entropy" || config_.is_image(),
           "--loss mse: for images; ", options.model,
           " is trained with --loss cross_entropy");
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  if (settings.variant == "single") {
    single_ = std::make_unique<Stage>(*layers_, 0, layers_->size(), init);
  } else if (settings.variant == "pipeline") {
    parallel_ = std::make_unique<PipelineParallel>(
        *layers_, cut_, devices, init, settings.split_size, num_threads);
  } else {
    parallel_ = std::make_unique<ModelParallel>(*layers_, cut_, devices, init,
                                                num_threads);
  }
  for (int i = 0; i < settings.num_devices(); ++i) {
    if (!options.load.empty()) load_model(options.load, part(i), config_);
    optimizers_.push_back(make_optimizer(
        options.optimizer, part(i).parameters(), options.optimizer_options));
  }
}

ModelParallelStrategy::~ModelParallelStrategy() = default;

Stage& ModelParallelStrategy::part(int device) {
  return single_ != nullptr ? *single_ : parallel_->half(device);
}

std::vector<NamedTensor> ModelParallelStrategy::named_parameters() {
  return single_ != nullptr ? single_->named_parameters()
                            : parallel_->named_parameters();
}

CopyLedger* ModelParallelStrategy::copies() {
  return parallel_ == nullptr ? nullptr : parallel_->ledger().get();
}

Tensor ModelParallelStrategy::forward(const Tensor& inputs) {
  if (parallel_ != nullptr) return (*parallel_)(inputs);
  return forward_in_splits(*single_, inputs, settings_.split_size);
}

Tensor ModelParallelStrategy::loss_of(const Tensor& output,
                                      const Tensor& targets) {
  // The labels must be where the output is
  const Tensor labels =
      parallel_ == nullptr
          ? targets
          : send_labels(targets, output.device(), parallel_->ledger());
  if (settings_.loss == "cross_entropy") return language_loss(output, labels);
  return mse_loss(output, one_hot(labels, config_.num_labels, output.dtype()));
}

StepResult ModelParallelStrategy::step(const Batch& batch) {
  RandomState& random = RankContext::current().random;
  random.batch = batch.slice;
  random.next_op = 0;
  StepResult result;
  {
    const Tensor loss = loss_of(forward(batch.inputs), batch.targets);
    for (const auto& optimizer : optimizers_) {
      optimizer->parameters()[0].device().note_held(MemoryKind::kActivation);
    }
    // One graph, but each device's part runs on its own thread
    loss.backward();
    result.loss = loss.item();
  }
  result.grad_norm = update();
  return result;
}

double ModelParallelStrategy::update() {
  for (const auto& optimizer : optimizers_) {
    optimizer->set_lr(optimizers_[0]->options().lr);
  }
  // On all devices at the same time, each with its own parameters
  const auto on_each = [this](const std::function<void(std::size_t)>& work) {
    if (single_ != nullptr) return work(0);
    for (std::size_t i = 0; i < 2; ++i) {
      parallel_->queue(static_cast<int>(i)).enqueue([&work, i] { work(i); });
    }
    synchronize({&parallel_->queue(0), &parallel_->queue(1)});
  };
  double norm = 0, factor = 1;
  if (options_.clip > 0 || !options_.log.empty()) {
    std::vector<double> norms(optimizers_.size());
    on_each([&](std::size_t i) {
      norms[i] = grad_norm(optimizers_[i]->parameters());
    });
    for (const double each : norms) norm += each * each;
    norm = std::sqrt(norm);
  }
  if (options_.clip > 0) factor = clip_factor(norm, options_.clip);
  on_each([&](std::size_t i) {
    optimizers_[i]->step(factor);
    for (const Tensor& each : optimizers_[i]->parameters()) each.clear_grad();
  });
  return norm;
}

std::vector<Bill> ModelParallelStrategy::bills() {
  const std::vector<double> traffic = step_traffic(options_, settings_, *this);
  const std::vector<MemoryBill> memory =
      memory_bills(options_, settings_, *this);
  const double seconds = step_s(options_, settings_, *this);
  std::vector<Bill> bills;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    bills.push_back(
        {traffic[i] * static_cast<double>(options_.steps), memory[i], seconds});
  }
  return bills;
}

std::vector<NamedTensor> ModelParallelStrategy::full_state() {
  std::vector<NamedTensor> state;
  for (int i = 0; i < settings_.num_devices(); ++i) {
    for (NamedTensor& each : state_of(part(i))) state.push_back(each);
  }
  return state;
}

TrainingState ModelParallelStrategy::state() {
  TrainingState state;
  for (int i = 0; i < settings_.num_devices(); ++i) {
    add_whole(state, state_of(part(i)),
              *optimizers_[static_cast<std::size_t>(i)]);
  }
  const std::int64_t rows = rows_of_split(options_, settings_);
  agree_on_images(state, options_, {BatchSlice{}, rows});
  return state;
}

ReferenceRun train_reference(const Options& options, const Settings& settings) {
  Options quiet = options;
  quiet.log.clear();
  RankContext& context = RankContext::current();
  ModelParallelStrategy strategy(quiet, on_one_device(settings),
                                 {context.device}, context.num_threads);
  return train_yardstick(
      quiet, strategy.optimizer(), strategy.named_parameters(),
      [&](std::int64_t step) { return strategy.step(strategy.batch(step)); });
}

}  // namespace shardbook::model_parallel
