#pragma once

// A GPT in tensor parallelism, for program.cpp and the benchmarks.

#include <memory>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/rng.h"
#include "chapters/common/sharded/sharded_strategy.h"

namespace shardbook::tensor_parallel {

struct StrategyOptions {
  std::int64_t micro_batches = 1;  ///< per step
  bool recompute = false;
  /// With recompute: a rank keeps 1/t of each block's input, and backward gathers
  /// it.
  bool distribute_saved_activations = false;
  /// Dropout's masks: "global" (as on one device) or "megatron" (two streams
  /// per rank, see rng.h).
  std::string rng = "global";
  /// The vocabulary is padded to a multiple of this times t.
  std::int64_t vocabulary_divisible_by = 1;
};

void add_options(CommandLine& line, StrategyOptions& setup);

/// False if no run on one device draws the same masks.
bool draws_as_one_device(const Options& options, const StrategyOptions& setup);

class TensorParallelStrategy : public ShardedStrategy {
 public:
  /// Throws Error, with sizes that work, if the model does not divide by the
  /// group. Collective.
  TensorParallelStrategy(const Options& options, const StrategyOptions& setup,
                         ProcessGroup& tp);
  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run tensor_parallel -- --world-size 4 "
           "--cluster textbook";
  }
  /// Includes the positions of Megatron-LM's random streams.
  TrainingState state() override;

 private:
  TensorParallelStrategy(const Options& options, const StrategyOptions& setup,
                         ProcessGroup& tp, std::shared_ptr<RngTracker> rng);

  StrategyOptions setup_;
  std::shared_ptr<RngTracker> rng_;
};

}  // namespace shardbook::tensor_parallel
