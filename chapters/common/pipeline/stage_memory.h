#pragma once

// What a stage keeps of a micro-batch, and needs while it works on one.
//
//   F        the inputs arrive, the stage computes, the outputs are sent
//   F .. B   kept: the graph, or (with recomputation) the inputs alone
//   B        the outputs' gradients arrive, and before or after them the graph
//            again, where it was not kept; backward, whose widest point is the
//            peak
//   I        B without the weights' gradients
//   I .. W   kept: what these need
//
// One micro-batch is run on shapes, and its bytes are read off. What is kept at
// the same time is a matter of the schedule (schedule_memory.h). Values that
// were sent are booked as communication (mailbox.h), so all this depends on
// the schedule alone. Waiting for messages does not change it.
//
// An action's bytes depend on what it finds. A parameter's first gradient of a
// step becomes its gradient; later ones are computed beside it, and added. A
// value that a stage of the same rank handed over may be held there as well, so
// it outlives this stage's use of it.

#include <tuple>
#include <vector>

#include "chapters/common/pipeline/engine.h"

namespace shardbook::pipeline {

/// Bytes of one action of one micro-batch.
struct ActionBytes {
  // Peaks; activations and inputs are those of this micro-batch
  double activations = 0, inputs = 0, gradients = 0;
  // What is left of the micro-batch afterwards, without values that stages of
  // this rank hand to each other
  double kept = 0, inputs_kept = 0;
  // Whether the stage still holds those: what it took, and what it gave
  bool holds_input = false, holds_output = false;
  // What it made for stages of this rank: values (F), their gradients (B, I)
  double output = 0, input_gradient = 0;
  /// Parameters of the stage that have a gradient afterwards.
  std::vector<bool> has_gradient;
};

/// Where a value that crosses a cut comes from, or goes to.
enum class Border {
  kOtherRank,     ///< a message; also the ends of the pipeline
  kThisRank,      ///< a stage of the same rank, which does not hold it
  kHeldNextDoor,  ///< one that holds it during the whole action
};

/// What an action finds when it begins.
struct ActionState {
  ActionKind kind = ActionKind::kForward;
  Border takes = Border::kOtherRank, gives = Border::kOtherRank;
  /// Parameters of the stage that have a gradient.
  std::vector<bool> has_gradient;
  /// B and I compute all gradients twice before, to compare them: with the
  /// weights of the forward, and with the newest (--no-stash).
  bool is_compared = false;

  bool operator<(const ActionState& other) const {
    return std::tie(kind, takes, gives, has_gradient, is_compared) <
           std::tie(other.kind, other.takes, other.gives, other.has_gradient,
                    other.is_compared);
  }
};

/// A micro-batch at a stage.
struct StageOnShapes {
  const LayerList& layers;
  int begin = 0, end = 0;  ///< layers begin .. end-1
  LayerInput takes, gives;
  int micro_batch = 0;
  bool recompute = false;
  bool early_recompute = true;
};

/// Runs it on shapes, up to and with the action. `feed` must have nothing left
/// of a step.
ActionBytes measure_action(const StageOnShapes& what, const ActionState& state,
                           Feed& feed);

}  // namespace shardbook::pipeline
