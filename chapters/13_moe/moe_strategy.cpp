#include "chapters/13_moe/moe_strategy.h"

#include <algorithm>
#include <cmath>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/13_moe/bill.h"
#include "chapters/13_moe/load.h"
#include "chapters/common/models/checkpoint.h"
#include "core/check.h"

namespace shardbook::moe {
namespace {

ModelConfig gpt_config(const Options& options) {
  const ModelConfig config = model_config(options);
  SB_CHECK(config.type == "gpt2", "--model ", options.model,
           ": experts stand in the place of a GPT's MLPs; give gpt-nano, gpt2 "
           "or another one of its family");
  return config;
}

zero::ZeroOptions zero_options(const StrategyOptions& setup,
                               const Options& options, double loss_scale) {
  zero::ZeroOptions zero;
  zero.stage = setup.zero_stage;
  zero.clip = options.clip;
  zero.loss_scale = loss_scale;
  zero.offload_optimizer = setup.cpu_offload;
  return zero;
}

/// A GPT of these layers, with the options' seed and dtype.
std::unique_ptr<Gpt> build_gpt(const Options& options,
                               const ModelConfig& config,
                               const LayerFactory& layers) {
  const InitOptions init = {.seed = options.seed, .dtype = options.dtype};
  return std::make_unique<Gpt>(config, init, layers);
}

}  // namespace

MoeStrategy::MoeStrategy(const Options& options, const StrategyOptions& setup,
                         DeviceMesh& mesh)
    : options_(options),
      setup_(setup),
      mesh_(mesh),
      dp_(mesh.group("edp-ep")),
      replicas_(setup.moe.expert_tensor_parallel ? mesh.group("edp")
                                                 : mesh.group("edp-tp")),
      config_(gpt_config(options)),
      data_(Dataset::open(options, config_)),
      record_(std::make_shared<MoeRecord>()) {
  check_strategy_options(options, setup);
  check_even_batch(options, dp_.size(), setup.micro_batches, "--micro-batches");
  setup_.ep = mesh.size("ep");
  const int t = mesh.size("tp");
  ProcessGroup& tp = mesh.group("tp");

  // Dense layers as one device has them, or cut over TP; experts for MLPs
  if (t > 1) layers_ = tensor_parallel::layers(config_, tp);
  const MoeGroups groups = {
      .ep = &mesh.group("ep"),
      .tp = &tp,
      .ep_stride = setup.data_before_expert ? mesh.size("edp") : 1};
  layers_.mlp = moe_mlp(setup.moe, groups, record_);
  const std::int64_t rows = padded_vocabulary(config_.vocab_size, t);
  ModelConfig padded = config_;
  padded.vocab_size = rows;
  model_ = build_gpt(options, padded, layers_);
  if (!options.load.empty()) {
    load_model(options.load, *model_,
               part_of(layout_, mesh_.world().rank(), rows));
  }
  make_optimizers();
}

void MoeStrategy::make_optimizers() {
  std::vector<NamedTensor> dense, experts;
  const int here = mesh_.world().rank();
  for (const NamedTensor& each : model_->named_parameters()) {
    (is_expert(each.name) ? experts : dense).push_back(each);
    (is_expert(each.name) ? experts_ : dense_).push_back(each.tensor);
    if (is_first_holder(layout_, each.name, here)) own_.push_back(each.tensor);
  }
  if (setup_.zero_stage == 0) {
    optimizer_ = make_optimizer(options_.optimizer, model_->parameters(),
                                options_.optimizer_options);
    return;
  }

  // Experts' gradients are divided by dp: by ZeRO's group inside ZeRO, and by
  // the rest of dp as by a loss scale
  const double left = static_cast<double>(dp_.size()) / replicas_.size();
  dense_part_ = std::make_unique<ParameterSubset>(dense);
  dense_zero_ =
      zero::make_zero(*dense_part_, dp_, zero_options(setup_, options_, 1),
                      options_.optimizer, options_.optimizer_options);
  if (experts.empty()) return;
  expert_part_ = std::make_unique<ParameterSubset>(experts);
  expert_zero_ = zero::make_zero(
      *expert_part_, replicas_, zero_options(setup_, options_, left),
      options_.optimizer, options_.optimizer_options);
}

std::vector<zero::ZeroOptimizer*> MoeStrategy::zeros() const {
  std::vector<zero::ZeroOptimizer*> all;
  if (dense_zero_) all.push_back(dense_zero_.get());
  if (expert_zero_) all.push_back(expert_zero_.get());
  return all;
}

Optimizer& MoeStrategy::optimizer() {
  return dense_zero_ ? dense_zero_->optimizer() : *optimizer_;
}

StepResult MoeStrategy::step(std::int64_t step) {
  // Forward and backward of this rank's samples; losses of gates start from the
  // same number as the main one
  record_->loss_scale = 1 / static_cast<double>(setup_.micro_batches);
  const auto begin_piece = [&](bool is_last) {
    for (zero::ZeroOptimizer* zero : zeros()) zero->set_boundary(is_last);
  };
  const Tensor loss = data_parallel_gradients(
      options_, dp_, data_, step, setup_.micro_batches, begin_piece,
      [&](const Tensor& inputs) { return (*model_)(inputs); }, layers_.loss);

  // Dense gradients over DP, those of experts over their replicas
  if (!dense_zero_) sum_over_replicas();
  StepResult result;
  result.loss = loss.item();
  result.grad_norm = global_norm();

  // Update
  if (!dense_zero_) {
    clip_and_update(options_, *optimizer_, result.grad_norm);
    return result;
  }
  const std::int64_t skipped = dense_zero_->num_skipped_steps();
  for (zero::ZeroOptimizer* zero : zeros()) {
    zero->set_lr(optimizer().options().lr);
    zero->step(result.grad_norm);
  }
  result.was_skipped = dense_zero_->num_skipped_steps() > skipped;
  return result;
}

void MoeStrategy::sum_over_replicas() {
  const double share = 1.0 / dp_.size();
  sum_gradients(dp_, dense_, "dense", share);
  sum_gradients(replicas_, experts_, "experts", share);
}

double MoeStrategy::global_norm() {
  double squares = 0;
  if (!dense_zero_) {
    const double norm = grad_norm(own_);
    squares = norm * norm;
  } else {
    // A shard has one owner among its replicas. Parameters that TP does not cut
    // are on all of its ranks: the first one counts them
    const bool is_first = mesh_.coordinate("tp") == 0;
    const int here = mesh_.world().rank();
    const auto is_counted = [&](const std::string& name) {
      if (is_first) return true;
      const Shards part = layout(name, here);
      return part.size() > (is_expert(name) && setup_.ep > 1 ? 1U : 0U);
    };
    for (zero::ZeroOptimizer* each : zeros()) {
      const std::vector<NamedTensor> own = each->own_gradients();
      // Experts that TP does not cut are sharded over its ranks as well
      const bool counts_all =
          mesh_.size("tp") == 1 ||
          (each == expert_zero_.get() && !setup_.moe.expert_tensor_parallel);
      double total = counts_all ? each->sum_of_squares() : 0;
      for (const NamedTensor& part : own) {
        if (counts_all || !is_counted(part.name)) continue;
        total += sum_of_squares(part.tensor);
      }
      const double scale = each->options().loss_scale;
      squares += total / (scale * scale);
    }
  }
  return std::sqrt(sum_over_ranks(mesh_.world(), squares, "norm"));
}

Shards MoeStrategy::layout(const std::string& name, int rank) const {
  const Topology& grid = mesh_.topology();
  const int t = grid.size("tp"), tp_rank = grid.coordinate(rank, "tp");
  if (!is_expert(name)) return tensor_parallel::layout(name, tp_rank, t);
  return expert_layout(name, grid.coordinate(rank, "ep"), grid.size("ep"),
                       tp_rank, setup_.moe.expert_tensor_parallel ? t : 1);
}

std::vector<NamedTensor> MoeStrategy::full_state() {
  return gather_parts(model_->named_parameters(), layout_, mesh_.world(),
                      config_.vocab_size);
}

TrainingState joint_state(const std::vector<zero::ZeroOptimizer*>& zeros) {
  TrainingState state;
  std::vector<decltype(state.loaded)> loaded;
  for (zero::ZeroOptimizer* zero : zeros) {
    TrainingState own = zero->state();
    state.parts.insert(state.parts.end(), own.parts.begin(), own.parts.end());
    state.numbers.insert(own.numbers.begin(), own.numbers.end());
    if (own.loaded) loaded.push_back(own.loaded);
  }
  state.loaded = [loaded](const std::map<std::string, double>& numbers) {
    for (const auto& each : loaded) each(numbers);
  };
  return state;
}

TrainingState MoeStrategy::state() {
  TrainingState state = joint_state(zeros());
  if (!dense_zero_) {
    add_whole(state, model_->named_parameters(), *optimizer_);
  }
  place_parts(state, layout_, mesh_.world().rank(), config_.vocab_size);
  // Drops and the gates' losses depend on the tokens that are routed together
  if (!setup_.moe.depends_on_routing() || setup_.moe.aux_coefficient != 0) {
    state.agreed["groups of tokens"] =
        std::to_string(dp_.size() * setup_.micro_batches);
  }
  return state;
}

LoadedModel MoeStrategy::whole_model(const Options& options,
                                     const std::vector<NamedTensor>& state) {
  return moe::whole_model(options, setup_.moe, state);
}

bool MoeStrategy::has_predictable_time() const {
  return !setup_.moe.depends_on_routing();
}

std::vector<Bill> MoeStrategy::bills() {
  const BillSizes sizes = {.dp = dp_.size(),
                           .ep = setup_.ep,
                           .t = mesh_.size("tp"),
                           .zero_stage = setup_.zero_stage,
                           .offload = setup_.cpu_offload,
                           .micro_batches = setup_.micro_batches};
  Bill bill = predicted_bill(options_, config_, setup_.moe, sizes, *record_);
  // A run resumed from a checkpoint gathers the loaded parameters
  if (options_.first_step > 0) {
    for (const auto* each : zeros()) bill.bytes += each->predicted_load_bytes();
  }
  return {bill};
}

std::map<std::string, std::vector<std::int64_t>> MoeStrategy::global_loads() {
  return sum_loads(*record_, mesh_.world(), mesh_.coordinate("tp") == 0);
}

std::string MoeStrategy::remarks() {
  const auto loads = global_loads();
  if (mesh_.world().rank() != 0) return "";
  return draw_groups(group_sizes(options_, setup_), most_experts(setup_.moe)) +
         "\n" + draw_loads(loads);
}

std::vector<std::pair<std::string, std::string>> MoeStrategy::more() {
  const auto loads = global_loads();
  if (loads.empty()) return {};
  return {{"expert_loads", loads_json(loads)}};
}

ReferenceRun train_reference(const Options& options, const LayerFactory& layers,
                             MoeRecord& record,
                             const std::vector<MicroBatch>& pieces, int groups,
                             DynamicLossScaler scaler) {
  Options quiet = options;
  quiet.log.clear();
  const ModelConfig config = model_config(options);
  const auto model = build_gpt(options, config, layers);
  if (!options.load.empty()) load_model(options.load, *model);
  const Dataset data = Dataset::open(options, config);
  const auto optimizer = make_optimizer(options.optimizer, model->parameters(),
                                        options.optimizer_options);
  const double parts = static_cast<double>(pieces.size()) * groups;
  return train_yardstick(
      quiet, *optimizer, model->named_parameters(), [&](std::int64_t step) {
        StepResult result;
        record.loss_scale = scaler.scale() / parts;
        result.loss = accumulate_gradients(quiet, *model, data, step, pieces,
                                           scaler.scale());
        result.grad_norm = options.dtype == DType::kF16
                               ? update_unscaled(quiet, *optimizer, scaler)
                               : update_parameters(quiet, *optimizer);
        result.was_skipped =
            options.dtype == DType::kF16 && !std::isfinite(result.grad_norm);
        return result;
      });
}

ReferenceRun train_dropless(const Options& options, int experts) {
  MoeOptions moe;
  moe.gate.num_experts = experts;
  moe.is_dropless = true;
  moe.aux_coefficient = 0;
  const auto record = std::make_shared<MoeRecord>();
  LayerFactory layers;
  layers.mlp = moe_mlp(moe, {}, record);
  return train_reference(options, layers, *record,
                         strided_micro_batches(options.batch, 1));
}

LoadedModel whole_model(const Options& options, const MoeOptions& moe,
                        const std::vector<NamedTensor>& state) {
  LayerFactory layers;
  layers.mlp = moe_mlp(moe, {}, std::make_shared<MoeRecord>());
  LoadedModel loaded;
  loaded.config = model_config(options);
  loaded.config.has_experts = most_experts(moe) > 1;
  loaded.model = build_gpt(options, loaded.config, layers);
  loaded.model->load_values(state);
  return loaded;
}

ReferenceRun train_reference(const Options& options,
                             const StrategyOptions& setup) {
  const GroupSizes sizes = group_sizes(options, setup);
  const int dp = sizes.world / sizes.tp;
  gpt_config(options);
  const auto record = std::make_shared<MoeRecord>();
  LayerFactory layers;
  layers.mlp = moe_mlp(setup.moe, {}, record);
  // A rank's micro-batch is a piece
  return train_reference(
      options, layers, *record,
      strided_micro_batches(options.batch, dp * setup.micro_batches));
}

// Ranks differ in their terms of the norm: under ZeRO and TP, in the pieces of
// their shards that count. Without capacity they differ in shapes.
FoldClass fold_class(const Options& options, const StrategyOptions& setup) {
  if (setup.moe.depends_on_routing() ||
      (setup.zero_stage > 0 && setup.tp > 1)) {
    return each_rank;
  }
  const Topology grid = expert_topology(group_sizes(options, setup));
  return [grid, ep = grid.size("ep"), t = grid.size("tp")](int rank) {
    const int tp_class = grid.coordinate(rank, "tp") == 0 ? 0 : 1;
    const int edp_class = grid.coordinate(rank, "edp") == 0 ? 0 : 1;
    const int ep_class = grid.coordinate(rank, "ep") == 0 ? 0 : 1;
    return 4 * tp_class + 2 * edp_class + ep_class;
  };
}

}  // namespace shardbook::moe
