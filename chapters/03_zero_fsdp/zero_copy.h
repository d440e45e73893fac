#pragma once

// Many small copies as one operation.
//
// A unit of a transformer has a dozen parameters, and each lies in d pieces in
// what an all-gather brings. One launch per piece would cost more than the copy
// itself; devices have kernels that take a list.

#include <vector>

#include "core/tensor.h"

namespace shardbook::zero {

/// target and source: the same numel, dtype and device; runs do not overlap.
struct CopyRun {
  Tensor target;
  Tensor source;
};

/// target = factor * source for every run; one operation to the observers.
void copy_runs(const std::vector<CopyRun>& runs, double factor = 1);

/// target += source for every run; one operation to the observers.
void add_runs(const std::vector<CopyRun>& runs);

}  // namespace shardbook::zero
