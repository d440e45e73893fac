#include "chapters/14_hybrid_3d/hybrid_strategy.h"

#include <cmath>
#include <numeric>

#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "chapters/13_moe/bill.h"
#include "chapters/13_moe/moe_strategy.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/sharded/parts.h"
#include "core/context.h"
#include "core/layers.h"

namespace shardbook::hybrid {

// --- What all meshes share -----------------------------------------------------

MeshStrategy::MeshStrategy(const Options& options, const HybridOptions& setup,
                           DeviceMesh& mesh)
    : options_(options),
      setup_(setup),
      mesh_(mesh),
      groups_(groups_of(mesh, setup)),
      layers_(rank_layers(model_config(options), options.seq, setup, groups_)),
      data_(Dataset::open(options, model_config(options))),
      scaler_(setup.loss_scaler(options.dtype)) {}

int MeshStrategy::replica() const {
  return replica_of(mesh_.topology(), mesh_.world().rank());
}

bool MeshStrategy::counts_loss() const {
  return groups_.tp.rank() == 0 && groups_.cp.rank() == 0;
}

LoadedModel MeshStrategy::whole_model(const Options& options,
                                      const std::vector<NamedTensor>& state) {
  if (!setup_.has_experts()) return Strategy::whole_model(options, state);
  return moe::whole_model(options, setup_.moe(), state);
}

moe::Loads MeshStrategy::loads() {
  if (!setup_.has_experts() && !setup_.has_own_experts) return {};
  return moe::sum_loads(*layers_.record, mesh_.world(),
                        setup_.has_own_experts || groups_.tp.rank() == 0);
}

std::string MeshStrategy::remarks() {
  const moe::Loads all = loads();
  return mesh_.world().is_first() ? moe::draw_loads(all) : "";
}

std::vector<std::pair<std::string, std::string>> MeshStrategy::more() {
  const moe::Loads all = loads();
  if (all.empty()) return {};
  return {{"expert_loads", moe::loads_json(all)}};
}

// --- Batch norms ---------------------------------------------------------------

namespace {

template <typename Fn>
void for_stages(PipelineModel& model, const Fn& fn) {
  for (int s = 0; s < model.layout().num_stages(); ++s) {
    if (model.holds(s)) fn(model.stage(s));
  }
}

/// The two ranks that hold the same stages, one for each direction. Models with
/// batch norms have no parameter in two stages, so no other ranks share one.
ProcessGroup* both_directions(const PipelineModel& model) {
  return model.shared().empty() ? nullptr : model.shared()[0].group.get();
}

}  // namespace

void commit_statistics(PipelineModel& model, ProcessGroup& replicas) {
  const PhaseScope phase(Phase::kOptimizer);
  Tensors pending;
  for_stages(model, [&](Stage& stage) {
    for (const Tensor& each : pending_statistics(stage)) {
      pending.push_back(each);
    }
  });
  if (pending.empty()) return;
  // Over the images of all replicas
  int num_ranks = replicas.size();
  sum_over_ranks(replicas, pending, "statistics");
  // Then over the images of both directions
  if (ProcessGroup* const pair = both_directions(model)) {
    sum_over_ranks(*pair, pending, "statistics");
    num_ranks *= pair->size();
  }
  for_stages(model,
             [=](Stage& stage) { commit_batch_norms(stage, num_ranks); });
}

double statistics_bytes(PipelineModel& model, const ProcessGroup& replicas) {
  // One sum for each running statistic, in f64
  double bytes = 0;
  for (const NamedTensor& each : running_statistics(model)) {
    bytes += 8 * static_cast<double>(each.tensor.numel());
  }
  const auto all_reduce = [](double ranks) { return 2 * (ranks - 1) / ranks; };
  const ProcessGroup* const pair = both_directions(model);
  return bytes * (all_reduce(replicas.size()) +
                  (pair == nullptr ? 0 : all_reduce(pair->size())));
}

std::vector<NamedTensor> running_statistics(PipelineModel& model) {
  std::vector<NamedTensor> all;
  for_stages(model, [&](Stage& stage) {
    for (NamedTensor& each : stage.named_buffers()) {
      all.push_back(std::move(each));
    }
  });
  return all;
}

// --- A pipeline of sharded layers ----------------------------------------------

HybridStrategy::HybridStrategy(const Options& options,
                               const HybridOptions& setup, DeviceMesh& mesh)
    : MeshStrategy(options, setup, mesh),
      schedule_(schedule_of(setup)),
      feed_(options, data_, pieces_of(options, setup, replica()),
            layers_.factory.loss) {
  const std::vector<int> cuts =
      cuts_of(options, setup.partition, *layers_.list, schedule_.num_stages,
              [&] { return feed_.example(feed_.pieces()[0].rows); });
  model_ = std::make_unique<PipelineModel>(
      options, layers_.list, pipeline::layout_of(schedule_, cuts), groups_.pp,
      part_of(layers_.layout, groups_.parts.rank(), layers_.padded.vocab_size));
  update_.emplace(options, setup, *model_, layers_, groups_);
  RankContext::current().device.reset_peak_memory();
  engine_options_.recompute = setup.recomputed_stages();
  engine_options_.commits_statistics = false;
  engine_.emplace(schedule_, *model_, groups_.pp, feed_, nullptr,
                  engine_options_);
  if (setup.overlap_grad_reduce) {
    update_->overlap([this] { return engine_->adds_last_gradients(); });
  }
}

StepResult HybridStrategy::step(std::int64_t step) {
  // Forwards and backwards of all micro-batches: each counts its share of the
  // global batch, so every later reduction is a sum
  feed_.set_first_step(step);
  feed_.set_loss_scale(scaler_.scale());
  // The gates' losses: equal shares for groups that are routed together
  layers_.record->loss_scale =
      scaler_.scale() /
      static_cast<double>(setup_.dp * setup_.micro_batches * setup_.cp);
  double loss = engine_->run();
  if (!counts_loss()) loss = 0;

  // Batch norms: one update of their running statistics from all images
  commit_statistics(*model_, groups_.data);

  // Sum the gradients over replicas, tokens and stages
  update_->reduce();

  // One sum over the world: the loss, and the norm with each element once
  const std::vector<double> sums = sum_over_ranks(
      mesh_.world(), {loss, update_->sum_of_squares()}, "loss and norm");
  StepResult result;
  result.loss = sums[0];
  result.grad_norm = std::sqrt(sums[1]) / scaler_.scale();

  // One rank's infinite gradient makes the sum infinite, and all ranks skip
  result.was_skipped = !std::isfinite(result.grad_norm);
  double factor = 1 / scaler_.scale();
  if (options_.dtype == DType::kF16) scaler_.update(result.was_skipped);
  if (result.was_skipped) {
    num_skipped_ += 1;
    update_->forget();
    return result;
  }

  // Unscale and clip with one factor, update, gather
  if (options_.clip > 0) factor *= clip_factor(result.grad_norm, options_.clip);
  update_->apply(factor);
  return result;
}

std::vector<Bill> HybridStrategy::bills() {
  BillSizes sizes = bill_sizes(options_, setup_, layers_, schedule_,
                               model_->layout().cuts, groups_.pp.rank());
  sizes.buckets = &update_->buckets();
  sizes.updates = static_cast<double>(options_.steps - num_skipped_);
  Bill bill;
  if (options_.steps > 0) {
    bill.bytes = static_cast<double>(options_.steps) *
                     (engine_->predicted_bytes() + step_bytes(sizes) +
                      statistics_bytes(*model_, groups_.data)) -
                 static_cast<double>(num_skipped_) * gather_bytes(sizes);
  }
  // Parameters that a checkpoint loaded into shards
  if (options_.first_step > 0) bill.bytes += gather_bytes(sizes);
  if (setup_.has_own_experts && setup_.ep > 1) {
    // On shapes, a few micro-batches stand for all
    bill.bytes =
        options_.backend == "sim"
            ? kNotPredicted
            : bill.bytes + moe::dropless_bytes(*layers_.record, sizes.h(),
                                               sizes.element, setup_.ep);
  }
  bill.memory = memory(sizes, *model_, *engine_);
  if (has_step_time(options_, setup_, schedule_)) {
    bill.step_s = step_s(sizes, *engine_, groups_.pp);
  }
  return {bill};
}

std::vector<NamedTensor> HybridStrategy::full_state() {
  // The parts of one replica, with ep of ep replicas: first by stage, then by
  // rank of tp and ep
  if (groups_.copies.rank() != 0) return {};
  const std::vector<NamedTensor> parts = model_->full_parameters();
  if (groups_.pp.rank() != 0) return {};
  return gather_parts(parts, layers_.layout, groups_.parts,
                      model_config(options_).vocab_size);
}

TrainingState HybridStrategy::state() {
  TrainingState state;
  state.agreed = setup_.agreed();
  update_->add_to(state);
  add_whole(state, running_statistics(*model_), update_->optimizer());
  agree_on_images(state, options_, pieces_of(options_, setup_, 0)[0]);
  place_parts(state, layers_.layout, groups_.parts.rank(),
              model_config(options_).vocab_size);
  state.loaded = [this](const auto&) { update_->gather(); };
  if (options_.dtype == DType::kF16) add_loss_scale(state, scaler_);
  return state;
}

// --- Either of them ------------------------------------------------------------

std::unique_ptr<Strategy> make_strategy(const Options& options,
                                        const HybridOptions& setup,
                                        DeviceMesh& mesh) {
  if (setup.zero_stage >= 2) {
    return std::make_unique<HybridZeroStrategy>(options, setup, mesh);
  }
  return std::make_unique<HybridStrategy>(options, setup, mesh);
}

ReferenceRun reference_run(const Options& options, const HybridOptions& setup) {
  const bool is_image = model_config(options).is_image();
  std::vector<int> order(static_cast<std::size_t>(setup.micro_batches));
  std::iota(order.begin(), order.end(), 0);
  if (is_image) order = pipeline::gradient_order(schedule_of(setup));
  std::vector<MicroBatch> pieces;
  for (int rank = 0; rank < setup.dp; ++rank) {
    const std::vector<MicroBatch> own = pieces_of(options, setup, rank);
    for (const int b : order) pieces.push_back(own[pipeline::at(b)]);
  }
  if (setup.has_experts()) {
    const auto record = std::make_shared<moe::MoeRecord>();
    return moe::train_reference(options, reference_layers(setup, record),
                                *record, pieces, setup.cp,
                                setup.loss_scaler(options.dtype));
  }
  // In f16 the single device also scales its loss and skips the same steps: it
  // sums as replicas do, and for ZeRO-2 and -3 divides gradients first
  OneDevice one;
  const DynamicLossScaler scaler = setup.loss_scaler(options.dtype);
  if (options.dtype == DType::kF16) {
    one.scaler = &scaler;
    one.replicas = setup.dp;
    one.averages_replicas = setup.zero_stage >= 2;
  }
  if (is_image) {
    one.defers_statistics = true;
    one.replicas = setup.dp;
  }
  return train_one_device(options, pieces, one);
}

namespace {

/// Whether each expert of a Mixtral gets equally many choices of a rank's tokens
/// on shapes, so that all ranks of ep send as many rows.
bool chooses_evenly(const Options& options, const HybridOptions& setup) {
  const LlamaConfig& llama = model_config(options).llama;
  const std::int64_t tokens = options.batch / setup.dp / setup.micro_batches *
                              options.seq / setup.cp / setup.tp;
  return tokens * llama.experts_per_token % llama.num_experts == 0;
}

}  // namespace

FoldClass fold_class(const Options& options, const HybridOptions& setup) {
  const Topology topology = topology_of(setup);
  const bool is_ring = setup.cp > 1 && setup.cp_kind != "ulysses";
  // ZeRO-2 and -3 give each rank other parts of other parameters, and where tp
  // cuts the slots of experts, it also cuts their shards
  const bool is_cut = setup.zero_stage >= 2;
  if (is_cut && setup.has_experts()) return each_rank;
  if (setup.has_own_experts && !chooses_evenly(options, setup)) {
    return [=](int rank) {
      Coord own = topology.get_coord(rank);
      own["tp"] = 0;
      own[setup.ep > 1 ? "edp" : "dp"] = 0;
      if (!is_ring) own["cp"] = 0;
      return topology.get_rank(own);
    };
  }
  if (is_ring && !is_cut && options.backend == "sim" &&
      sequence_parallel::ranks_are_alike(
          cost_model(options)->cluster(), topology.groups({"cp"}),
          sequence_parallel::layout_of(setup.cp_layout))) {
    // All keep the pace of the last rank, which merges most rows
    return [=](int rank) {
      Coord runs = topology.get_coord(0);
      runs["pp"] = topology.coordinate(rank, "pp");
      runs["cp"] = setup.cp - 1;
      return topology.get_rank(runs);
    };
  }
  return [=](int rank) {
    const int cp = is_ring || is_cut ? topology.coordinate(rank, "cp") : 0;
    const int dp = is_cut ? replica_of(topology, rank) : 0;
    return (topology.coordinate(rank, "pp") * setup.cp + cp) * setup.dp + dp;
  };
}

}  // namespace shardbook::hybrid
