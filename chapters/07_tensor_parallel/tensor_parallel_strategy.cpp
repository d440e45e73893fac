#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"

#include <utility>

#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/07_tensor_parallel/partial_gradients.h"
#include "chapters/07_tensor_parallel/recompute.h"
#include "core/check.h"

namespace shardbook::tensor_parallel {
namespace {

bool has_streams(const StrategyOptions& setup) {
  return setup.rng == "megatron";
}

/// Whether this chapter's recomputation replaces core's.
bool recomputes_here(const StrategyOptions& setup) {
  return setup.recompute &&
         (has_streams(setup) || setup.distribute_saved_activations);
}

std::shared_ptr<RngTracker> streams(const Options& options,
                                    const StrategyOptions& setup, int tp_rank) {
  auto rng = std::make_shared<RngTracker>();
  if (!has_streams(setup)) return rng;
  // The default stream's seed is options.seed here, as `train` sets it
  const StreamSeeds seeds = megatron_seeds(options.seed, {.tp = tp_rank});
  rng->add(kTensorStream, seeds.tensor);
  rng->add(kExpertStream, seeds.expert);
  return rng;
}

ShardedModel sharded(const Options& options, const StrategyOptions& setup,
                     ProcessGroup& tp, RngTracker& rng) {
  SB_CHECK(!setup.distribute_saved_activations || setup.recompute,
           "--distribute-saved-activations: inputs of blocks are all that is "
           "kept with --recompute only; give that as well");
  const ModelConfig config = sharded_gpt_config(options);
  SB_CHECK(config.llama.num_experts == 0, "--model ", options.model,
           ": this chapter shards dense blocks; give a model without experts");
  check_ranks(config, tp.size(), "--world-size " + std::to_string(tp.size()));
  return {layers(config, tp, has_streams(setup) ? &rng : nullptr),
          [config, t = tp.size()](const std::string& name, int rank) {
            return layout(config, name, rank, t);
          },
          padded_vocabulary(config.vocab_size, tp.size(),
                            setup.vocabulary_divisible_by),
          [partial = std::make_shared<PartialGradients>(config, tp)](
              const std::vector<NamedTensor>& parameters) {
            partial->sum(parameters);
          }};
}

}  // namespace

void add_options(CommandLine& line, StrategyOptions& setup) {
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "micro-batches per step", 1);
  line.add(
      {"--recompute", may_differ::kPlace}, &setup.recompute,
      "keep the inputs of blocks only, and compute them again in backward");
  line.add({"--distribute-saved-activations", may_differ::kPlace},
           &setup.distribute_saved_activations,
           "--recompute: keep a part of each block's input on every rank, and "
           "gather it in backward");
  line.add({"--rng", "the streams are compared where dropout reads them"},
           &setup.rng,
           "dropout's masks: those of one device, or two streams per rank",
           {"global", "megatron"});
  line.add({"--vocabulary-divisible-by", may_differ::kPlace},
           &setup.vocabulary_divisible_by,
           "pad the vocabulary to a multiple of this times --world-size "
           "(Megatron-LM: 128)",
           1);
}

bool draws_as_one_device(const Options& options, const StrategyOptions& setup) {
  return options.dropout == 0 || !has_streams(setup);
}

TensorParallelStrategy::TensorParallelStrategy(const Options& options,
                                               const StrategyOptions& setup,
                                               ProcessGroup& tp)
    : TensorParallelStrategy(options, setup, tp,
                             streams(options, setup, tp.rank())) {}

TensorParallelStrategy::TensorParallelStrategy(const Options& options,
                                               const StrategyOptions& setup,
                                               ProcessGroup& tp,
                                               std::shared_ptr<RngTracker> rng)
    : ShardedStrategy(
          options, sharded(options, setup, tp, *rng), tp,
          {setup.micro_batches, setup.recompute && !recomputes_here(setup)}),
      setup_(setup),
      rng_(std::move(rng)) {
  if (!recomputes_here(setup)) return;
  RecomputeOptions recompute;
  recompute.rng = rng_.get();
  if (setup.distribute_saved_activations) recompute.distribute_over = &tp;
  recompute_blocks(model(), recompute);
}

std::vector<Bill> TensorParallelStrategy::bills() {
  BillSizes sizes;
  sizes.t = group_.size();
  sizes.micro_batches = passes_.micro_batches;
  sizes.recompute = setup_.recompute;
  sizes.distribute_saved_activations = setup_.distribute_saved_activations;
  sizes.vocabulary = padded_vocabulary(config().vocab_size, group_.size(),
                                       setup_.vocabulary_divisible_by);
  Bill bill;
  bill.bytes =
      static_cast<double>(options_.steps) *
      (bytes_per_step(options_, config(), sizes) + predicted_norm_bytes());
  bill.memory = memory(options_, config(), sizes);
  bill.step_s = step_s(options_, config(), sizes);
  return {bill};
}

TrainingState TensorParallelStrategy::state() {
  TrainingState state = ShardedStrategy::state();
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
  if (!draws_as_one_device(options_, setup_)) {
    state.agreed["ranks that draw dropout for themselves"] =
        std::to_string(group_.size());
  }
  return state;
}

}  // namespace shardbook::tensor_parallel
