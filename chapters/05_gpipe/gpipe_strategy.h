#pragma once

// Training a model with GPipe, for program.cpp and the benchmarks.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/common/pipeline/pipeline_bill.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::gpipe {

struct StrategyOptions {
  /// Pieces of a mini-batch; rule CEIL may give fewer.
  std::int64_t micro_batches = 8;
  /// Which micro-batches keep only their stage's input: "always",
  /// "except_last" or "never".
  std::string recompute = "except_last";
  std::string partition = "uniform";  ///< as cuts_of reads it
  bool long_skips = false;
  bool early_recompute = true;
};

void add_options(CommandLine& line, StrategyOptions& setup);

/// Throws Error for options that cannot run: more ranks than layers or devices,
/// more micro-batches than samples, a partition that does not add up. Call it
/// before ranks start, so that the error is printed once and not by every rank.
void check_strategy_options(const Options& options,
                            const StrategyOptions& setup);
/// The figure of --print-schedule: a B is as long as two F.
std::string figure(const Options& options, const StrategyOptions& setup);

/// Reads targets once and keeps them until the step ends, because recomputation
/// computes the loss again. A rank that needs inputs and targets reads both
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
class GpipeStrategy : public Strategy {
 public:
  /// Throws Error for more ranks than layers. Collective.
  GpipeStrategy(const Options& options, const StrategyOptions& setup,
                ProcessGroup& pp);

  /// One optimizer step. Every rank gets the global batch's mean loss: one
  /// all-reduce of two f64 sums loss and norm.
  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<Bill> bills() override {
    return {
        {static_cast<double>(options_.steps) *
             (engine_->predicted_bytes() + model_->predicted_update_bytes()),
         pipeline_bill(options_, *model_, *engine_, pp_.rank()),
         pipeline::step_s(options_, *model_, *engine_)}};
  }
  std::string closed_form_command() const override {
    return "./shardbook run gpipe -- --world-size 4 --cluster textbook";
  }
  std::vector<NamedTensor> full_state() override {
    return model_->full_parameters();
  }
  TrainingState state() override {
    TrainingState state;
    add_whole(state, model_->named_state(), *optimizer_);
    agree_on_images(state, options_, feed_.pieces()[0]);
    return state;
  }

  const Dataset& data() const { return data_; }
  PipelineModel& model() { return *model_; }

 private:
  Options options_;
  ProcessGroup& pp_;
  Dataset data_;
  GpipeFeed feed_;
  pipeline::EngineOptions engine_options_;
  std::unique_ptr<PipelineModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<pipeline::Engine> engine_;
};

/// The reference run: one device, with the same micro-batches from the last to
/// the first.
ReferenceRun train_one_device_in_reverse(const Options& options,
                                         const StrategyOptions& setup);

}  // namespace shardbook::gpipe
