#include "chapters/12_sequence_parallel/trainer.h"

#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/common/run/training.h"

namespace shardbook::sequence_parallel {
namespace {

ShardedModel sharded_model(const Options& options, const TrainerOptions& how,
                           ProcessGroup& cp) {
  check_sizes(how.sequence, cp.size(), options.seq,
              model_config(options).n_head);
  ShardedModel model;
  model.layers = sequence_layers(how.sequence, options.seq, cp);
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

}  // namespace

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 ProcessGroup& cp)
    : ShardedTrainer(options, sharded_model(options, how, cp), cp,
                     how.micro_batches),
      how_(how) {}

std::vector<Bill> Trainer::bills() {
  const std::int64_t parameters = model().num_parameters();
  return {{predicted_bytes(options_, config(), how_.sequence, group_.size(),
                           parameters, micro_batches_),
           predicted_memory(options_, config(), how_.sequence, group_.size(),
                            group_.rank(), parameters, micro_batches_)}};
}

FoldClass fold_class(const SequenceOptions& how) {
  if (how.kind == Kind::kUlysses) {
    return [](int rank) { return rank == 0 ? 0 : 1; };
  }
  return [](int rank) { return rank; };
}

}  // namespace shardbook::sequence_parallel
