#pragma once

// A model under GPipe: what main.cpp and the benchmarks repeat.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/feed.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::gpipe {

struct TrainerOptions {
  /// Pieces of a mini-batch, by rule CEIL, which may give fewer.
  std::int64_t micro_batches = 8;
  /// Which micro-batches keep their stage's input alone: "always",
  /// "except_last" or "never".
  std::string recompute = "except_last";
  std::string partition = "uniform";  ///< as cuts_of reads it
  bool long_skips = false;
  bool early_recompute = true;
};

/// Throws Error for options that no rank could run with: more ranks than layers
/// or devices, more micro-batches than samples, a partition that does not add
/// up. Call it before ranks start: then one sentence is printed, not one per
/// rank.
void check_trainer_options(const Options& options, const TrainerOptions& how);
/// --print-schedule: the figure, where F and B take one slot each.
std::string figure(const Options& options, const TrainerOptions& how);

/// Targets are read once and stay until the step ends: recomputation asks for
/// the loss again. Where one rank needs both, inputs and targets are read
/// together.
class GpipeFeed : public pipeline::LanguageFeed {
 public:
  GpipeFeed(const Options& options, const Dataset& data,
            std::vector<MicroBatch> pieces, bool reads_both)
      : LanguageFeed(options, data, std::move(pieces)),
        reads_both_(reads_both) {}
  Tensors inputs(int micro_batch) override;
  Tensor loss(int micro_batch, const Tensors& outputs) override;
  void end_step() override { targets_.clear(); }

 private:
  bool reads_both_;
  std::map<int, Tensor> targets_;
};

/// Rank s holds stage s. The first stage reads inputs, the last one targets.
class Trainer : public Strategy {
 public:
  /// Throws Error for more ranks than layers. Collective.
  Trainer(const Options& options, const TrainerOptions& how, ProcessGroup& pp);

  /// One optimizer step. The loss is the mean over the global batch, on every
  /// rank: it travels with the norm, in an all-reduce of two f64.
  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<Bill> bills() override { return {{predicted_bytes(), bill()}}; }
  std::vector<NamedTensor> full_state() override {
    return model_->full_parameters();
  }

  const Dataset& data() const { return data_; }
  PipelineModel& model() { return *model_; }

  /// Bytes that this rank sends in options.steps steps.
  double predicted_bytes();
  /// Peak memory of this rank, by kind; messages are left open.
  MemoryBill bill();

 private:
  Options options_;
  ProcessGroup& pp_;
  Dataset data_;
  GpipeFeed feed_;
  pipeline::EngineOptions how_;
  std::unique_ptr<PipelineModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<pipeline::Engine> engine_;
};

/// One device, the same micro-batches from the last to the first: what the
/// pipeline is compared with.
ReferenceRun train_one_device_in_reverse(const Options& options,
                                         const TrainerOptions& how);

}  // namespace shardbook::gpipe
