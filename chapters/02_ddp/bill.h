#pragma once

// The cost of DDP for a rank: the page's formulas.

#include <cstdint>
#include <optional>

#include "chapters/02_ddp/ddp.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"

namespace shardbook::ddp {

struct BillSizes {
  double ranks = 1;
  std::int64_t steps = 0;
  double elements = 0;       ///< of all parameters
  double tensors = 0;        ///< parameters
  double element_bytes = 0;  ///< of a parameter and its gradient
  /// Bytes of a gradient's element on the wire; 0: element_bytes.
  double wire_bytes = 0;
  DdpOptions ddp = {};
};
BillSizes bill_sizes(Module& module, const DdpOptions& ddp, int ranks,
                     std::int64_t steps, std::optional<DType> wire = {});

/// Bytes that a rank sends, with construction, without losses.
double predicted_bytes(const BillSizes& sizes);

/// A step on the cluster `textbook`.
struct StepTime {
  const ModelConfig& config;
  double ranks = 1, micro_batches = 1;
  double rows = 1;        ///< samples of a micro-batch
  double wire_bytes = 4;  ///< of a gradient's element
  bool recompute = false;
};
/// Seconds of the last step; not predicted for models without
/// textbook::model_times.
double step_s(const Options& options, const StepTime& step, Module& module,
              const DistributedDataParallel& ddp);

}  // namespace shardbook::ddp
