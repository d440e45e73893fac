#pragma once

// A GPT on a cube of ranks, for program.cpp and the benchmarks.

#include <string>
#include <vector>

#include "chapters/10_tensor_parallel_3d/bill.h"
#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/common/sharded/sharded_strategy.h"

namespace shardbook::cube {

/// Trains the model of the options on all ranks of `group`.
class CubeStrategy : public ShardedStrategy {
 public:
  /// Throws Error that names the option and sizes that divide. Collective.
  CubeStrategy(const Options& options, const Cube& cube, ProcessGroup& group,
               const Passes& passes = {});

  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run tensor_parallel_3d -- --world-size 8 "
           "--cluster textbook";
  }

 private:
  Cube cube_;
};

}  // namespace shardbook::cube
