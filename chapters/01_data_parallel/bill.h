#pragma once

// The cost of DataParallel for each device, by formula.

#include <cstdint>
#include <vector>

#include "chapters/common/run/report.h"

namespace shardbook::data_parallel {

double bytes_of(const Tensors& tensors);

/// Bytes that leave one device in one step, by reason. `share` is a device's
/// fraction of the rows, and d the number of devices that have rows.
struct Traffic {
  double scatter_inputs = 0;     ///< main: (1 - share_0) input
  double replicate = 0;          ///< main: (d - 1) (parameters + buffers)
  double gather_outputs = 0;     ///< device i > 0: share_i output
  double scatter_gradients = 0;  ///< main: (1 - share_0) output
  double reduce_gradients = 0;   ///< device i > 0: parameters

  double total() const {
    return scatter_inputs + replicate + gather_outputs + scatter_gradients +
           reduce_gradients;
  }
};

/// The traffic of every device, even without rows. `row_bytes_in` and
/// `row_bytes_out` count one row of the batch.
std::vector<Traffic> step_traffic(std::int64_t batch, int num_devices,
                                  double row_bytes_in, double row_bytes_out,
                                  double parameter_bytes, double buffer_bytes);

/// The same for a run of the book's models.
std::vector<Traffic> step_traffic(const Options& options,
                                  const ModelConfig& config);

/// Bytes that every device holds: the main one holds parameters, gradients,
/// optimizer state and the whole output; each other one a replica and its rows.
std::vector<MemoryBill> memory_bills(const Options& options,
                                     const ModelConfig& config, Module& model);

/// Seconds of a step on the cluster `textbook`, if all devices have equally
/// many rows and the parameters are one message.
double step_s(const Options& options, const ModelConfig& config, Module& model);

}  // namespace shardbook::data_parallel
