#pragma once

// A GPT whose sequences are cut over a group, for program.cpp and the benchmarks.

#include <memory>
#include <string>
#include <vector>

#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/common/run/worlds.h"
#include "chapters/common/sharded/sharded_strategy.h"

namespace shardbook::sequence_parallel {

struct StrategyOptions {
  SequenceOptions sequence;
  bool is_megatron = false;  ///< `megatron` holds, not `sequence`
  MegatronOptions megatron = {};
  std::int64_t micro_batches = 1;
};

/// Also refuses, when the line is parsed, options that the kind does not read.
void add_options(CommandLine& line, StrategyOptions& setup);

/// Every rank has all parameters and s/c tokens of every sample. Gradients are
/// parts of sums over tokens: one all-reduce adds them after backward.
class SequenceStrategy : public ShardedStrategy {
 public:
  /// Throws Error where the ranks cannot share the sequence. Collective.
  SequenceStrategy(const Options& options, const StrategyOptions& setup,
                   ProcessGroup& cp);

  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run sequence_parallel -- --world-size 4 "
           "--cluster textbook";
  }

 private:
  const StrategyOptions setup_;
};

/// Tensor parallelism with cut tokens where matrices are whole (megatron.h).
class MegatronStrategy : public ShardedStrategy {
 public:
  /// Throws Error where heads or sequence do not divide by t. Collective.
  MegatronStrategy(const Options& options, const MegatronOptions& setup,
                   std::int64_t micro_batches, ProcessGroup& tp);

  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run sequence_parallel -- --world-size 4 "
           "--kind megatron --cluster textbook";
  }

 private:
  const MegatronOptions setup_;
};

/// A MegatronStrategy or a SequenceStrategy. Collective.
std::unique_ptr<Strategy> make_strategy(const Options& options,
                                        const StrategyOptions& setup,
                                        ProcessGroup& group);

/// Ranks that the `sim` world may run once: all of megatron's are alike. In a ring every rank waits for the
/// one before it, and under contiguous slices no two have the same work. Ranks of
/// Ulysses are alike, except for rank 0, which computes the norm.
FoldClass fold_class(const StrategyOptions& setup);

}  // namespace shardbook::sequence_parallel
