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

#include "chapters/common/pipeline/engine.h"

namespace shardbook::pipeline {

/// Bytes of one action of one micro-batch.
struct ActionBytes {
  // Peaks; activations and inputs are those of this micro-batch
  double activations = 0, inputs = 0, gradients = 0;
  // What is left of the micro-batch afterwards
  double kept = 0, inputs_kept = 0;
};

/// The actions of a micro-batch at one stage. A parameter's first gradient of a
/// step becomes its gradient; later ones are computed beside it, and added.
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

/// Runs it on shapes: four times forward and backward. `feed` must have nothing
/// left of a step.
StageNeeds measure_stage(const StageOnShapes& what, Feed& feed);

}  // namespace shardbook::pipeline
