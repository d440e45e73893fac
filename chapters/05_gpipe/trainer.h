#pragma once

// A model under GPipe: what main.cpp and the benchmarks repeat.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/common/pipeline/stage_memory.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::gpipe {

struct TrainerOptions {
  /// Pieces of a mini-batch, by rule CEIL, which may give fewer.
  std::int64_t micro_batches = 8;
  std::string checkpoint = "except_last";
  /// "uniform": equally many layers; "parameters": equally many of these;
  /// "time": equal times on --cluster; "2,1,3": so many layers each.
  std::string balance = "uniform";
  bool long_skips = false;
  bool early_recompute = true;
};

/// First layer of each of `num_stages` stages, and the end.
std::vector<int> cuts_of(const Options& options, const LayerList& layers,
                         const Tensors& inputs, const std::string& balance,
                         int num_stages);

/// Throws Error for options that no rank could run with: more ranks than layers
/// or devices, more micro-batches than samples, a balance that does not add up.
/// Call it before ranks start: then one sentence is printed, not one per rank.
void check_trainer_options(const Options& options, const TrainerOptions& how);

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
  const ModelConfig& config() const { return config_; }
  PipelineModel& model() { return *model_; }
  const Pipeline& pipeline() const { return *pipeline_; }

  /// Bytes that this rank sends in options.steps steps.
  double predicted_bytes() const;
  /// Peak memory of this rank, by kind; messages are left open.
  MemoryBill bill() const;

 private:
  Tensors read_inputs(int b);
  Tensor loss(const Tensors& outputs, int b);
  Batch read(int b) const;
  double predicted_input_bytes() const;
  StagePeaks predicted_peaks() const;
  bool is_first() const { return pp_.rank() == 0; }
  bool is_last() const { return pp_.rank() == pp_.size() - 1; }

  Options options_;
  TrainerOptions how_;
  ProcessGroup& pp_;
  ModelConfig config_;
  Dataset data_;
  std::shared_ptr<const LayerList> layers_;
  std::vector<MicroBatch> pieces_;
  PieceShapes shapes_;
  std::unique_ptr<PipelineModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Pipeline> pipeline_;
  Feed feed_;
  // Of the step that runs.
  std::int64_t step_ = 0;
  std::map<int, Tensor> targets_;
};

/// One device, the same micro-batches from the last to the first: what the
/// pipeline is compared with.
ReferenceRun train_one_device_in_reverse(const Options& options,
                                         const TrainerOptions& how);

}  // namespace shardbook::gpipe
