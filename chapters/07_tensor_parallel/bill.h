#pragma once

// The cost of tensor parallelism: the formulas of the page.

#include "chapters/common/run/report.h"

namespace shardbook::tensor_parallel {

struct BillSizes {
  int t = 1;  ///< ranks
  std::int64_t micro_batches = 1;
  bool recompute = false;
  bool distribute_saved_activations = false;
  std::int64_t vocabulary = 0;  ///< with its padding
};

/// Bytes that a rank sends in one step, without the norm's.
double bytes_per_step(const Options& options, const ModelConfig& config,
                      const BillSizes& sizes);
/// Bytes that a rank holds, by kind.
MemoryBill memory(const Options& options, const ModelConfig& config,
                  const BillSizes& sizes);
/// Seconds of a step on the cluster `textbook`.
double step_s(const Options& options, const ModelConfig& config,
              const BillSizes& sizes);

}  // namespace shardbook::tensor_parallel
