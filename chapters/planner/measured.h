#pragma once

// How far predicted steps were from measured ones: what an answer may promise.

#include <string>

#include "chapters/planner/step.h"

namespace shardbook::planner {

/// Steps of one kind on one family of devices. Those of bench/validate.
struct Measured {
  const char* device;  ///< "a100"
  const char* kind;    ///< "pipelines"
  int steps = 0;
  double mean = 0, most = 0;  ///< |predicted / measured - 1|, in percent
};

/// What decides how long a step takes: "experts", "context parallelism",
/// "pipelines", "ZeRO-3", "tensor parallelism" or "replicas".
std::string kind_of(const HybridJob& job);
/// "a100" of "a100-80gb".
std::string family_of(const sim::Cluster& cluster);
/// Null where no such step was compared.
const Measured* measured(const HybridJob& job);
/// A sentence on it.
std::string measured_text(const HybridJob& job);

}  // namespace shardbook::planner
