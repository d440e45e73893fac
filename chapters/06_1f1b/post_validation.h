#pragma once

// Optimizer steps that do not wait for each other.
//
// Clipping needs the norm of the whole gradient, and a step with inf or NaN in
// it must be skipped everywhere: an all-reduce before the optimizer, at which
// the ranks of a pipeline, who end one after the other, wait for the last. It
// makes a parallelogram of slots a rectangle again, and puts the bubble back.
// Post-validation steps first and asks later:
//
//   rank 0    W W |step| F F F F ........ |validate| I
//   rank 1      W W |step| F F F .... |validate| I
//   rank 2        W W |step| F F  |validate| I
//                    \___>    \___>     <____ what all know
//                   partial norms
//
// A rank steps on what it knows, the gradients of the stages up to its own. If
// these alone are too large or not finite, it does not step. What the last rank
// knows travels back while the next batch warms up. Mostly it says what was
// assumed: no clipping, nothing to skip. Otherwise every rank takes back its
// step, redoes it with the norm of all, and repeats the forwards that it has
// done since.
//
// The result has the same bits as the check before the step. It costs a second
// copy of parameters and optimizer state. Qi et al. 2024, section 4.

#include <vector>

#include "chapters/common/pipeline/pipeline_model.h"
#include "core/optim.h"

namespace shardbook::pipeline {

/// What a step does when the norm of all gradients is known.
struct Verdict {
  bool skips = false;  ///< inf or NaN
  double factor = 1;   ///< of all gradients
};
Verdict verdict_of(double squared_norm, double clip);

/// The check before the step: one all-reduce of the squared norm, then all
/// ranks scale and step, or skip. Returns the norm. Forgets the gradients.
double checked_update(PipelineModel& model, Optimizer& optimizer, double clip,
                      ProcessGroup& world);

class PostValidation {
 public:
  /// Rank r holds stage r. Keeps references. `clip` 0: none.
  PostValidation(PipelineModel& model, Optimizer& optimizer, double clip,
                 ProcessGroup& world);

  /// When the rank's gradients are complete and shared ones reduced. Hears of
  /// the ranks before, tells those behind.
  void step();
  /// Before the next backward: hears of the ranks behind, tells those before.
  /// False when the step was amended, on all ranks; then forwards since `step`
  /// were wrong. Forgets the gradients. True when there was no step.
  bool validate();

  double grad_norm() const { return grad_norm_; }  ///< of the last validated
  bool has_skipped() const { return has_skipped_; }
  int num_amended() const { return num_amended_; }
  /// Bytes that this rank sends per step.
  double predicted_bytes() const;

 private:
  void send(double squared_norm, int to, int tag);
  double receive(int from, int tag);
  void save();
  void roll_back();
  void apply(const Verdict& verdict);

  PipelineModel& model_;
  Optimizer& optimizer_;
  double clip_;
  ProcessGroup& world_;
  bool is_pending_ = false;
  bool has_stepped_ = false;
  double squared_norm_ = 0;  ///< of the stages up to this one
  double lr_ = 0;            ///< of the step that is not validated
  std::vector<Tensor> parameters_;
  std::vector<OptimizerSlot> slots_;
  struct Sent {
    Tensor value;
    Work work;
  };
  std::vector<Sent> sent_;
  double grad_norm_ = 0;
  bool has_skipped_ = false;
  int num_amended_ = 0;
};

}  // namespace shardbook::pipeline
