#include "chapters/13_moe/moe_strategy.h"

#include <cmath>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/13_moe/bill.h"
#include "chapters/13_moe/load.h"
#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/replica_sums.h"
#include "chapters/common/sharded/loss.h"
#include "core/autograd.h"
#include "core/check.h"

namespace shardbook::moe {
namespace {

ModelConfig gpt_config(const Options& options) {
  const ModelConfig config = model_config(options);
  SB_CHECK(config.has_blocks(), "--model ", options.model,
           ": experts stand in the place of a GPT's MLPs; give gpt-nano, gpt2 "
           "or another one of its family, or a Mixtral");
  return config;
}

/// A GPT of these layers, with the options' seed and dtype.
std::unique_ptr<Gpt> build_gpt(const Options& options,
                               const ModelConfig& config,
                               const LayerFactory& layers) {
  const InitOptions init = {.seed = options.seed, .dtype = options.dtype};
  return std::make_unique<Gpt>(config, init, layers);
}

}  // namespace

MoeStrategy::MoeStrategy(const Options& options, const StrategyOptions& asked,
                         DeviceMesh& mesh)
    : options_(options),
      setup_(asked),
      mesh_(mesh),
      dp_(mesh.group("edp-ep")),
      replicas_(setup_.moe.expert_tensor_parallel ? mesh.group("edp")
                                                  : mesh.group("edp-tp")),
      config_(gpt_config(options)),
      data_(Dataset::open(options, config_)),
      record_(std::make_shared<MoeRecord>()) {
  check_strategy_options(options, asked);
  check_even_batch(options, dp_.size(), setup_.micro_batches,
                   "--micro-batches");
  setup_.ep = mesh.size("ep");
  const int t = mesh.size("tp");
  ProcessGroup& tp = mesh.group("tp");

  // Dense layers as one device has them, or cut over TP; experts for MLPs
  if (t > 1) layers_ = tensor_parallel::layers(config_, tp);
  const MoeGroups groups = {
      .ep = &mesh.group("ep"),
      .tp = &tp,
      .ep_stride = setup_.data_before_expert ? mesh.size("edp") : 1};
  layers_.mlp = config_.is_llama() ? spread_experts(*groups.ep, record_)
                                   : moe_mlp(setup_.moe, groups, record_);
  const std::int64_t rows = padded_vocabulary(config_.vocab_size, t);
  ModelConfig padded = config_;
  padded.vocab_size = rows;
  model_ = build_gpt(options, padded, layers_);
  if (!options.load.empty()) {
    load_model(options.load, *model_, config_,
               part_of(layout_, mesh_.world().rank(), rows));
  }
  make_update();
}

void MoeStrategy::make_update() {
  if (setup_.loss_scale && options_.dtype == DType::kF16) {
    scaler_.emplace(*setup_.loss_scale);
  }
  zero::ZeroOptions zero;
  zero.stage = setup_.zero_stage;
  zero.clip = options_.clip;
  zero.offload_optimizer = setup_.cpu_offload;
  zero.master_copies = zero.stage > 0 || scaler_;
  ParameterGroup dense = {
      "dense", dp_, [](const std::string& name) { return !is_expert(name); }};
  ParameterGroup experts = {"experts", replicas_, is_expert};
  // Parameters that TP does not cut are on all of its ranks: the first one
  // counts them. It also cuts the shards of experts that it leaves whole
  const auto counts = [this](const std::string& name) {
    if (mesh_.coordinate("tp") == 0) return true;
    const Shards part = layout(name, mesh_.world().rank());
    return part.size() > (is_expert(name) && setup_.ep > 1 ? 1U : 0U);
  };
  if (mesh_.size("tp") > 1) dense.counts = counts;
  if (setup_.moe.expert_tensor_parallel) experts.counts = counts;
  update_ = std::make_unique<ExpertUpdate>(
      model_->named_parameters(), std::vector{dense, experts}, mesh_.world(),
      zero, options_.optimizer, options_.optimizer_options);
}

Optimizer& MoeStrategy::optimizer() { return update_->optimizer(); }

StepResult MoeStrategy::step(std::int64_t step) {
  // Forward and backward of this rank's samples; losses of gates start from the
  // same number as the main one
  const double scale = scaler_ ? scaler_->scale() : 1;
  record_->loss_scale = scale / static_cast<double>(setup_.micro_batches);
  const Tensor loss = data_parallel_gradients(
      options_, dp_, data_, step, setup_.micro_batches,
      [&](bool is_last) { update_->begin_backward(is_last, scale); },
      [&](const Tensor& inputs) { return (*model_)(inputs); },
      loss_over_ranks(config_, *model_, dp_, setup_.micro_batches,
                      layers_.loss),
      [&](const Tensor& loss) {
        autograd::backward(
            {loss}, {Tensor::full({}, record_->loss_scale, loss.options())});
      });

  // Dense gradients over DP, those of experts over their replicas
  update_->reduce();
  StepResult result;
  result.loss = loss.item();
  result.grad_norm = update_->norm();

  // Update, or skip a step that overflowed
  result.was_skipped = !update_->apply(result.grad_norm);
  if (scaler_) scaler_->update(result.was_skipped);
  return result;
}

Shards MoeStrategy::layout(const std::string& name, int rank) const {
  const Topology& grid = mesh_.topology();
  const int t = grid.size("tp"), tp_rank = grid.coordinate(rank, "tp");
  if (!is_expert(name)) {
    return tensor_parallel::layout(config_, name, tp_rank, t);
  }
  return expert_layout(name, grid.coordinate(rank, "ep"), grid.size("ep"),
                       tp_rank, setup_.moe.expert_tensor_parallel ? t : 1);
}

std::vector<NamedTensor> MoeStrategy::full_state() {
  return gather_parts(model_->named_parameters(), layout_, mesh_.world(),
                      config_.vocab_size);
}

TrainingState MoeStrategy::state() {
  TrainingState state = update_->state();
  place_parts(state, layout_, mesh_.world().rank(), config_.vocab_size);
  if (scaler_) add_loss_scale(state, *scaler_);
  // Drops and the gates' losses depend on the tokens that are routed together
  if (!setup_.moe.depends_on_routing() || setup_.moe.aux_coefficient != 0) {
    state.agreed["groups of tokens"] =
        std::to_string(dp_.size() * setup_.micro_batches);
  }
  return state;
}

LoadedModel MoeStrategy::whole_model(const Options& options,
                                     const std::vector<NamedTensor>& state) {
  return config_.is_llama() ? model_with(options, state)
                            : moe::whole_model(options, setup_.moe, state);
}

bool MoeStrategy::has_predictable_time() const {
  return !setup_.moe.depends_on_routing() && update_->num_skipped_steps() == 0;
}

std::vector<Bill> MoeStrategy::bills() {
  const BillSizes sizes = {.dp = dp_.size(),
                           .ep = setup_.ep,
                           .t = mesh_.size("tp"),
                           .zero_stage = setup_.zero_stage,
                           .offload = setup_.cpu_offload,
                           .micro_batches = setup_.micro_batches,
                           .skipped = update_->num_skipped_steps(),
                           .has_masters = scaler_.has_value()};
  Bill bill = predicted_bill(options_, config_, setup_.moe, sizes, *record_);
  // A run resumed from a checkpoint gathers the loaded parameters
  if (options_.first_step > 0) bill.bytes += update_->publish_bytes();
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
                             DynamicLossScaler scaler,
                             const RankDivision& division) {
  Options quiet = options;
  quiet.log.clear();
  const ModelConfig config = model_config(options);
  const auto model = build_gpt(options, config, layers);
  if (!options.load.empty()) load_model(options.load, *model, config);
  const Dataset data = Dataset::open(options, config);
  const auto optimizer = make_optimizer(options.optimizer, model->parameters(),
                                        options.optimizer_options);
  const double parts = static_cast<double>(pieces.size()) * groups;
  std::vector<int> joint;
  for (const NamedTensor& each : model->named_parameters()) {
    joint.push_back(is_expert(each.name) ? division.ep : 1);
  }
  ReplicaSums sums(model->parameters(), 1.0 / division.dp, joint);
  std::size_t next = 0;
  return train_yardstick(
      quiet, *optimizer, model->named_parameters(), [&](std::int64_t step) {
        StepResult result;
        const double scale = division.dp * scaler.scale();
        record.loss_scale = scale / parts;
        result.loss = accumulate_gradients(
            quiet, *model, data, step, pieces, scale,
            [&](const Tensor& logits, const Tensor& targets) {
              // The first loss of a sum ends the sum before it
              if (division.pieces > 0 && next % division.pieces == 0) {
                sums.take(next / division.pieces);
              }
              ++next;
              return language_loss(logits, targets);
            });
        if (division.pieces > 0) {
          sums.take(next / division.pieces);
          sums.give();
        }
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
  const std::vector<MicroBatch> pieces =
      strided_micro_batches(options.batch, dp * setup.micro_batches);
  if (!setup.loss_scale || options.dtype != DType::kF16) {
    return train_reference(options, layers, *record, pieces);
  }
  // In the order of the sums: of each set of experts, rank by rank, or with
  // ZeRO-2, which reduces every micro-batch, micro-batch by micro-batch
  const bool is_every = setup.zero_stage == 2;
  const auto m = static_cast<int>(setup.micro_batches);
  const int ep = sizes.ep, sets = dp / ep;
  std::vector<MicroBatch> ordered;
  for (int i = 0; i < dp * m; ++i) {
    const int set = i / (ep * m), in_set = i % (ep * m);
    const int place = is_every ? in_set % ep : in_set / m;
    const int micro = is_every ? in_set / ep : in_set % m;
    const int rank =
        sizes.data_before_expert ? place * sets + set : set * ep + place;
    ordered.push_back(pieces[at(rank + micro * dp)]);
  }
  return train_reference(options, layers, *record, ordered, /*groups=*/1,
                         DynamicLossScaler(*setup.loss_scale),
                         {.pieces = is_every ? 1 : at(m), .dp = dp, .ep = ep});
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
