#include "chapters/07_tensor_parallel/trainer.h"

#include <utility>

#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/07_tensor_parallel/layers.h"
#include "chapters/07_tensor_parallel/recompute.h"
#include "core/check.h"

namespace shardbook::tensor_parallel {
namespace {

bool has_streams(const TrainerOptions& how) { return how.rng == "megatron"; }

/// Blocks are computed again in a way that core does not know of.
bool recomputes_here(const TrainerOptions& how) {
  return how.recompute &&
         (has_streams(how) || how.distribute_saved_activations);
}

std::shared_ptr<RngTracker> streams(const Options& options,
                                    const TrainerOptions& how, int tp_rank) {
  auto rng = std::make_shared<RngTracker>();
  if (!has_streams(how)) return rng;
  // The default stream's seed is options.seed here, as `train` sets it
  RngPlace place;
  place.tp = tp_rank;
  const StreamSeeds seeds = megatron_seeds(options.seed, place);
  rng->add(kTensorStream, seeds.tensor);
  rng->add(kExpertStream, seeds.expert);
  return rng;
}

ShardedModel sharded(const Options& options, const TrainerOptions& how,
                     ProcessGroup& tp, RngTracker& rng) {
  SB_CHECK(!how.distribute_saved_activations || how.recompute,
           "--distribute-saved-activations: inputs of blocks are all that is "
           "kept with --recompute only; give that as well");
  const ModelConfig config = sharded_gpt_config(options);
  SB_CHECK(config.n_head % tp.size() == 0, "--world-size ", tp.size(),
           ": the ranks share ", config.n_head, " heads; give a divisor of ",
           config.n_head);
  ShardedModel model;
  model.layers = layers(config, tp, has_streams(how) ? &rng : nullptr);
  model.layout = [t = tp.size()](const std::string& name, int rank) {
    return layout(name, rank, t);
  };
  model.padded_vocabulary = padded_vocabulary(config.vocab_size, tp.size(),
                                              how.vocabulary_divisible_by);
  return model;
}

}  // namespace

bool draws_as_one_device(const Options& options, const TrainerOptions& how) {
  return options.dropout == 0 || !has_streams(how);
}

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 ProcessGroup& tp)
    : Trainer(options, how, tp, streams(options, how, tp.rank())) {}

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 ProcessGroup& tp, std::shared_ptr<RngTracker> rng)
    : ShardedTrainer(
          options, sharded(options, how, tp, *rng), tp,
          {how.micro_batches, how.recompute && !recomputes_here(how)}),
      how_(how),
      rng_(std::move(rng)) {
  if (!recomputes_here(how)) return;
  RecomputeOptions recompute;
  recompute.rng = rng_.get();
  if (how.distribute_saved_activations) recompute.distribute_over = &tp;
  recompute_blocks(model(), recompute);
}

std::vector<Bill> Trainer::bills() {
  BillSizes sizes;
  sizes.t = group_.size();
  sizes.micro_batches = passes_.micro_batches;
  sizes.recompute = how_.recompute;
  sizes.distribute_saved_activations = how_.distribute_saved_activations;
  sizes.vocabulary = padded_vocabulary(config().vocab_size, group_.size(),
                                       how_.vocabulary_divisible_by);
  Bill bill;
  bill.bytes =
      static_cast<double>(options_.steps) *
      (bytes_per_step(options_, config(), sizes) + predicted_norm_bytes());
  bill.memory = memory(options_, config(), sizes);
  bill.step_s = step_s(options_, config(), sizes);
  return {bill};
}

TrainingState Trainer::state() {
  TrainingState state = ShardedTrainer::state();
  const RngTracker::States streams = rng_->states();
  if (streams.others.empty()) return state;
  for (const auto& [name, stream] : streams.others) {
    state.numbers["position of stream '" + name + "'"] =
        static_cast<double>(stream.next_op);
  }
  state.loaded = [this](const std::map<std::string, double>& numbers) {
    RngTracker::States streams = rng_->states();
    for (auto& [name, stream] : streams.others) {
      stream.next_op = static_cast<std::uint64_t>(
          numbers.at("position of stream '" + name + "'"));
    }
    rng_->set_states(streams);
  };
  return state;
}

}  // namespace shardbook::tensor_parallel
