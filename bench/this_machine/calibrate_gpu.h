#pragma once

// One GPU of this machine as a device of a cluster file: few numbers, and the
// shape of its kernels' curves from the nearest device in sim/devices.

#include <map>
#include <string>

#include "core/gpus.h"

namespace shardbook::this_machine {

struct GpuCalibration {
  std::string name;
  std::int64_t memory_bytes = 0;
  int multiprocessors = 0;
  int major = 0;  ///< compute capability
  /// FLOP/s of a large product by dtype ("bf16").
  std::map<std::string, double> products;
  double half_k = 0;       ///< where a product has half of that speed
  double bytes_per_s = 0;  ///< read and written, by a copy on the device
  double launch_s = 0;     ///< of the host, to issue one operation
  double kernel_s = 0;     ///< of the GPU, for the smallest operation
  double host_bytes_per_s = 0, host_latency_s = 0;  ///< copies from the host
};

/// Measures cuda:0.
GpuCalibration measure_gpu();

/// k at which a product has half of its speed, from the rates of the same
/// product with a short and a long k: rate(k) = R k / (k + half_k).
double half_k_of(double short_k, double short_rate, double long_k,
                 double long_rate);

/// A cluster file with `num_gpus` such devices.
std::string cluster_json(const GpuCalibration& gpu, int num_gpus);

}  // namespace shardbook::this_machine
