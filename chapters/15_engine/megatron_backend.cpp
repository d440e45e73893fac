// The hybrid chapter under an Accelerator. Stages run forward and backward in
// an order of their own, so the loss of a batch comes with its gradient.

#include <cmath>
#include <map>
#include <optional>

#include "chapters/14_hybrid_3d/hybrid_layers.h"
#include "chapters/14_hybrid_3d/update.h"
#include "chapters/15_engine/internal/backend.h"
#include "chapters/common/models/checkpoint.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::accelerate::internal {
namespace {

/// The micro-batches of one batch of the script.
class BatchFeed : public pipeline::Feed {
 public:
  /// `weight` is the batch's share of the mean over the step.
  BatchFeed(std::int64_t micro_batches, double weight, DType dtype,
            LossFunction loss_of)
      : micro_batches_(micro_batches),
        weight_(weight),
        dtype_(dtype),
        loss_of_(std::move(loss_of)) {}

  void set(const Batch& batch, double loss_scale) {
    const std::int64_t rows = batch.inputs.size(0);
    SB_CHECK(rows % micro_batches_ == 0, "MegatronLMPlugin: num_micro_batches ",
             micro_batches_, ": a batch of ", rows,
             " samples has not so many equal parts; give a divisor");
    batch_ = batch;
    pieces_ = ceil_micro_batches(rows, micro_batches_);
    step_ = RankContext::current().random.step;
    loss_scale_ = loss_scale;
  }

  pipeline::Piece piece(int b) const override {
    const MicroBatch& rows = pieces_[static_cast<std::size_t>(b)];
    pipeline::Piece piece;
    piece.step = step_;
    piece.slice = {batch_.slice.first + rows.slice.first * batch_.slice.stride,
                   batch_.slice.stride};
    piece.rows = rows.rows;
    piece.share = weight_ / static_cast<double>(micro_batches_);
    return piece;
  }
  Tensors inputs(int b) override { return {rows_of(batch_.inputs, b)}; }
  Tensor loss(int b, const Tensors& outputs) override {
    return loss_of_(outputs[0], rows_of(batch_.targets, b));
  }
  Tensors example(std::int64_t rows) const override {
    const std::int64_t tokens = batch_.inputs.size(1);
    return {Tensor::zeros({rows, tokens}, {DType::kI64, Device::meta()})};
  }
  DType dtype() const override { return dtype_; }
  double loss_scale() const override { return loss_scale_; }

 private:
  Tensor rows_of(const Tensor& tensor, int b) const {
    const MicroBatch& rows = pieces_[static_cast<std::size_t>(b)];
    return tensor.rows_view(rows.slice.first, rows.slice.first + rows.rows);
  }

  const std::int64_t micro_batches_;
  const double weight_;
  const DType dtype_;
  LossFunction loss_of_;
  Batch batch_;
  std::vector<MicroBatch> pieces_;
  std::uint64_t step_ = 0;
  double loss_scale_ = 1;
};

const Gpt& gpt_of(Module& module) {
  const auto* gpt = dynamic_cast<const Gpt*>(&module);
  SB_CHECK(gpt != nullptr, "MegatronLMPlugin: prepare of a ",
           module.type_name(),
           ": the hybrid chapter cuts the layers of a GPT; give a Gpt");
  return *gpt;
}

DType dtype_of(const Plan& plan) {
  gpt_of(plan.module);
  return plan.mixed_precision == "no" ? plan.module.parameters().at(0).dtype()
                                      : engine::dtype_of(plan.mixed_precision);
}

/// Options that the hybrid chapter reads on its command line.
Options options_of(const Plan& plan, const Batch& example, int dp) {
  const Gpt& gpt = gpt_of(plan.module);
  Options options;
  options.world_size = plan.world.size();
  options.model = gpt.config.to_json();
  options.dropout = gpt.config.dropout;
  options.dtype = dtype_of(plan);
  options.batch = example.inputs.size(0) * dp;
  options.seq = example.inputs.size(1);
  options.seed = RankContext::current().random.seed;
  options.optimizer = plan.optimizer.name();
  options.optimizer_options = plan.optimizer.params;
  return options;
}

hybrid::HybridOptions legal(const Options& options,
                            const MegatronLMPlugin& plugin) {
  hybrid::HybridOptions setup = hybrid_options(plugin, options.world_size);
  const std::string refusal = hybrid::refusal(options, setup);
  SB_CHECK(refusal.empty(), "MegatronLMPlugin with tp_degree ",
           plugin.tp_degree, ", pp_degree ", plugin.pp_degree,
           ", num_micro_batches ", plugin.num_micro_batches,
           ", sequence_parallelism ",
           plugin.sequence_parallelism ? "true" : "false", ": ", refusal);
  hybrid::check_legal(options, setup);
  return setup;
}

class Megatron : public Updating {
 public:
  Megatron(const Plan& plan, const MegatronLMPlugin& plugin,
           const Batch& example)
      : Updating(plan,
                 dtype_of(plan) == DType::kF16
                     ? std::optional(
                           hybrid::HybridOptions().loss_scaler(DType::kF16))
                     : std::nullopt,
                 /*always_measures=*/true),
        options_(options_of(plan, example,
                            hybrid_options(plugin, plan.world.size()).dp)),
        setup_(legal(options_, plugin)),
        mesh_(plan.world, hybrid::topology_of(setup_)),
        groups_(hybrid::groups_of(mesh_, setup_)),
        layers_(hybrid::rank_layers(model_config(options_), options_.seq,
                                    setup_, groups_)),
        schedule_(hybrid::schedule_of(setup_)),
        batches_per_step_(static_cast<double>(plan.accumulation * setup_.dp)),
        feed_(setup_.micro_batches, 1 / batches_per_step_, options_.dtype,
              layers_.factory.loss) {
    feed_.set(example, 1);
    const std::vector<int> cuts =
        cuts_of(options_, setup_.partition, *layers_.list, schedule_.num_stages,
                [&] { return feed_.example(feed_.piece(0).rows); });
    model_ = std::make_unique<PipelineModel>(
        options_, layers_.list, pipeline::layout_of(schedule_, cuts),
        groups_.pp);
    copy_weights();
    update_.emplace(options_, setup_, *model_, layers_, groups_);
    pipeline::EngineOptions engine;
    engine.recompute = setup_.recomputed_stages();
    engine_.emplace(schedule_, *model_, groups_.pp, feed_, nullptr, engine);
  }

