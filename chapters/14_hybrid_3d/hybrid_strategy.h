#pragma once

// A GPT or a ResNet on any legal mesh, for program.cpp and the benchmarks.

#include <memory>
#include <optional>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/13_moe/load.h"
#include "chapters/13_moe/moe_strategy.h"
#include "chapters/14_hybrid_3d/bill.h"
#include "chapters/14_hybrid_3d/hybrid_layers.h"
#include "chapters/14_hybrid_3d/update.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/run/worlds.h"

namespace shardbook::hybrid {

/// A rank's state on every mesh: its groups, its layers, the data, the factor
/// of the loss.
class MeshStrategy : public Strategy {
 public:
  LoadedModel whole_model(const Options& options,
                          const std::vector<NamedTensor>& state) override;
  /// The load of each expert. Collective.
  std::string remarks() override;
  std::vector<std::pair<std::string, std::string>> more() override;
  std::string closed_form_command() const override {
    return "./shardbook run hybrid_3d -- --world-size 8 --tp 2 --pp 2 "
           "--cluster textbook";
  }

  /// On shapes, gradients never overflow.
  bool has_predictable_time() const override {
    return num_skipped_steps() == 0;
  }

  const DynamicLossScaler& scaler() const { return scaler_; }
  virtual std::int64_t num_skipped_steps() const = 0;

 protected:
  MeshStrategy(const Options& options, const HybridOptions& setup,
               DeviceMesh& mesh);
  /// Which of the dp replicas this rank belongs to.
  int replica() const;
  /// tp and cp ranks have the same loss, which counts once.
  bool counts_loss() const;

  const Options options_;
  const HybridOptions setup_;
  DeviceMesh& mesh_;
  const Groups groups_;
  RankLayers layers_;
  Dataset data_;
  DynamicLossScaler scaler_;

 private:
  /// Choices per expert over all ranks; empty without experts. Collective.
  moe::Loads loads();
};

/// One step of training on this rank: a pipeline of sharded layers, then the
/// sums of its gradients over all axes. One stage is a pipeline as well.
class HybridStrategy : public MeshStrategy {
 public:
  /// `setup` has passed check_legal. `mesh` outlives the object. Collective.
  HybridStrategy(const Options& options, const HybridOptions& setup,
                 DeviceMesh& mesh);

  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return update_->optimizer(); }
  std::vector<Bill> bills() override;
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;

  const Update& update() const { return *update_; }
  std::int64_t num_skipped_steps() const override { return num_skipped_; }
  PipelineModel& model() { return *model_; }

 private:
  pipeline::Schedule schedule_;
  pipeline::LanguageFeed feed_;
  std::unique_ptr<PipelineModel> model_;
  std::optional<Update> update_;
  pipeline::EngineOptions engine_options_;
  std::optional<pipeline::Engine> engine_;
  std::int64_t num_skipped_ = 0;
};

/// ZeRO-2 and -3: the library of the ZeRO chapter around tensor-parallel layers.
/// Experts (ZeRO-2) have a ZeRO of their own, over the ranks that hold the same
/// ones.
class HybridZeroStrategy : public MeshStrategy {
 public:
  HybridZeroStrategy(const Options& options, const HybridOptions& setup,
                     DeviceMesh& mesh);

  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return zero_->optimizer(); }
  std::vector<Bill> bills() override;
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;
  std::int64_t num_skipped_steps() const override {
    return zero_->num_skipped_steps();
  }

 private:
  void shard();
  /// One for the dense parameters, and one for experts where there are any.
  std::vector<zero::ZeroOptimizer*> zeros() const;
  /// The factor by which the gradients of `zero` are still too large.
  double scale_of(const zero::ZeroOptimizer& zero) const;
  /// The norm of the whole gradient, when its sums are complete. Collective.
  double norm();

  std::unique_ptr<Gpt> model_;
  std::unique_ptr<moe::ParameterSubset> dense_, experts_;
  std::unique_ptr<zero::ZeroOptimizer> zero_, expert_zero_;
};

/// The strategy for the stage of ZeRO.
std::unique_ptr<Strategy> make_strategy(const Options& options,
                                        const HybridOptions& setup,
                                        DeviceMesh& mesh);
/// One device that sums the gradients of all micro-batches of all replicas.
ReferenceRun reference_run(const Options& options, const HybridOptions& setup);
/// Ranks of one stage do the same on the same shapes, except in a ring of
/// unlike ranks.
FoldClass fold_class(const Options& options, const HybridOptions& setup);

// --- Batch norms ---------------------------------------------------------------

// Running statistics of batch norms, where replicas see different images.
//
// A batch norm divides each micro-batch by its own statistics. They depend on no
// other micro-batch and on no other rank, so losses and gradients on a mesh
// equal one device's for the same micro-batches one by one. The running
// statistics are another matter: evaluation reads them, and a replica has seen
// its own images alone. There are three ways to go on:
//
//   each keeps its own        the replicas drift apart, and what is saved depends
//                             on who saves it
//   the first replica's win   DistributedDataParallel sends them to the others
//                             before each forward: 1/d of the images count
//   the sums of all           here: each replica has the same bits, and one device
//                             has the same numbers
//
// A stage adds up the values of a step's micro-batches and their squares. At the
// end of the step replicas add theirs, and all update once, from all images.

/// Updates the running statistics of this rank's stages from the micro-batches
/// of all ranks of `replicas`, which hold the same stages and have run equally
/// many equal micro-batches. In a schedule of two directions the two ranks of a
/// stage add up theirs as well. One all-reduce of 16 bytes per channel for each
/// of the two groups; nothing for models without batch norms. Collective.
void commit_statistics(PipelineModel& model, ProcessGroup& replicas);
/// Bytes that this rank sends in one call.
double statistics_bytes(PipelineModel& model, const ProcessGroup& replicas);

/// The running statistics of this rank's stages.
std::vector<NamedTensor> running_statistics(PipelineModel& model);

}  // namespace shardbook::hybrid
