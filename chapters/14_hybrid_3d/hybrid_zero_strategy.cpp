// ZeRO-2 and -3 around tensor-parallel layers, without a pipeline.

#include <algorithm>
#include <cmath>
#include <limits>

#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/14_hybrid_3d/bill.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::hybrid {
namespace {

/// On the host, from which each rank takes its shards.
std::unique_ptr<Gpt> build_on_host(const Options& options,
                                   const RankLayers& layers, int tp_rank) {
  RankContext& context = RankContext::current();
  const ContextValue<Device> on_host(&RankContext::device, context.host());
  const InitOptions init = {.seed = options.seed, .dtype = options.dtype};
  auto model = std::make_unique<Gpt>(layers.padded, init, layers.factory);
  if (!options.load.empty()) {
    load_model(options.load, *model, model_config(options),
               part_of(layers.layout, tp_rank, layers.padded.vocab_size));
  }
  return model;
}

}  // namespace

HybridZeroStrategy::HybridZeroStrategy(const Options& options,
                                       const HybridOptions& setup,
                                       DeviceMesh& mesh)
    : MeshStrategy(options, setup, mesh),
      model_(build_on_host(options, layers_, groups_.parts.rank())) {
  set_recompute(*model_, setup.recompute == "blocks");
  shard();
}

void HybridZeroStrategy::shard() {
  zero::ZeroOptions zero;
  zero.stage = setup_.zero_stage;
  zero.clip = options_.clip;
  zero.check_grad_overflow = true;
  const std::int64_t h = layers_.padded.n_embd;
  zero.persistence_threshold = 10 * h;
  zero.prefetch_bucket_size = 1;  // one unit ahead
  zero.max_live_parameters = std::numeric_limits<std::int64_t>::max();
  zero.reduce_bucket_size = zero.allgather_bucket_size = std::max<std::int64_t>(
      setup_.bucket_bytes /
          static_cast<std::int64_t>(dtype_bytes(options_.dtype)),
      1);
  const auto make = [&](Module& module, ProcessGroup& group) {
    return zero::make_zero(module, group, zero, options_.optimizer,
                           options_.optimizer_options);
  };
  if (!setup_.has_experts()) {
    zero_ = make(*model_, groups_.data);
    return;
  }
  // Dense parameters over dp x cp, experts over the ranks that hold the same ones
  std::vector<NamedTensor> dense, experts;
  for (const NamedTensor& each : model_->named_parameters()) {
    (moe::is_expert(each.name) ? experts : dense).push_back(each);
  }
  dense_ = std::make_unique<moe::ParameterSubset>(dense);
  experts_ = std::make_unique<moe::ParameterSubset>(experts);
  zero_ = make(*dense_, groups_.data);
  expert_zero_ = make(*experts_, groups_.experts);
}

std::vector<zero::ZeroOptimizer*> HybridZeroStrategy::zeros() const {
  if (!expert_zero_) return {zero_.get()};
  return {zero_.get(), expert_zero_.get()};
}

double HybridZeroStrategy::scale_of(const zero::ZeroOptimizer& zero) const {
  return scaler_.scale() * groups_.data.size() / zero.group().size();
}

double HybridZeroStrategy::norm() {
  const PhaseScope phase(Phase::kOptimizer);
  const NoGrad no_grad;
  double total = 0;
  for (zero::ZeroOptimizer* zero : zeros()) {
    const std::vector<NamedTensor> own = zero->own_gradients();
    // Parts of sums over cut tokens; the group's shards have the same limits
    Tensors partial;
    for (const NamedTensor& each : own) {
      if (layers_.is_partial(each.name)) partial.push_back(each.tensor);
    }
    sum_over_ranks(groups_.tp, partial, "sequence_parallel");
    // Parameters that the tp group holds whole count on its first rank
    const auto [cut, whole] = zero->sums_of_squares(layers_.is_whole);
    const double squares = cut + (groups_.tp.rank() == 0 ? whole : 0);
    total += squares / (scale_of(*zero) * scale_of(*zero));
  }
  return std::sqrt(sum_over_ranks(mesh_.world(), total, "norm"));
}

