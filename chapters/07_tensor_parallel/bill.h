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
/// Of these, the gradients of which every rank has a term (partial_gradients.h).
double partial_bytes(const Options& options, const ModelConfig& config, int t);
/// Seconds that they take on the cluster `textbook`.
double partial_s(const Options& options, const ModelConfig& config, int t);
/// Bytes that a rank holds, by kind.
MemoryBill memory(const Options& options, const ModelConfig& config,
                  const BillSizes& sizes);
/// Seconds of a step on the cluster `textbook`.
double step_s(const Options& options, const ModelConfig& config,
              const BillSizes& sizes);

}  // namespace shardbook::tensor_parallel
