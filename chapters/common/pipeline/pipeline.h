#pragma once

// What every pipeline has around its schedule: the stages of this rank, the
// values that travel between stages, and what ends a step.
//
//   PipelineModel model(options, layers, {cuts, owners}, world);
//   StageRun run = run_forward(model.stage(s), inputs);     // micro-batch b
//   mailbox.send_forward(run.outputs, b, s);
//   ...
//   Tensors grads = mailbox.receive_backward(...);
//   mailbox.send_backward(run_backward(run, grads), ...);
//   ...
//   StepResult result = model.update(optimizer, local_loss);

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/training.h"
#include "comm/process_group.h"
#include "core/context.h"
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

/// Stage s at rank s.
PipelineLayout one_stage_per_rank(const std::vector<int>& cuts);

class PipelineModel {
 public:
  /// Builds this rank's stages (and loads --load into them). A parameter that
  /// stands in several of them is one tensor. All ranks call it together.
  PipelineModel(const Options& options, std::shared_ptr<const LayerList> layers,
                PipelineLayout layout, ProcessGroup& world);

  /// One that this rank holds; throws Error for others.
  Stage& stage(int s);
  bool holds(int s) const { return stages_.count(s) != 0; }
  const PipelineLayout& layout() const { return layout_; }
  const LayerList& layers() const { return *layers_; }
  /// Of all stages of this rank, each once.
  const Tensors& parameters() const { return parameters_; }
  /// Those that the norm of the whole gradient counts here: parameters that
  /// several ranks hold are counted on the first of them.
  const Tensors& counted_parameters() const { return own_; }

  /// Sums the gradients of parameters that several ranks hold (tied embeddings,
  /// stages of which each rank computed a part). One all-reduce each, in the
  /// same order everywhere.
  void reduce_shared_gradients();
  /// Sums `local_loss` (0 where there is none) and the square of the gradients'
  /// norm over the ranks, in one all-reduce of two f64; clips by the norm of
  /// the whole model (--clip), updates, forgets the gradients. Shared gradients
  /// must have been reduced.
  StepResult update(const Options& options, Optimizer& optimizer,
                    double local_loss);
  /// Bytes that this rank sends in one call of both.
  double predicted_update_bytes() const;

  /// All parameters and buffers by name, on rank 0 (none elsewhere).
  /// Collective; messages that are not part of training: call it after the
  /// bytes have been counted.
  std::vector<NamedTensor> full_parameters();

 private:
  struct Shared {
    Tensor parameter;
    std::shared_ptr<ProcessGroup> group;
  };

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

// --- A micro-batch inside a stage -------------------------------------------

/// What a stage computes for one micro-batch.
using StageFunction = std::function<Tensors(const Tensors&)>;

/// A micro-batch's graph in a stage, from forward to backward.
struct StageRun {
  Tensors inputs;  ///< leaves; those that need a gradient require one
  /// For the next stage. Backward needs them no longer: let them go when they
  /// have been sent.
  Tensors outputs;
  /// Stands for the outputs at the end of the graph, with no elements;
  /// undefined where nothing needs a gradient.
  Tensor end;
  /// Gradients of the outputs that need one, when backward begins.
  std::shared_ptr<Tensors> grad_outputs;
  std::vector<bool> needs_grad;  ///< by output
};

/// `received` become the leaves of a new graph: first what `spec` lists, then
/// skips (which need gradients).
StageRun run_forward(const StageFunction& stage, const Tensors& received,
                     const LayerInput& spec);
StageRun run_forward(Module& stage, const Tensors& received,
                     const LayerInput& spec);
/// The same once more, for a micro-batch whose first run kept no graph:
/// `random` is what the first run began with.
StageRun run_forward_again(const StageFunction& stage, const Tensors& received,
                           const LayerInput& spec, const RandomState& random);
/// Gradients of the inputs (undefined where they need none); those of the
/// parameters are accumulated. Frees the graph, and each of `grad_outputs` when
/// it has been used: one per output, undefined where none came.
Tensors run_backward(StageRun run, Tensors grad_outputs);

// --- Between stages ---------------------------------------------------------

/// Values and gradients on their way between the stages. Shapes are known on
/// both ends (trace_shapes). A value for a stage of the same rank is handed
/// over, and costs nothing. One for another rank stays until that rank has it,
/// whenever this is, and is booked as communication from then on.
class Mailbox {
 public:
  Mailbox(ProcessGroup& world, int num_stages)
      : world_(world), num_stages_(num_stages) {}

  /// Values for stage `stage`, which is at rank `to`.
  void send_forward(const Tensors& values, int micro_batch, int stage, int to);
  /// What stage `stage` takes.
  Tensors receive_forward(const LayerInput& spec, int micro_batch, int stage,
                          int from);
  /// Gradients of what stage `stage` took; `spec` says which travel.
  void send_backward(const Tensors& grads, const LayerInput& spec,
                     int micro_batch, int stage, int to);
  Tensors receive_backward(const LayerInput& spec, int micro_batch, int stage,
                           int from);
  /// Waits until everything has been received.
  void flush();

 private:
  void send(const Tensor& value, int to, int tag, const std::string& label);
  Tensor receive(const ValueSpec& spec, int from, int tag,
                 const std::string& label);
  int tag(int micro_batch, int stage, bool is_backward) const {
    return (micro_batch * num_stages_ + stage) * 2 + (is_backward ? 1 : 0);
  }

  struct Sent {
    int to = 0;
    Work work;
    Tensor value;
  };
  ProcessGroup& world_;
  int num_stages_;
  std::deque<Sent> sent_;
  /// Between stages of this rank, by tag.
  std::map<int, std::deque<Tensor>> handed_over_;
};

/// Bytes of the values (forward) or of their gradients (backward) that cross a
/// cut, for one micro-batch.
double forward_bytes(const LayerInput& spec);
double backward_bytes(const LayerInput& spec);

}  // namespace shardbook
