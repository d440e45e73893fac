#pragma once

// What a stage keeps of a micro-batch, and needs while it works on one.
//
//   F        the inputs arrive, the stage computes, the outputs are sent
//   F .. B   kept: the graph, or (with recomputation) the inputs alone
//   B        the outputs' gradients arrive, and before or after them the graph
//            again, where it was not kept; backward, whose widest point is the
//            peak
//
// One micro-batch is run on shapes, and its bytes are read off. A schedule then
// says which micro-batches are kept at the same time:
//
//   peak = max over its actions of (kept by the others + needed by this one)
//
// Values that were sent are booked as communication (pipeline.h), so that all
// this depends on the schedule alone, and not on who waits for whom.

#include <functional>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/report.h"

namespace shardbook {

/// Bytes of activations, but for the gradients.
struct MicroBatchMemory {
  double forward_peak = 0;
  double kept = 0;
  /// With what is kept. A parameter's first gradient of a step becomes its
  /// gradient; later ones are computed beside it, and added.
  double first_backward_peak = 0;
  double later_backward_peak = 0;
  /// Peaks of the parameters' gradients (MemoryKind::kGradient) in these.
  double first_gradients = 0;
  double later_gradients = 0;
};

struct StageMemoryOptions {
  DType dtype = DType::kF32;
  /// The graph is dropped after the forward, and made again ...
  bool recompute = false;
  /// ... before the outputs' gradients arrive, or when they are there.
  bool early_recompute = true;
  /// Of the last stage: turns outputs into the scalar that backward begins at.
  std::function<Tensor(const Tensors& outputs)> loss;
};

/// Layers begin .. end-1 of a model, whose first layer reads data; `specs` as
/// trace_shapes returns them for one micro-batch. Costs two runs on shapes.
MicroBatchMemory measure_micro_batch(const LayerList& layers, int begin,
                                     int end,
                                     const std::vector<LayerInput>& specs,
                                     const StageMemoryOptions& options);

/// One action of a schedule: memory of this micro-batch is taken, or given
/// back.
struct StageEvent {
  bool is_backward = false;
  int micro_batch = 0;
};

/// Peaks of a rank that holds one stage and does this in a step, by kind:
/// activations and gradients. `memory_of` says what each micro-batch takes.
struct StagePeaks {
  double activations = 0;
  double gradients = 0;
};
StagePeaks stage_peaks(
    const std::vector<StageEvent>& events,
    const std::function<const MicroBatchMemory&(int micro_batch)>& memory_of);

/// What does not depend on the schedule, exactly: parameters (and buffers) and
/// optimizer state of a rank. The other kinds are left open.
MemoryBill stage_bill(const Options& options, const Tensors& parameters,
                      const Tensors& buffers = {});

}  // namespace shardbook
