// ZeRO-2 and -3 around tensor-parallel layers, without a pipeline.

#include <algorithm>
#include <cmath>

#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/14_hybrid_3d/bill.h"
#include "chapters/14_hybrid_3d/trainer.h"
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
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  auto model = std::make_unique<Gpt>(layers.padded, init, layers.factory);
  if (!options.load.empty()) {
    load_model(options.load, *model,
               part_of(layers.layout, tp_rank, layers.padded.vocab_size));
  }
  return model;
}

}  // namespace

ZeroTrainer::ZeroTrainer(const Options& options, const HybridOptions& how,
                         DeviceMesh& mesh)
    : options_(options),
      how_(how),
      mesh_(mesh),
      groups_(groups_of(mesh, how)),
      layers_(rank_layers(options, how, groups_)),
      data_(Dataset::open(options, model_config(options))),
      model_(build_on_host(options, layers_, groups_.tp.rank())),
      scaler_(how.loss_scaler(options.dtype)) {
  set_recompute(*model_, how.recompute == "blocks");
  zero::ZeroOptions zero;
  zero.stage = how.zero_stage;
  zero.clip = options.clip;
  const std::int64_t h = layers_.padded.n_embd;
  zero.persistence_threshold = 10 * h;
  zero.prefetch_bucket_size = 13 * h * h / groups_.tp.size();
  zero.reduce_bucket_size = zero.allgather_bucket_size = std::max<std::int64_t>(
      how.bucket_bytes / static_cast<std::int64_t>(dtype_bytes(options.dtype)),
      1);
  zero_ = zero::make_zero(*model_, groups_.data, zero, options.optimizer,
                          options.optimizer_options);
}

double ZeroTrainer::norm() {
  const PhaseScope phase(Phase::kOptimizer);
  const NoGrad no_grad;
  const std::vector<NamedTensor> own = zero_->own_gradients();
  // Parts of sums over cut tokens; the group's shards have the same limits
  Tensors partial;
  double total = 0;
  for (const NamedTensor& each : own) {
    if (how_.sequence_parallel &&
        sequence_parallel::has_partial_gradient(each.name)) {
      partial.push_back(each.tensor);
    }
  }
  sum_over_ranks(groups_.tp, partial, "sequence_parallel");
  // What the tp group holds whole counts on its first rank
  for (const NamedTensor& each : own) {
    const double squares = sum_of_squares(each.tensor);
    if (is_first_holder(layers_.layout, each.name, groups_.tp.rank())) {
      total += squares;
    }
  }
  Tensor sum;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    sum = Tensor::full({}, total, {DType::kF64, Device()});
  }
  mesh_.world().all_reduce(sum, ReduceOp::kSum, "norm").wait();
  return std::sqrt(sum.item()) / scaler_.scale();
}

StepResult ZeroTrainer::step(std::int64_t step) {
  zero_->set_loss_scale(scaler_.scale());
  const auto pieces = pieces_of(options_, how_, mesh_.coordinate("dp"));
  std::size_t next = 0;
  // ZeRO divides by the ranks that it sums over, of which each has its share
  // of the samples, or of the tokens
  double loss = accumulate_pieces(
      options_, *model_, pieces, groups_.data.size() * scaler_.scale(),
      [&](const MicroBatch& piece, double factor) {
        zero_->set_boundary(++next == pieces.size());
        const Batch batch =
            data_.batch(step, options_.batch, piece.slice, piece.rows);
        const Tensor loss =
            layers_.factory.loss((*zero_)(batch.inputs), batch.targets);
        const double value = loss.item();
        autograd::backward({loss}, {Tensor::full({}, factor, loss.options())});
        return value;
      });
  const bool is_first = groups_.tp.rank() == 0 && mesh_.coordinate("cp") == 0;
  if (!is_first) loss = 0;
  StepResult result;
  {
    // Gone before the update sends its own
    const MemoryScope kind(MemoryKind::kCommunication);
    const Tensor sum = Tensor::full({}, loss, {DType::kF64, Device()});
    mesh_.world().all_reduce(sum, ReduceOp::kSum, "loss").wait();
    result.loss = sum.item();
  }
  result.grad_norm = zero_->step(norm());
  if (options_.dtype == DType::kF16) {
    scaler_.update(!std::isfinite(result.grad_norm));
  }
  return result;
}

std::vector<Bill> ZeroTrainer::bills() {
  const BillSizes sizes = bill_sizes(options_, how_, layers_, schedule_of(how_),
                                     {0, layers_.list->size()}, 0);
  // Parts of sums over cut tokens, in this rank's shard
  double partial = 0;
  for (const zero::ShardPiece& piece : zero_->shards()) {
    if (how_.sequence_parallel && piece.field == "parameter" &&
        sequence_parallel::has_partial_gradient(piece.name)) {
      partial += static_cast<double>(piece.values.bytes());
    }
  }
  const double t = groups_.tp.size();
  Bill bill;
  const double d = groups_.data.size();
  bill.bytes = zero_->predicted_bytes(options_.steps, how_.micro_batches) +
               static_cast<double>(options_.steps) *
                   (layer_bytes(sizes) + loss_and_norm_bytes(sizes) +
                    2 * (t - 1) / t * partial - 2 * (d - 1) / d * 8);
  if (options_.first_step > 0) bill.bytes += zero_->predicted_load_bytes();
  bill.memory = zero_memory(sizes, *zero_);
  return {bill};
}

TrainingState ZeroTrainer::state() {
  TrainingState state = zero_->state();
  place_parts(state, layers_.layout, groups_.tp.rank(),
              model_config(options_).vocab_size);
  if (options_.dtype != DType::kF16) return state;
  for (const auto& [name, value] : scaler_.state()) state.numbers[name] = value;
  state.loaded = [this, inner = state.loaded](
                     const std::map<std::string, double>& numbers) {
    scaler_.load_state(numbers);
    if (inner) inner(numbers);
  };
  return state;
}

std::vector<NamedTensor> ZeroTrainer::full_state() {
  const std::vector<NamedTensor> parts =
      zero_->full_parameters(/*rank0_only=*/true);
  if (groups_.data.rank() != 0) return {};
  return gather_parts(parts, layers_.layout, groups_.tp,
                      model_config(options_).vocab_size);
}

}  // namespace shardbook::hybrid
