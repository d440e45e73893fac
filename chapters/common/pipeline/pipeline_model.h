#pragma once

// The stages of a rank, as an engine runs them, with the end of a step (reduce,
// clip, update), and the rows of each micro-batch.
//
//   PipelineModel model(options, layers, {cuts, owners}, world);
//   ... model.stage(s) ...               // forwards and backwards
//   model.reduce_shared_gradients();
//   StepResult result = model.update(options, optimizer, local_loss);

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/data.h"
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
  /// The layers of a stage: begin .. end-1.
  int begin(int stage) const { return cuts[static_cast<std::size_t>(stage)]; }
  int end(int stage) const { return begin(stage + 1); }
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
  /// The parameters that this rank counts in the norm of the whole gradient:
  /// the first of several holders counts a parameter.
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
  /// Parameters that this rank counts in the norm.
  Tensors own_;
};

namespace pipeline {

/// Rows of a batch, and their place in the training run.
struct Piece {
  std::uint64_t step = 0;  ///< seeds dropout, with `slice`
  BatchSlice slice;
  std::int64_t rows = 0;
  double share = 1;  ///< the weight of these rows' loss in the batch
};

/// Supplies the inputs of a pipeline, and the loss of its outputs.
class Feed {
 public:
  virtual ~Feed() = default;
  virtual Piece piece(int micro_batch) const = 0;
  /// The model's inputs; called on ranks with stage 0.
  virtual Tensors inputs(int micro_batch) = 0;
  /// The mean loss over the rows; called on ranks with the last stage.
  virtual Tensor loss(int micro_batch, const Tensors& outputs) = 0;
  /// Inputs of `rows` rows, on any device, and the parameters' dtype: they give
  /// the shapes of all messages.
  virtual Tensors example(std::int64_t rows) const = 0;
  virtual DType dtype() const = 0;
  /// Backward begins with this factor (f16); the reported loss is without it.
  virtual double loss_scale() const { return 1; }
  /// The step has ended: frees what was kept for its micro-batches.
  virtual void end_step() {}
};

/// Cuts global batches into micro-batches of consecutive rows, the last one
/// short (rule CEIL). The first and the last stage read the same data set.
class LanguageFeed : public Feed {
 public:
  /// `loss_of` is the loss of the model's LayerFactory.
  LanguageFeed(const Options& options, const Dataset& data,
               std::vector<MicroBatch> pieces,
               LossFunction loss_of = language_loss);

  /// Micro-batch b belongs to step first_step + b / pieces.
  void set_first_step(std::int64_t step) { first_step_ = step; }
  void set_loss_scale(double scale) { loss_scale_ = scale; }
  const std::vector<MicroBatch>& pieces() const { return pieces_; }

  Piece piece(int micro_batch) const override;
  Tensors inputs(int micro_batch) override;
  Tensor loss(int micro_batch, const Tensors& outputs) override;
  Tensors example(std::int64_t rows) const override;
  DType dtype() const override { return dtype_; }
  double loss_scale() const override { return loss_scale_; }

 protected:
  Batch batch(int micro_batch) const;

 private:
  const Dataset& data_;
  std::int64_t rows_per_step_;
  DType dtype_;
  std::vector<MicroBatch> pieces_;
  LossFunction loss_of_;
  std::int64_t first_step_ = 0;
  double loss_scale_ = 1;
};

}  // namespace pipeline
}  // namespace shardbook