StepResult HybridZeroStrategy::step(std::int64_t step) {
  // ZeRO divides by the ranks that it sums over, so every gradient starts dp x
  // cp times too large. Experts are summed over fewer ranks; unscaling the loss
  // does the rest
  for (zero::ZeroOptimizer* zero : zeros()) {
    zero->set_loss_scale(scale_of(*zero));
  }
  layers_.record->loss_scale =
      scaler_.scale() / static_cast<double>(setup_.micro_batches);
  const auto pieces = pieces_of(options_, setup_, replica());
  std::size_t next = 0;
  double loss = accumulate_pieces(
      options_, *model_, pieces, groups_.data.size() * scaler_.scale(),
      [&](const MicroBatch& piece, double factor) {
        const bool is_last = ++next == pieces.size();
        for (zero::ZeroOptimizer* zero : zeros()) zero->set_boundary(is_last);
        const Batch batch =
            data_.batch(step, options_.batch, piece.slice, piece.rows);
        // Free the logits before backward
        const Tensor loss = layers_.factory.loss(
            expert_zero_ ? (*model_)(batch.inputs) : (*zero_)(batch.inputs),
            batch.targets);
        note_kept_activations();
        const double value = loss.item();
        autograd::backward({loss}, {Tensor::full({}, factor, loss.options())});
        return value;
      });
  if (!counts_loss()) loss = 0;
  StepResult result;
  result.loss = sum_over_ranks(mesh_.world(), loss, "loss");
  result.grad_norm = norm();
  for (zero::ZeroOptimizer* zero : zeros()) {
    zero->set_lr(zero_->optimizer().options().lr);
    zero->step(result.grad_norm);
  }
  result.was_skipped = !std::isfinite(result.grad_norm);
  if (options_.dtype == DType::kF16) scaler_.update(result.was_skipped);
  return result;
}

std::vector<Bill> HybridZeroStrategy::bills() {
  const BillSizes sizes =
      bill_sizes(options_, setup_, layers_, schedule_of(setup_),
                 {0, layers_.list->size()}, 0);
  const auto steps = static_cast<double>(options_.steps);
  const double t = groups_.tp.size();
  double partial_s = 0;  // their sums
  Bill bill;
  bill.bytes = steps * (layer_bytes(sizes) + loss_and_norm_bytes(sizes));
  for (zero::ZeroOptimizer* zero : zeros()) {
    // Parts of sums over cut tokens, in this rank's shard
    double partial = 0;
    for (const StatePart& part : zero->state().parts) {
      if (layers_.is_partial(part.name)) {
        partial += static_cast<double>(part.values.bytes());
      }
    }
    if (partial > 0) partial_s += textbook::all_reduce(t, partial);
    // The norm is one of the world, not of each ZeRO
    const double r = zero->group().size();
    bill.bytes += zero->predicted_bytes(options_.steps, setup_.micro_batches) +
                  steps * (2 * (t - 1) / t * partial - 2 * (r - 1) / r * 8);
    // A step that f16 skips publishes no parameters; a loaded checkpoint does
    bill.bytes -= static_cast<double>(zero->num_skipped_steps()) *
                  zero->predicted_load_bytes();
    if (options_.first_step > 0) bill.bytes += zero->predicted_load_bytes();
  }
  if (has_step_time(options_, setup_, schedule_of(setup_)) && !expert_zero_) {
    // Loss and norm, one after the other, when all gradients are there
    const double sum = textbook::all_reduce(options_.world_size, 8);
    bill.step_s =
        zero_->step_s(model_times(sizes), options_.steps, setup_.micro_batches,
                      zero::Sums{0, 2 * sum + partial_s});
  }
  bill.memory =
      expert_zero_ ? expert_zero_memory(sizes) : zero_memory(sizes, *zero_);
  return {bill};
}

TrainingState HybridZeroStrategy::state() {
  TrainingState state = moe::joint_state(zeros());
  state.agreed = setup_.agreed();
  place_parts(state, layers_.layout, groups_.parts.rank(),
              model_config(options_).vocab_size);
  if (options_.dtype == DType::kF16) add_loss_scale(state, scaler_);
  return state;
}

std::vector<NamedTensor> HybridZeroStrategy::full_state() {
  // ZeRO-2 leaves parameters whole
  const std::vector<NamedTensor> parts =
      expert_zero_ ? model_->named_parameters()
                   : zero_->full_parameters(/*rank0_only=*/true);
  if (groups_.copies.rank() != 0) return {};
  return gather_parts(parts, layers_.layout, groups_.parts,
                      model_config(options_).vocab_size);
}

}  // namespace shardbook::hybrid
