#include "chapters/05_gpipe/trainer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "chapters/05_gpipe/long_skips.h"
#include "chapters/common/run/worlds.h"
#include "core/check.h"

namespace shardbook::gpipe {
namespace {

std::shared_ptr<const LayerList> make_layers(const ModelConfig& config,
                                             const TrainerOptions& how) {
  std::shared_ptr<const LayerList> layers = layers_of(config);
  if (!how.long_skips) return layers;
  return with_long_skips(std::move(layers), config);
}

Batch batch_on_shapes(const Options& options, const Dataset& data,
                      std::int64_t rows) {
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  return data.batch(0, options.batch, BatchSlice{}, rows);
}

}  // namespace

std::vector<int> cuts_of(const Options& options, const LayerList& layers,
                         const Tensors& inputs, const std::string& balance,
                         int num_stages) {
  SB_CHECK(num_stages <= layers.size(), "--world-size ", num_stages, ": ",
           options.model, " has ", layers.size(),
           " layers; give at most one stage per layer");
  if (balance == "uniform") return cut_uniform(layers.size(), num_stages);
  if (balance == "parameters") {
    return cut_by_cost(layer_parameters(layers), num_stages);
  }
  if (balance == "time") {
    const auto model = cost_model(options);
    SB_CHECK(model != nullptr,
             "--balance time: needs a --cluster on which time passes");
    return cut_by_cost(layer_seconds(layers, inputs, options.dtype,
                                     [&](const OpEvent& event) {
                                       return model->operation(event).seconds;
                                     }),
                       num_stages);
  }
  const std::vector<int> counts = read_counts(
      "--balance", balance,
      "give uniform, parameters, time, or numbers of layers such as 2,1,3");
  SB_CHECK(static_cast<int>(counts.size()) == num_stages, "--balance ", balance,
           ": ", counts.size(), " stages for --world-size ", num_stages,
           "; each rank holds one");
  const int sum = std::accumulate(counts.begin(), counts.end(), 0);
  SB_CHECK(sum == layers.size(), "--balance ", balance, ": adds up to ", sum,
           " layers; ", options.model, " has ", layers.size());
  return cut_by_balance(layers.size(), counts);
}

void check_trainer_options(const Options& options, const TrainerOptions& how) {
  const ModelConfig config = model_config(options);
  const auto layers = make_layers(config, how);
  const auto pieces = ceil_micro_batches(options.batch, how.micro_batches);
  const Dataset data = Dataset::open(options, config);
  cuts_of(options, *layers,
          {batch_on_shapes(options, data, pieces[0].rows).inputs}, how.balance,
          options.world_size);
}

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 ProcessGroup& pp)
    : options_(options),
      how_(how),
      pp_(pp),
      config_(model_config(options)),
      data_(Dataset::open(options, config_)),
      layers_(make_layers(config_, how)),
      pieces_(ceil_micro_batches(options.batch, how.micro_batches)) {
  // Everybody knows all shapes: no rank has to send any
  const Tensors inputs = {
      batch_on_shapes(options, data_, pieces_[0].rows).inputs};
  shapes_ = trace_pieces(*layers_, pieces_, inputs, options.dtype);
  model_ = std::make_unique<PipelineModel>(
      options, layers_,
      one_stage_per_rank(
          cuts_of(options, *layers_, inputs, how.balance, pp.size())),
      pp);
  optimizer_ = make_optimizer(options.optimizer, model_->parameters(),
                              options.optimizer_options);
  pipeline_ = std::make_unique<Pipeline>(
      *model_, pp, pieces_, shapes_,
      PipelineOptions{checkpoint_from_name(how.checkpoint),
                      how.early_recompute});
  feed_.inputs = [this](int b) { return read_inputs(b); };
  feed_.loss = [this](const Tensors& out, int b) { return loss(out, b); };
}

StepResult Trainer::step(std::int64_t step) {
  step_ = step;
  const double local_loss = pipeline_->train(feed_);
  targets_.clear();
  model_->reduce_shared_gradients();
  return model_->update(options_, *optimizer_, local_loss);
}

Batch Trainer::read(int b) const {
  const MicroBatch& piece = pieces_[static_cast<std::size_t>(b)];
  return data_.batch(step_, options_.batch, piece.slice, piece.rows);
}

