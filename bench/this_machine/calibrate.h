#pragma once

// Times of each operation on one core of this machine, and of messages between
// its ranks, measured on other models and sizes than are predicted from them.

#include <map>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/gpus.h"

namespace shardbook::this_machine {

/// Seconds of one kind of operation: fixed + per_unit * work + per_byte * bytes,
/// where work is flops for products and bytes for the others.
struct Fit {
  double fixed_s = 0;
  double per_unit_s = 0;
  double per_byte_s = 0;  ///< beside flops
};

struct Sample {
  double work = 0;
  double seconds = 0;
  double bytes = 0;  ///< for fit_by_both
};

/// The non-negative Fit of fixed time and work with the least sum of squared
/// relative errors.
Fit fit(const std::vector<Sample>& samples);

/// The same of bytes as well: convolutions compute much or little per weight that
/// they read. Each error is divided by the square root of the measured time: long
/// operations count more.
Fit fit_by_both(const std::vector<Sample>& samples);

struct OperationFit {
  std::string name;  ///< "linear", "gelu"
  Phase phase = Phase::kForward;
  bool by_flops = false;
  Fit fit = {};
};

/// Trains small models on one core and fits the time of each operation, from
/// the end of the one before it to its own end.
std::vector<OperationFit> measure_operations();

/// Fits an all-reduce between two thread ranks, by bytes.
Fit measure_all_reduce();

/// A cluster file with one device per core, each with its share of the memory.
std::string cluster_json(const std::vector<OperationFit>& operations,
                         const Fit& all_reduce, int num_cores,
                         double memory_bytes);

/// One GPU of this machine as a device of a cluster file: few numbers, and the
/// shape of its kernels' curves from the nearest device in sim/devices.
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
