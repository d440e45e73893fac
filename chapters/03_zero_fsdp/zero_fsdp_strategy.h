#pragma once

// A language model under ZeRO or FSDP, for program.cpp and the benchmarks.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/03_zero_fsdp/bill.h"
#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/03_zero_fsdp/fsdp/state_dict.h"
#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/run/worlds.h"

namespace shardbook::zero_fsdp {

/// ZeRO's options; negative sizes are replaced by functions of the model's
/// width h, as the library Transformers does for DeepSpeed:
/// persistence_threshold is 10 h, which leaves norms and biases whole and
/// shards matrices, and prefetch_bucket_size is 0.9 h^2, which is one unit
/// ahead. A negative max_live_parameters means no limit: DeepSpeed's 10^9 is
/// meant for units of single modules, and a block of gpt-175b alone has more.
inline zero::ZeroOptions sized_by_width() {
  zero::ZeroOptions options;
  options.persistence_threshold = options.prefetch_bucket_size = -1;
  options.max_live_parameters = -1;
  return options;
}

struct StrategyOptions {
  /// "zero1", "zero2", "zero3", "fsdp" or "fsdp2".
  std::string strategy = "fsdp";
  zero::ZeroOptions zero = sized_by_width();

  // FSDP
  std::string sharding_strategy = "full_shard";
  std::string wrap = "transformer";  ///< "transformer", "size" or "none"
  std::int64_t min_num_params = 100'000'000;
  std::string backward_prefetch = "pre";
  /// Sizes, prefetch, limits; strategy, policy and offload follow from the
  /// fields above.
  fsdp::FsdpOptions fsdp = {};
  std::string param_dtype = {};   ///< "": as the parameters
  std::string reduce_dtype = {};  ///< "": as param_dtype

  // Both
  bool cpu_offload = false;
  bool recompute = false;
  /// Micro-batches per step.
  std::int64_t micro_batches = 1;
  /// FSDP: all but the last micro-batch keep whole gradients.
  bool no_sync = false;
};

void add_options(CommandLine& line, StrategyOptions& setup);
/// Throws Error that names the first option in `given` (options and values)
/// that the chosen strategy does not read.
void check_given(const StrategyOptions& setup,
                 const std::vector<std::pair<std::string, std::string>>& given);

/// The narrowest dtype that is computed or sent.
DType shortest_dtype(DType parameters, const StrategyOptions& setup);

/// Classes of ranks with equal work: the `sim` world runs one of each.
FoldClass fold_class(const Options& options, const StrategyOptions& setup);

/// Builds the model on the host; each rank copies its shards from it.
LoadedModel build_on_host(const Options& options, bool recompute = false);

/// Rank r of d takes samples r, r + d, r + 2d, ... of each global batch, and in
/// its micro-batch i of g the samples r + d i, r + d (i + g), ... The model is
/// built on the host: the device never holds all of it.
class ZeroFsdpStrategy : public Strategy {
 public:
  /// Throws Error when the global batch does not divide by d g, and for
  /// contradictory options. Collective.
  ZeroFsdpStrategy(const Options& options, const StrategyOptions& setup,
                   ProcessGroup& dp);

  /// One optimizer step. The loss is the mean over the global batch, on every
  /// rank: an all-reduce of one f64.
  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override;
  std::vector<Bill> bills() override;
  std::string closed_form_command() const override;
  /// Gathers the shards, a few at a time.
  std::vector<NamedTensor> full_state() override;
  /// The shards as stored: no communication.
  TrainingState state() override {
    return zero_ ? zero_->state() : fsdp::training_state(*fsdp_, *optimizer_);
  }

 private:
  double predicted_bytes(const StepPlan& plan) const;
  MemoryBill memory_bill() const;

  Options options_;
  StrategyOptions setup_;
  ProcessGroup& dp_;
  LoadedModel loaded_;
  Dataset data_;
  std::unique_ptr<zero::ZeroOptimizer> zero_;
  std::unique_ptr<fsdp::FullyShardedDataParallel> fsdp_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace shardbook::zero_fsdp
