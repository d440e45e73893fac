#pragma once

// A GPT in blocks on a grid of ranks, for main.cpp, the 2.5D chapter and the
// benchmarks.

#include <string>
#include <vector>

#include "chapters/08_tensor_parallel_2d/grid.h"
#include "chapters/common/sharded/sharded_trainer.h"

namespace shardbook::summa {

/// The numbers that a bill is made from.
struct Sizes {
  double q = 1, d = 1;
  double tokens = 0;  ///< of all ranks, in one micro-batch
  double seq = 0;     ///< S
  double h = 0, heads = 0, layers = 0, positions = 0;
  double vocabulary = 0;         ///< rows of the table, padding included
  double element = 4, stat = 4;  ///< bytes of an element, of a statistic
  bool has_dropout = false;
  double micro_batches = 1;
  bool recompute = false;
};

/// Elements that a rank sends for Y = X W, X [M, K], W [K, N], forward and
/// backward, without bias: 3 (q-1)/q^2 (MK/d + KN) + 2 (d-1)/d KN/q^2.
double linear_elements(double q, double d, double m, double k, double n);
/// Bytes that a rank sends in one step of a GPT, by the page's table; without the
/// norm of the gradient.
double step_bytes(const Sizes& sizes);
/// Parameters that a rank holds: 1/q^2 of all.
double parameters_per_rank(const Sizes& sizes);
/// Peak of activations on q > 1, in bytes, of the first micro-batch of a step or
/// of a later one.
double activation_bytes(const Sizes& sizes, bool is_later);
/// The largest buffers for blocks that arrive or leave, in bytes.
double buffer_bytes(const Sizes& sizes);

/// Trains the model of the options on all ranks of `group`.
class Trainer : public ShardedTrainer {
 public:
  /// Throws Error that names the option and what would divide. Collective.
  Trainer(const Options& options, const Grid& grid, ProcessGroup& group,
          const Passes& passes = {});

  std::vector<Bill> bills() override { return {{predicted_bytes(), bill()}}; }
  /// The documents' MLP on this grid: who holds which shapes.
  std::string remarks() override;

  double predicted_bytes() const;
  MemoryBill bill() const;

 private:
  Sizes sizes() const;

  Grid grid_;
  Passes passes_;
};

/// The documents' MLP: X [16, 256], 256 -> 1024 -> 256, on d squares of side q.
std::string describe_mlp(int q, int d);

}  // namespace shardbook::summa