  void begin_micro_step(bool) override {}
  void end_micro_step() override {}
  Tensor forward(const Tensor&) override {
    SB_FAIL(
        "MegatronLMPlugin: model(inputs): stages run forward and backward in "
        "an order of their own; call model.loss(batch)");
  }

  Tensor loss(const Batch& batch) override {
    feed_.set(batch, scale());
    const bool trains = RankContext::current().grad_enabled;
    const double part =
        (trains ? engine_->run() : engine_->evaluate()) * batches_per_step_;
    // Send the last stage's loss to the others
    const MemoryScope kind(MemoryKind::kCommunication);
    const Tensor loss = Tensor::full({}, part, {DType::kF64, Device()});
    groups_.pp.all_reduce(loss, ReduceOp::kSum, "loss").wait();
    return loss;
  }
  void backward(const Tensor&) override {}

  // The update has forgotten the gradients
  void zero_grad() override {}

  Optimizer& optimizer() override { return update_->optimizer(); }
  Tensors parameters() override { return model_->parameters(); }
  Module& module() override {
    SB_FAIL(
        "MegatronLMPlugin: unwrap_model: the layers lie in parts on the ranks; "
        "get_state_dict has the whole model");
  }
  ProcessGroup& data_group() override { return mesh_.group("dp"); }

  std::vector<NamedTensor> full_state() override {
    if (groups_.copies.rank() != 0) return {};
    const std::vector<NamedTensor> parts = model_->full_parameters();
    if (groups_.pp.rank() != 0) return {};
    return gather_parts(parts, layers_.layout, groups_.parts, vocabulary());
  }

 protected:
  /// Sums the gradients of the step, once, and the squares of each element.
  double norm() override {
    update_->reduce();
    return std::sqrt(
        sum_over_ranks(plan_.world, update_->sum_of_squares(), "norm"));
  }
  void apply(double factor) override { update_->apply(factor); }
  void forget() override { update_->forget(); }
  TrainingState parts() override {
    TrainingState state;
    update_->add_to(state);
    place_parts(state, layers_.layout, groups_.parts.rank(), vocabulary());
    state.loaded = [this](const auto&) { update_->gather(); };
    return state;
  }

 private:
  std::int64_t vocabulary() const {
    return gpt_of(plan_.module).config.vocab_size;
  }

  /// This rank's parts of the first rank's model.
  void copy_weights() {
    const NoGrad no_grad;
    std::map<std::string, Tensor> whole;
    for (const NamedTensor& each : state_of(plan_.module)) {
      plan_.world.broadcast(each.tensor, 0, "weights").wait();
      whole[each.name] = each.tensor;
    }
    for (const NamedTensor& each : model_->named_state()) {
      const Shards shards = layers_.layout(each.name, groups_.parts.rank());
      Tensor from = whole.at(each.name);
      Shape shape = from.shape();
      if (each.name == "wte.weight") shape[0] = layers_.padded.vocab_size;
      const Tensor padded = Tensor::zeros(shape, from.options());
      padded.rows_view(0, from.size(0)).copy_from(from);
      each.tensor.copy_from(take_part(padded, shards));
    }
  }

  const Options options_;
  const hybrid::HybridOptions setup_;
  DeviceMesh mesh_;
  const hybrid::Groups groups_;
  hybrid::RankLayers layers_;
  pipeline::Schedule schedule_;
  const double batches_per_step_;
  BatchFeed feed_;
  std::unique_ptr<PipelineModel> model_;
  std::optional<hybrid::Update> update_;
  std::optional<pipeline::Engine> engine_;
};

}  // namespace

std::unique_ptr<Backend> make_megatron(const Plan& plan,
                                       const MegatronLMPlugin& plugin,
                                       const Batch& example) {
  return std::make_unique<Megatron>(plan, plugin, example);
}

}  // namespace shardbook::accelerate::internal
