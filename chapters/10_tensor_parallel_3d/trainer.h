#pragma once

// A GPT on a cube of ranks, for main.cpp and the benchmarks.

#include <string>
#include <vector>

#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/common/sharded/sharded_trainer.h"

namespace shardbook::cube {

/// The numbers that a bill is made from.
struct Sizes {
  double l = 1;
  double tokens = 0;  ///< of all ranks, in one micro-batch
  double seq = 0;     ///< S
  double h = 0, heads = 0, layers = 0, positions = 0;
  double vocabulary = 0;         ///< rows of the table, padding included
  double element = 4, stat = 4;  ///< bytes of an element, of a statistic
  bool keep_gathered = true;
  bool has_dropout = false;
  double micro_batches = 1;
  bool recompute = false;
};

/// Elements that a rank sends for Y = X W, X [M, K], W [K, N], forward and
/// backward, without bias: 2 (l-1)/l^3 (MK + KN + MN), and (l-1)/l^3 (MK + KN)
/// more where operands are gathered again.
double linear_elements(double l, double m, double k, double n,
                       bool keep_gathered = true);
/// Bytes that a rank sends in one step of a GPT, by the page's table; without the
/// norm of the gradient.
double step_bytes(const Sizes& sizes);
/// Parameters that a rank holds: 1/l^3 of matrices and the table, 1/l of vectors
/// and positions.
double parameters_per_rank(const Sizes& sizes);
/// Peak of activations on l > 1, in bytes, of the first micro-batch of a step or
/// of a later one.
double activation_bytes(const Sizes& sizes, bool is_later);

/// Trains the model of the options on all ranks of `group`.
class Trainer : public ShardedTrainer {
 public:
  /// Throws Error that names the option and what would divide. Collective.
  Trainer(const Options& options, const Cube& cube, ProcessGroup& group,
          const Passes& passes = {});

  std::vector<Bill> bills() override { return {{predicted_bytes(), bill()}}; }
  /// The documents' MLP on this cube: who holds which shapes.
  std::string remarks() override;

  double predicted_bytes() const;
  MemoryBill bill() const;

 private:
  Sizes sizes() const;

  Cube cube_;
  Passes passes_;
};

/// The documents' MLP: X [16, 256], 256 -> 1024 -> 256, on a cube of side l.
std::string describe_mlp(int l);

}  // namespace shardbook::cube
