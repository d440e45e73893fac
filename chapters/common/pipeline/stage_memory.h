#pragma once

// The memory that a stage keeps for a micro-batch, and needs while it computes.
//
//   F        the inputs arrive, the stage computes, the outputs are sent
//   F .. B   kept: the graph, or (with recomputation) only the inputs
//   B        the graph is recomputed if it was not kept, before or after the
//            outputs' gradients arrive; backward runs
//   I        B without the weights' gradients
//   I .. W   kept: the inputs of the weights' gradients
//
// One micro-batch runs on shapes, and its bytes are read off. The schedule
// decides how many micro-batches are kept at the same time (schedule_memory.h).
// Values that were sent count as communication (mailbox.h), so these bytes do
// not depend on how long messages wait.

#include "chapters/common/pipeline/engine.h"

namespace shardbook::pipeline {

/// Bytes of one action of one micro-batch.
struct ActionBytes {
  // Peaks; activations and inputs are those of this micro-batch
  double activations = 0, inputs = 0, gradients = 0;
  // What the micro-batch keeps after the action
  double kept = 0, inputs_kept = 0;
};

/// The actions of a micro-batch at one stage. A parameter's first gradient of a
/// step is kept; later ones are computed beside it and added to it.
struct StageNeeds {
  ActionBytes forward;
  ActionBytes first[4], later[4];  ///< by ActionKind: B, I and W
  double gradients = 0;            ///< of all parameters of the stage
  double of_input = 0;             ///< those that I computes: biases, norms
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

/// Runs the stage on shapes: four times forward and backward. Call it between
/// steps, when `feed` keeps nothing.
StageNeeds measure_stage(const StageOnShapes& what, Feed& feed);

}  // namespace shardbook::pipeline
