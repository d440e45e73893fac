#pragma once

// A GPT or an MLP on a mesh of data-parallel and tensor-parallel ranks, for
// program.cpp and the benchmarks.
//
// Axis tp follows the plan of parallelize.h: attention and MLP are pairs of a
// column-cut and a row-cut layer; of --model mlp, fc1 and fc2 are one. Axis dp
// cuts the batch. Its parameters are replicas or shards, and a forward borrows
// them whole (recipes.h): with R that is DDP, with S(0) FSDP. With
// --sequence-parallel, tp follows the recipe of PyTorch's tutorial on tensor
// parallelism: between attention and MLP, a rank has S(1), its part of the
// tokens, and no rank has all logits.

#include <string>
#include <vector>

#include "chapters/11_dtensor/dtensor_layout.h"
#include "chapters/11_dtensor/parallelize.h"
#include "chapters/common/run/worlds.h"
#include "chapters/common/sharded/sharded_strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::dtensor {

struct StrategyOptions {
  /// "4": tensor parallelism; "2x2": data-parallel by tensor-parallel ranks.
  std::string mesh;
  std::string data_parallel = "fsdp";  ///< or "ddp"
  std::int64_t micro_batches = 1;
  /// Norms, dropout and residual sums on tp's part of the tokens; the table, the
  /// logits and the loss on its part of the vocabulary.
  bool sequence_parallel = false;
  std::string picture;  ///< a file for the picture as SVG
};

void add_options(CommandLine& line, StrategyOptions& setup);

/// The sizes of axes dp and tp for `--mesh`; empty: all ranks on tp. Throws
/// Error where they do not give the world size.
Topology topology_of(const StrategyOptions& setup, int world_size);

/// Ranks with equal work: the `sim` world runs one of each class.
FoldClass fold_class(const Options& options, const StrategyOptions& setup);

class DTensorStrategy : public ShardedStrategy {
 public:
  /// `devices` has the axes of topology_of. Throws Error where heads or samples do
  /// not divide. Collective.
  DTensorStrategy(const Options& options, const StrategyOptions& setup,
                  DeviceMesh& devices);

  std::vector<Bill> bills() override {
    return {{predicted_bytes(), memory(), step_s()}};
  }
  std::string closed_form_command() const override {
    return "./shardbook run dtensor -- --world-size 4 --mesh 2x2 "
           "--cluster textbook";
  }
  std::string remarks() override;

 private:
  bool is_mlp() const { return config().type == "mlp"; }
  /// Bytes that a rank sends in options.steps steps.
  double predicted_bytes() const;
  /// Memory of a rank, by kind.
  MemoryBill memory() const;
  /// Seconds of a step on the cluster `textbook`.
  double step_s() const;
  /// Rows of the table on this rank of tp.
  double vocabulary_here() const;

  StrategyOptions setup_;
  DeviceMesh& devices_;
  DTensorLayout layout_;
  double d_, t_;
};

}  // namespace shardbook::dtensor
