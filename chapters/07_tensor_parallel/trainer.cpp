#include "chapters/07_tensor_parallel/trainer.h"

#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/07_tensor_parallel/layers.h"

namespace shardbook::tensor_parallel {
namespace {

ShardedModel sharded(const Options& options, const TrainerOptions& how,
                     ProcessGroup& tp) {
  const ModelConfig config = model_config(options);
  ShardedModel model;
  model.layers = layers(config, tp);
  model.layout = [t = tp.size()](const std::string& name, int rank) {
    return layout(name, rank, t);
  };
  model.padded_vocabulary = padded_vocabulary(config.vocab_size, tp.size(),
                                              how.vocabulary_divisible_by);
  return model;
}

}  // namespace

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 ProcessGroup& tp)
    : ShardedTrainer(options, sharded(options, how, tp), tp, how.micro_batches,
                     how.recompute),
      how_(how) {}

std::vector<Bill> Trainer::bills() {
  BillSizes sizes;
  sizes.t = group_.size();
  sizes.micro_batches = micro_batches_;
  sizes.recompute = how_.recompute;
  sizes.vocabulary = padded_vocabulary(config().vocab_size, group_.size(),
                                       how_.vocabulary_divisible_by);
  Bill bill;
  bill.bytes =
      static_cast<double>(options_.steps) *
      (bytes_per_step(options_, config(), sizes) + predicted_norm_bytes());
  bill.memory = memory(options_, config(), sizes);
  return {bill};
}

}  // namespace shardbook::tensor_parallel