Tensors Trainer::read_inputs(int b) {
  Batch batch = read(b);
  if (is_last()) targets_[b] = std::move(batch.targets);
  return {std::move(batch.inputs)};
}

Tensor Trainer::loss(const Tensors& outputs, int b) {
  if (targets_.count(b) == 0) targets_[b] = read(b).targets;
  return language_loss(outputs[0], targets_.at(b));
}

// --- Predictions -------------------------------------------------------------

double Trainer::predicted_bytes() const {
  return static_cast<double>(options_.steps) *
         (pipeline_->predicted_bytes() + model_->predicted_update_bytes());
}

// What is read stays: inputs until backward, targets until the step ends. Both
// are read, and what is not needed goes.
double Trainer::predicted_input_bytes() const {
  if (!is_first() && !is_last()) return 0;
  double kept = 0, peak = 0;
  for (const MicroBatch& piece : pieces_) {
    const Batch batch = batch_on_shapes(options_, data_, piece.rows);
    const auto inputs = static_cast<double>(batch.inputs.bytes());
    const auto targets = static_cast<double>(batch.targets.bytes());
    peak = std::max(peak, kept + inputs + targets);
    kept += (is_first() ? inputs : 0) + (is_last() ? targets : 0);
  }
  return peak;
}

StagePeaks Trainer::predicted_peaks() const {
  const auto& cuts = model_->layout().cuts;
  const auto stage = static_cast<std::size_t>(pp_.rank());
  // At most four kinds: full or short, with recomputation or without
  std::map<std::pair<std::int64_t, bool>, MicroBatchMemory> measured;
  for (int b = 0; b < pipeline_->num_micro_batches(); ++b) {
    const std::int64_t rows = pieces_[static_cast<std::size_t>(b)].rows;
    StageMemoryOptions how;
    how.dtype = options_.dtype;
    how.recompute = pipeline_->recomputes(b);
    how.early_recompute = how_.early_recompute;
    if (is_last()) {
      how.loss = [&](const Tensors& outputs) {
        const MemoryScope kind(MemoryKind::kInput);
        Shape shape = outputs[0].shape();
        shape.pop_back();  // a number for each row of logits
        const Tensor targets = Tensor::empty(shape, {DType::kI64, Device()});
        const MemoryScope computed(MemoryKind::kActivation);
        return language_loss(outputs[0], targets);
      };
    }
    if (measured.count({rows, how.recompute}) != 0) continue;
    measured[{rows, how.recompute}] = measure_micro_batch(
        *layers_, cuts[stage], cuts[stage + 1], shapes_.at(rows), how);
  }
  std::vector<StageEvent> events;
  for (const Action& action : schedule(pipeline_->num_micro_batches())) {
    events.push_back(
        {action.kind == ActionKind::kBackward, action.micro_batch});
  }
  return stage_peaks(events, [&](int b) -> const MicroBatchMemory& {
    return measured.at(
        {pieces_[static_cast<std::size_t>(b)].rows, pipeline_->recomputes(b)});
  });
}

MemoryBill Trainer::bill() const {
  MemoryBill bill = stage_bill(options_, model_->parameters(),
                               model_->stage(pp_.rank()).buffers());
  const bool trains = options_.steps > 0;
  bill[MemoryKind::kInput] = trains ? predicted_input_bytes() : 0;
  const StagePeaks peaks = trains ? predicted_peaks() : StagePeaks{};
  bill[MemoryKind::kGradient] = peaks.gradients;
  bill[MemoryKind::kActivation] = peaks.activations;
  return bill;
}

// --- The yardstick -----------------------------------------------------------

ReferenceRun train_one_device_in_reverse(const Options& options,
                                         const TrainerOptions& how) {
  std::vector<MicroBatch> pieces =
      ceil_micro_batches(options.batch, how.micro_batches);
  std::reverse(pieces.begin(), pieces.end());
  if (!how.long_skips) return train_one_device(options, pieces);

  // Skips are this chapter's own: all layers as one stage
  const ModelConfig config = model_config(options);
  const auto layers = make_layers(config, how);
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
