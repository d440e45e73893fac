#pragma once

// A GPT in blocks on a grid of ranks, for program.cpp, the 2.5D chapter and the
// benchmarks.

#include <string>
#include <vector>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/08_tensor_parallel_2d/grid.h"
#include "chapters/common/sharded/sharded_strategy.h"

namespace shardbook::summa {

/// Trains the model of the options on all ranks of `group`.
class SummaStrategy : public ShardedStrategy {
 public:
  /// Throws Error that names the option and sizes that divide. Collective.
  SummaStrategy(const Options& options, const Grid& grid, ProcessGroup& group,
                const Passes& passes = {});

  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return grid_.d() == 1
               ? "./shardbook run tensor_parallel_2d -- --world-size 4 "
                 "--cluster textbook"
               : "./shardbook run tensor_parallel_2p5d -- --world-size 8 "
                 "--depth 2 --cluster textbook";
  }

 private:
  Grid grid_;
};

/// Into how many parts the ranks cut what they share.
struct PartCounts {
  int batch_rows = 1, columns = 1;  ///< of activations; heads are columns
  int weight_rows = 1, vectors = 1;
};
/// Returns the options if the ranks' parts divide the batch and the model's sizes;
/// otherwise throws Error that names the option and sizes that divide.
Options checked_parts(const Options& options, const Passes& passes,
                      const PartCounts& parts);

}  // namespace shardbook::summa
