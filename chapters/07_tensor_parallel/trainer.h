#pragma once

// A GPT in tensor parallelism, for main.cpp and the benchmarks.

#include <vector>

#include "chapters/common/sharded/sharded_trainer.h"

namespace shardbook::tensor_parallel {

struct TrainerOptions {
  std::int64_t micro_batches = 1;  ///< per step
  bool recompute = false;
  /// The vocabulary is padded to a multiple of this times t.
  std::int64_t vocabulary_divisible_by = 1;
};

class Trainer : public ShardedTrainer {
 public:
  /// Throws Error, with the sizes that would work, where the model does not
  /// divide by the group. Collective.
  Trainer(const Options& options, const TrainerOptions& how, ProcessGroup& tp);
  std::vector<Bill> bills() override;

 private:
  TrainerOptions how_;
};

}  // namespace shardbook::tensor_parallel
