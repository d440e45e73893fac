#include "chapters/12_sequence_parallel/sequence_strategy.h"

#include <memory>
#include <string>

#include "chapters/07_tensor_parallel/partial_gradients.h"
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

ShardedModel megatron_model(const Options& options,
                            const MegatronOptions& setup, ProcessGroup& tp) {
  const ModelConfig config = sharded_gpt_config(options);
  SB_CHECK(config.llama.num_experts == 0, "--model ", options.model,
           ": --kind megatron cuts dense blocks; give --kind ring, rsa or "
           "ulysses");
  tensor_parallel::check_ranks(config, tp.size(),
                               "--world-size " + std::to_string(tp.size()));
  check_sizes(SequenceOptions(), tp.size(), options.seq, config.n_head);
  ShardedModel model;
  model.layers = megatron_layers(config, tp, setup);
  model.layout = [config, t = tp.size()](const std::string& name, int rank) {
    return tensor_parallel::layout(config, name, rank, t);
  };
  model.padded_vocabulary = padded_vocabulary(config.vocab_size, tp.size());
  // Parameters that are used on cut tokens have a partial gradient
  model.finish_gradients =
      [&tp, of_heads = std::make_shared<tensor_parallel::PartialGradients>(
                config, tp)](const std::vector<NamedTensor>& parameters) {
        Tensors partial;
        for (const NamedTensor& each : parameters) {
          if (has_partial_gradient(each.name)) partial.push_back(each.tensor);
        }
        sum_gradients(tp, partial, "sequence_parallel");
        of_heads->sum(parameters);
      };
  return model;
}

/// Throws Error for an option that is given although `kind` does not read it.
void check_reads(bool is_given, const std::string& option,
                 const std::string& kind, const std::string& reader) {
  SB_CHECK(!is_given || kind == reader, option, ": --kind ", kind,
           " does not read it; give it with --kind ", reader);
}

}  // namespace

void add_options(CommandLine& line, StrategyOptions& setup) {
  const auto kind = std::make_shared<std::string>("ring");
  const auto layout = std::make_shared<std::string>("contiguous");
  line.add({"--kind", may_differ::kSums}, kind.get(), "how queries meet keys",
           {"ring", "rsa", "ulysses", "megatron"});
  line.add({"--layout", may_differ::kSums}, layout.get(),
           "which tokens a rank holds (ring attention)",
           {"contiguous", "zigzag", "striped"});
  line.add({"--rsa-all-reduce", may_differ::kSums}, &setup.sequence.all_reduce,
           "RSA: sum dK and dV by all-reduce, as the original does");
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "micro-batches per step", 1);
  line.add({"--recompute-attention", may_differ::kPlace},
           &setup.megatron.recompute_attention,
           "megatron: compute attention again in backward");
  line.after_parse([&setup, kind, layout] {
    check_reads(*layout != "contiguous", "--layout " + *layout, *kind, "ring");
    check_reads(setup.sequence.all_reduce, "--rsa-all-reduce", *kind, "rsa");
    check_reads(setup.megatron.recompute_attention, "--recompute-attention",
                *kind, "megatron");
    setup.is_megatron = *kind == "megatron";
    if (!setup.is_megatron) setup.sequence.kind = kind_of(*kind);
    setup.sequence.layout = layout_of(*layout);
  });
}

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
  padded.vocab_size = padded_vocabulary(padded.vocab_size, group_.size());
  return {megatron_bill(options_, padded, group_.size(), passes_.micro_batches,
                        setup_.recompute_attention)};
}

std::unique_ptr<Strategy> make_strategy(const Options& options,
                                        const StrategyOptions& setup,
                                        ProcessGroup& group) {
  if (setup.is_megatron) {
    return std::make_unique<MegatronStrategy>(options, setup.megatron,
                                              setup.micro_batches, group);
  }
  return std::make_unique<SequenceStrategy>(options, setup, group);
}

FoldClass fold_class(const StrategyOptions& setup) {
  if (setup.is_megatron) return one_class;
  if (setup.sequence.kind == Kind::kUlysses) {
    return [](int rank) { return rank == 0 ? 0 : 1; };
  }
  return each_rank;
}

}  // namespace shardbook::sequence_parallel
