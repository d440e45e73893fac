#pragma once

// The stages of this rank, and the end of a step: reduce, clip, update.
//
//   PipelineModel model(options, layers, {cuts, owners}, world);
//   ... model.stage(s) ...               // forwards and backwards
//   model.reduce_shared_gradients();
//   StepResult result = model.update(options, optimizer, local_loss);

#include <map>
#include <memory>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/training.h"
#include "comm/process_group.h"
#include "core/optim.h"

namespace shardbook {

/// Which ranks hold which stages.
struct PipelineLayout {
  /// First layer of each stage, and the end.
  std::vector<int> cuts;
  /// Ranks that hold stage s; the first one's parameters are saved and
  /// compared.
  std::vector<std::vector<int>> owners;

  int num_stages() const { return static_cast<int>(owners.size()); }
};

/// Stage s on rank s.
PipelineLayout one_stage_per_rank(const std::vector<int>& cuts);

class PipelineModel {
 public:
  /// Builds this rank's stages (and loads --load into them). A parameter that
  /// several of them use is one tensor. `part_of`: the part of a file's tensor
  /// that the layers hold, where they are sharded. Collective.
  PipelineModel(const Options& options, std::shared_ptr<const LayerList> layers,
                PipelineLayout layout, ProcessGroup& world,
                const PartOf& part_of = {});

  /// A stage that this rank holds; throws Error for others.
  Stage& stage(int s);
  bool holds(int s) const { return stages_.count(s) != 0; }
  const PipelineLayout& layout() const { return layout_; }
  const LayerList& layers() const { return *layers_; }
  /// The parameters of all stages of this rank, each once.
  const Tensors& parameters() const { return parameters_; }
  /// The parameters that this rank counts in the norm of the whole gradient: a
  /// parameter on several ranks is counted on the first of them.
  const Tensors& counted_parameters() const { return own_; }

  /// A parameter that several ranks hold, and these ranks.
  struct Shared {
    Tensor parameter;
    std::shared_ptr<ProcessGroup> group;
  };
  const std::vector<Shared>& shared() const { return shared_; }

  /// Sums the gradients of parameters that several ranks hold (tied embeddings,
  /// and stages with replicas). One all-reduce each, in the same order on every
  /// rank.
  void reduce_shared_gradients();
  /// Sums `local_loss` (0 where there is none) and the square of the gradients'
  /// norm over the ranks, in one all-reduce of two f64; clips by the norm of
  /// the whole model (--clip), updates, clears the gradients. Call
  /// reduce_shared_gradients before.
  StepResult update(const Options& options, Optimizer& optimizer,
                    double local_loss);
  /// Bytes that this rank sends in one call of the two above.
  double predicted_update_bytes() const;

  /// The parameters and buffers of this rank's stages by name, each once.
  std::vector<NamedTensor> named_state();
  /// All parameters and buffers by name, on rank 0 (none elsewhere).
  /// Collective. Its messages are no part of training: call it after the bytes
  /// have been counted. Parameters of sharded layers are this rank's parts.
  std::vector<NamedTensor> full_parameters();

 private:
  PipelineLayout layout_;
  std::shared_ptr<const LayerList> layers_;
  ProcessGroup& world_;
  DType dtype_;
  std::map<int, std::unique_ptr<Stage>> stages_;
  Tensors parameters_;
  std::vector<Shared> shared_;
  /// Parameters that count for the norm here.
  Tensors own_;
};

}  // namespace shardbook
