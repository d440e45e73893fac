#pragma once

// Memory under ZeRO, as formulae.
//
//   bytes per rank            parameters   gradients   optimizer state
//   DDP                          b Np        b Np          K Np
//   ZeRO-1                       b Np        b Np          K Np / d
//   ZeRO-2                       b Np        b Np / d      K Np / d
//   ZeRO-3                       b Np / d    b Np / d      K Np / d
//
// b: bytes of an element, 2 in mixed precision; K: bytes of optimizer state per
// parameter, 12 for Adam with an f32 master copy (4 + 4 + 4), 8 for Adam in
// f32. Activations are left out: no stage makes them smaller.
//
// Rajbhandari et al. 2020, section 3 and table 1.

#include <cstdint>

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/common/run/report.h"

namespace shardbook::zero {

/// Bytes per rank; may be fractions, as formulas ignore padding.
struct ModelStates {
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  double total() const { return parameters + gradients + optimizer; }
};

struct StateBytes {
  double parameter = 2;  ///< per element
  double gradient = 2;
  double optimizer = 12;
};
/// K and b of the table: `dtype` is the parameters', `optimizer` "sgd", "adam"
/// or "adamw".
StateBytes state_bytes(DType dtype, const std::string& optimizer,
                       const OptimizerOptions& optimizer_options);

/// Model states of `parameters` elements on `ranks` ranks; stage 0 is DDP.
ModelStates model_states(int stage, double parameters, int ranks,
                         const StateBytes& bytes = {});
/// The largest number of parameters whose model states fit `capacity_bytes`.
double max_parameters(int stage, double capacity_bytes, int ranks,
                      const StateBytes& bytes = {});

/// DeepSpeed's estimate of model states: decimal bytes of a device and of one
/// node's host. It counts 18 bytes per parameter (16 without the 16-bit copy)
/// instead of the paper's 16 (14): it adds f32 gradients to the 16-bit ones.
struct DeepSpeedSetup {
  double parameters = 0;
  double largest_layer = 0;  ///< parameters; stage 3
  int devices_per_node = 1;
  int nodes = 1;
  bool offload_optimizer = false;
  bool offload_parameters = false;  ///< stage 3
  bool zero_init = true;  ///< stage 3: the model is cut while it is built
};
struct DeepSpeedEstimate {
  double device_bytes = 0;
  double host_bytes = 0;
};
/// Stages 2 and 3. microsoft/DeepSpeed, docs/code-docs/source/memory.rst.
DeepSpeedEstimate deepspeed_estimate(int stage, const DeepSpeedSetup& setup);

/// Bytes that this rank's device holds while it trains `config` with `rows`
/// samples per micro-step. Steps that f16 skipped make no update.
MemoryBill zero_bill(const ZeroOptimizer& zero, const Options& options,
                     const ModelConfig& config, std::int64_t rows,
                     bool recompute = false);

}  // namespace shardbook::zero
