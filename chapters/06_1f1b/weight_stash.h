#pragma once

// Earlier versions of the weights, which asynchronous pipelines stash.
//
//   WeightStash stash(model.parameters());   // they are version 0
//   stash.load(3);                           // backward of an old mini-batch
//   ...
//   stash.load(stash.newest());
//   stash.advance(/*oldest_needed=*/4);      // a copy of the newest,
//   optimizer.step();                        // to be updated
//
// Loading a version copies nothing: the parameters' handles are pointed at
// other arrays. A recorded graph reads the arrays that the handles point at
// when it runs. So a backward is wrong unless its forward's version is loaded.
//
// Gradients, optimizer state and the statistics of batch norms have no
// versions. Narayanan et al. 2019, section 3.3.

#include <deque>
#include <set>
#include <vector>

#include "chapters/common/pipeline/dependencies.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "core/optim.h"

namespace shardbook::pipeline {

class WeightStash {
 public:
  explicit WeightStash(Tensors parameters);

  int newest() const { return oldest_ + static_cast<int>(size()) - 1; }
  /// The number of versions that are kept, including the newest.
  std::size_t size() const { return versions_.size(); }
  /// Throws Error for a version that is not kept.
  void load(int version);
  /// Drops versions before `oldest_needed`, and begins the next one: the
  /// parameters become a copy of the newest, or the newest itself if it is no
  /// longer needed.
  void advance(int oldest_needed);

 private:
  Tensors parameters_;
  std::deque<Tensors> versions_;
  int oldest_ = 0;
};

/// The versions that a forward and its backward read.
struct VersionUse {
  int stage = 0;
  int micro_batch = 0;
  int forward = 0;   ///< version that the forward read
  int backward = 0;  ///< version that the backward read
  int newest = 0;    ///< version that the gradient is applied to
  /// The error of the gradients g of weights and of the stage's input:
  /// |g - g*| / |g*|, with g* from the forward's weights. 0 with stashing.
  double error = 0;
};

/// Loads the schedule's versions, and updates one rank's stage.
class StashedUpdates : public WeightVersions {
 public:
  /// `stashes` false: backward reads the newest weights, whatever the forward
  /// read. (Versions are then kept only for VersionUse::error.) Keeps
  /// references, also to the schedule. The rank has one stage.
  StashedUpdates(const Schedule& schedule, PipelineModel& model,
                 Optimizer& optimizer, int rank, bool stashes = true);

  void before_forward(int micro_batch) override;
  void before_recompute(int micro_batch) override;
  void before_backward(int micro_batch, const StageRun& run,
                       const Tensors& grad_outputs) override;
  void after_backward(int micro_batch) override;
  /// Averages gradients over the stage's replicas first.
  void update(int micro_batch) override;

  /// One entry for each backward in the lists, without repeats.
  const std::vector<VersionUse>& uses() const { return uses_; }
  const WeightStash& stash() const { return stash_; }
  /// The norm of the gradient in the last update.
  double grad_norm() const { return grad_norm_; }

 private:
  int version_of(int micro_batch) const;
  int oldest_needed() const;
  double gradient_error(const VersionUse& use, const StageRun& run,
                        const Tensors& grad_outputs);

  const Schedule& schedule_;
  ReadVersions reads_;
  PipelineModel& model_;
  Optimizer& optimizer_;
  bool stashes_;
  int stage_ = 0;
  int replicas_ = 1;
  WeightStash stash_;
  /// Versions of forwards whose backward has not run yet.
  std::multiset<int> in_use_;
  /// The oldest version that the n-th and later forwards of the rank's list
  /// read.
  std::vector<int> oldest_from_;
  int forwards_ = 0;         ///< so far
  int steady_forwards_ = 0;  ///< forwards that each round of the list repeats
  std::vector<VersionUse> uses_;
  double grad_norm_ = 0;
};

}  // namespace shardbook::pipeline
