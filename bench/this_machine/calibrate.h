#pragma once

// Times of each operation on one core of this machine, and of messages between
// its ranks, measured on other models and sizes than are predicted from them.

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
  double bytes = 0;  ///< for a fit by both
};

/// The non-negative Fit of fixed time and work with the least sum of squared
/// relative errors. With `by_both`, of bytes as well: convolutions compute much or
/// little per weight that they read. Each error is then divided by the square root
/// of the measured time: long operations count more.
Fit fit(const std::vector<Sample>& samples, bool by_both = false);

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

/// Measures cuda:0. A cluster file with as many such devices as this machine has
/// GPUs: few numbers, and the shape of its kernels' curves from the nearest device
/// in sim/devices.
std::string measured_gpus_json();

}  // namespace shardbook::this_machine
