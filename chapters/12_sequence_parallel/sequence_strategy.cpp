#include "chapters/12_sequence_parallel/sequence_strategy.h"

#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/common/run/training.h"
#include "core/check.h"

namespace shardbook::sequence_parallel {
namespace {

ShardedModel sharded_model(const Options& options, const StrategyOptions& setup,
                           ProcessGroup& cp) {
  check_sizes(setup.sequence, cp.size(), options.seq,
              sharded_gpt_config(options).n_head);
  ShardedModel model;
  model.layers = sequence_layers(setup.sequence, options.seq, cp);
  // Weights are not cut
  model.layout = [](const std::string&, int) { return Shards{}; };
  // Each rank's gradients come from its own tokens
  model.finish_gradients = [&cp](const std::vector<NamedTensor>& parameters) {
    Tensors all;
    for (const NamedTensor& each : parameters) all.push_back(each.tensor);
    sum_gradients(cp, all, "gradients");
  };
  return model;
}

std::int64_t padded_rows(const ModelConfig& config, int t) {
  return tensor_parallel::padded_vocabulary(config.vocab_size, t,
                                            /*divisible_by=*/1);
}

ShardedModel megatron_model(const Options& options,
                            const MegatronOptions& setup, ProcessGroup& tp) {
  const ModelConfig config = sharded_gpt_config(options);
  SB_CHECK(config.n_head % tp.size() == 0, "--world-size ", tp.size(),
           ": the ranks share ", config.n_head,
           " heads; give a number of ranks that divides them");
  check_sizes(SequenceOptions(), tp.size(), options.seq, config.n_head);
  ShardedModel model;
  model.layers = megatron_layers(config, tp, setup);
  model.layout = [t = tp.size()](const std::string& name, int rank) {
    return tensor_parallel::layout(name, rank, t);
  };
  model.padded_vocabulary = padded_rows(config, tp.size());
  // Parameters that are used on cut tokens have a partial gradient
  model.finish_gradients = [&tp](const std::vector<NamedTensor>& parameters) {
    Tensors partial;
    for (const NamedTensor& each : parameters) {
      if (has_partial_gradient(each.name)) partial.push_back(each.tensor);
    }
    sum_gradients(tp, partial, "sequence_parallel");
  };
  return model;
}

}  // namespace

SequenceStrategy::SequenceStrategy(const Options& options,
                                   const StrategyOptions& setup,
                                   ProcessGroup& cp)
    : ShardedStrategy(options, sharded_model(options, setup, cp), cp,
                      {setup.micro_batches}),
      setup_(setup) {}

std::vector<Bill> SequenceStrategy::bills() {
  return {sequence_bill(options_, config(), setup_.sequence, group_.size(),
                        model().num_parameters(), passes_.micro_batches)};
}

MegatronStrategy::MegatronStrategy(const Options& options,
                                   const MegatronOptions& setup,
                                   std::int64_t micro_batches, ProcessGroup& tp)
    : ShardedStrategy(options, megatron_model(options, setup, tp), tp,
                      {micro_batches}),
      setup_(setup) {}

std::vector<Bill> MegatronStrategy::bills() {
  ModelConfig padded = config();
  padded.vocab_size = padded_rows(config(), group_.size());
  return {megatron_bill(options_, padded, group_.size(), passes_.micro_batches,
                        setup_.recompute_attention)};
}

FoldClass fold_class(const SequenceOptions& setup) {
  if (setup.kind == Kind::kUlysses) {
    return [](int rank) { return rank == 0 ? 0 : 1; };
  }
  return [](int rank) { return rank; };
}

}  // namespace shardbook::sequence_parallel
