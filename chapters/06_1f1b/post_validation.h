#pragma once

// Optimizer steps that do not wait for each other.
//
// Clipping needs the norm of the whole gradient, and a step with inf or NaN in
// any gradient must be skipped on every rank. Both need an all-reduce before
// the optimizer. The ranks of a pipeline end one after another, so in the
// all-reduce they all wait for the last, and the bubble is back.
// Post-validation steps first and checks later:
//
//   rank 0    W W |step| F F F F ........ |validate| I
//   rank 1      W W |step| F F F .... |validate| I
//   rank 2        W W |step| F F  |validate| I
//                    \___>    \___>     <____ full norm
//                  partial norms
//
// A rank decides from the gradients of the stages up to its own. If their norm
// is too large or not finite, it does not step. The full norm travels back from
// the last rank while the next batch warms up. It usually confirms the step: no
// clipping, nothing to skip. Otherwise every rank restores its parameters,
// redoes the step with the full norm, and repeats the forwards since.
//
// The result has the same bits as the check before the step. It costs a second
// copy of parameters and optimizer state. Qi et al. 2024, section 4.

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/pipeline/pipeline_model.h"
#include "core/optim.h"

namespace shardbook::pipeline {

/// 8-byte numbers that travel between ranks; a sender does not wait.
class NumberMail {
 public:
  NumberMail(ProcessGroup& group, std::string label)
      : group_(group), label_(std::move(label)) {}
  void send(double number, int to, int tag);
  double receive(int from, int tag);
  /// Drops numbers that have arrived; `finish` waits for the others.
  void forget_arrived();
  void finish();

 private:
  struct Sent {
    Tensor value;
    Work work;
  };
  ProcessGroup& group_;
  std::string label_;
  std::deque<Sent> sent_;
};

/// The right step, once the norm of all gradients is known.
struct Verdict {
  bool skips = false;  ///< inf or NaN
  double factor = 1;   ///< scales all gradients
};
Verdict verdict_of(double squared_norm, double clip);

class PostValidation {
 public:
  /// Rank r holds stage r. Keeps references. `clip` 0: none.
  PostValidation(PipelineModel& model, Optimizer& optimizer, double clip,
                 ProcessGroup& world);

  /// Call it when the rank's gradients are complete and shared ones reduced.
  /// Receives the partial norm from the previous rank, sends its own to the
  /// next.
  void step();
  /// Call it before the next backward. Receives the full norm from the next
  /// rank and sends it to the previous one. Returns false on all ranks when the
  /// step was amended; then the forwards since `step` were wrong. Returns true
  /// when there was no step. Clears the gradients.
  bool validate();

  double grad_norm() const { return grad_norm_; }  ///< of the last validated
  int num_amended() const { return num_amended_; }
  /// Bytes that this rank sends per step.
  double predicted_bytes() const;

 private:
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
  NumberMail norms_;
  double grad_norm_ = 0;
  int num_amended_ = 0;
};

}  // namespace shardbook::pipeline
