#pragma once

// A language model under DDP, for program.cpp and the benchmarks.

#include <memory>
#include <string>

#include "chapters/02_ddp/bill.h"
#include "chapters/02_ddp/ddp.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::ddp {

struct StrategyOptions {
  DdpOptions ddp = {};
  /// Micro-batches per step; all but the last run under no_sync.
  std::int64_t micro_batches = 1;
  std::string comm_hook = "none";  ///< "none" or "bf16"
};

void add_options(CommandLine& line, StrategyOptions& setup);

/// Rank r of d takes samples r, r + d, r + 2d, ... of each global batch, and in
/// its micro-batch i of g the samples r + d i, r + d (i + g), ...
class DdpStrategy : public Strategy {
 public:
  /// `dp` is the group of all replicas. Throws Error when the global batch does
  /// not divide by d g. Collective.
  DdpStrategy(const Options& options, const StrategyOptions& setup,
              ProcessGroup& dp);

  /// One optimizer step. The loss is the mean over the global batch, on every
  /// rank: an all-reduce of one f64.
  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run ddp -- --world-size 4 --cluster textbook";
  }
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;

  const LoadedModel& model() const { return loaded_; }

 private:
  Options options_;
  StrategyOptions setup_;
  ProcessGroup& dp_;
  LoadedModel loaded_;
  Dataset data_;
  std::unique_ptr<Optimizer> optimizer_;
  DistributedDataParallel ddp_;
};

}  // namespace shardbook::ddp
