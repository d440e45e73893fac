#pragma once

// Weights of the past: what asynchronous pipelines stash.
//
//   WeightStash stash(model.parameters());   // they are version 0
//   stash.load(3);                           // backward of an old mini-batch
//   ...
//   stash.load(stash.newest());
//   stash.advance(/*oldest_needed=*/4);      // a copy of the newest,
//   optimizer.step();                        // to be updated
//
// Nothing is copied to load a version: the parameters' handles are pointed at
// other arrays. A graph that was recorded before reads what they point at when
// it runs, which is why a backward without its forward's version is wrong.
//
// Gradients, optimizer state and the statistics of batch norms have no
// versions. Narayanan et al. 2019, section 3.3.

#include <deque>
#include <set>
#include <vector>

#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/versions.h"
#include "core/optim.h"

namespace shardbook::pipeline {

class WeightStash {
 public:
  explicit WeightStash(Tensors parameters);

  int newest() const { return oldest_ + static_cast<int>(size()) - 1; }
  /// Versions that are kept, the newest among them.
  std::size_t size() const { return versions_.size(); }
  /// Throws Error for a version that is not kept.
  void load(int version);
  /// Drops versions before `oldest_needed`, and makes the next one: the
  /// parameters are a copy of the newest, or the newest itself where nobody
  /// needs it any more.
  void advance(int oldest_needed);

 private:
  Tensors parameters_;
  std::deque<Tensors> versions_;
  int oldest_ = 0;
};

/// What a backward did.
struct VersionUse {
  int stage = 0;
  int micro_batch = 0;
  int forward = 0;   ///< version that the forward read
  int backward = 0;  ///< and the backward
  int newest = 0;    ///< and the one that the gradient is applied to
  /// Of the gradients that backward gives, of weights and of the stage's input:
  /// |g - g*| / |g*|, g* with the forward's weights; 0 with stashing.
  double error = 0;
};

/// Updates of one rank's stage in between: versions as the schedule says.
class StashedUpdates : public WeightVersions {
 public:
  /// `stashes` false: backward reads the newest weights, whatever the forward
  /// read. (Versions are then kept for VersionUse::error alone.) Keeps
  /// references, one to the schedule among them. Throws Error for a rank with
  /// several stages.
  StashedUpdates(const Schedule& schedule, PipelineModel& model,
                 Optimizer& optimizer, int rank, bool stashes = true);

  void before_forward(int micro_batch) override;
  void before_recompute(int micro_batch) override;
  void before_backward(int micro_batch, const StageRun& run,
                       const Tensors& grad_outputs) override;
  void after_backward(int micro_batch) override;
  /// Replicas of the stage take the mean of their gradients.
  void update(int micro_batch) override;

  /// Of the first backwards of a run, as many as its lists contain.
  const std::vector<VersionUse>& uses() const { return uses_; }
  const WeightStash& stash() const { return stash_; }
  /// Of the gradient of the last update.
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
  /// Versions that forwards have read whose backward is to come.
  std::multiset<int> in_use_;
  /// The oldest version that the n-th forward of the rank's list and those
  /// behind it read.
  std::vector<int> oldest_from_;
  int forwards_ = 0;         ///< so far
  int steady_forwards_ = 0;  ///< forwards that each round of the list repeats
  std::vector<VersionUse> uses_;
  double grad_norm_ = 0;
};

}  // namespace shardbook::pipeline
