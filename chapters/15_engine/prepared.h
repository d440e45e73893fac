#pragma once

// What Accelerator::prepare returns: handles on a model, an optimizer, a loader
// and a scheduler that know where in a window of gradient accumulation the
// script's loop is.
//
// Handles are cheap to copy, and live as long as any copy of them or the
// Accelerator. Model and process group outlive them all.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "chapters/15_engine/loader.h"
#include "chapters/15_engine/lr_schedules.h"
#include "chapters/common/models/data.h"
#include "core/module.h"

namespace shardbook::accelerate {

class Accelerator;
namespace internal {
class Backend;
struct Loop;
struct LoaderState;
}  // namespace internal

// --- Loaders -----------------------------------------------------------------

/// The loader of a script that knows one process.
struct DataLoader {
  engine::TrainingData data = {};
  /// Samples of one process; with split_batches, of all together.
  std::int64_t batch_size = 1;
  bool shuffle = false;
  std::uint64_t seed = 0;
  /// Leaves out samples that do not fill a round of batches.
  bool drop_last = false;
};

struct ShardOptions {
  std::int64_t batch_size = 1;
  /// Cuts every batch into one part per process.
  bool split_batches = false;
  /// Goes back to the first samples until all processes have equally many
  /// batches, all of them full. One process has a short last batch.
  bool even_batches = true;
  bool drop_last = false;
};

/// The batches of process `rank` of `ranks`: batches rank, rank + ranks, ... of
/// these samples; with split_batches, part `rank` of every batch.
///
///   7 samples, batches of 2, 2 processes    0: [0 1] [4 5]    1: [2 3] [6 0]
///   the same, split_batches                 0: [0] [2] [4] [6]
///                                           1: [1] [3] [5] [0]
///   the same, even_batches false            0: [0 1] [4 5]    1: [2 3] [6]
///   7 samples, batches of 4, 1 process      0: [0 1 2 3] [4 5 6]
///
/// Throws Error for batches that do not split.
std::vector<std::vector<std::int64_t>> shard_batches(
    const std::vector<std::int64_t>& samples, const ShardOptions& options,
    int ranks, int rank);

class PreparedLoader {
 public:
  /// The next batch of this process; none at the end of an epoch, and then the
  /// first one of the next. Dropout is drawn at the batch's place in the data.
  std::optional<Batch> next();
  /// Batches of an epoch.
  std::int64_t size() const;
  /// The epoch of the next batch, and the batches before it in that epoch.
  std::int64_t epoch() const;
  std::int64_t batches_done() const;
  /// The samples of this process, batch by batch.
  const std::vector<std::vector<std::int64_t>>& batches() const;

 private:
  friend class Accelerator;
  explicit PreparedLoader(std::shared_ptr<internal::LoaderState> state);
  std::shared_ptr<internal::LoaderState> state_;
};

// --- Model, optimizer, scheduler ---------------------------------------------

class PreparedModel {
 public:
  explicit PreparedModel(std::shared_ptr<internal::Loop> loop)
      : loop_(std::move(loop)) {}
  /// The model's forward, in the plugin's wrapper. Throws Error for
  /// MegatronLMPlugin, which computes losses only.
  Tensor operator()(const Tensor& inputs);
  /// The mean loss of a batch: language_loss(model(inputs), targets). For
  /// MegatronLMPlugin, runs forward and backward of its pipeline; under NoGrad,
  /// forward alone.
  Tensor loss(const Batch& batch);
  /// The tensors that are trained on this rank: shards, where the plugin has
  /// cut the model.
  Tensors parameters() const;

 private:
  std::shared_ptr<internal::Loop> loop_;
};

class PreparedOptimizer {
 public:
  explicit PreparedOptimizer(std::shared_ptr<internal::Loop> loop)
      : loop_(std::move(loop)) {}
  /// Updates, where gradients have been synchronised. Between them, and for
  /// DeepSpeedPlugin, whose engine does it in backward, does nothing.
  void step();
  void zero_grad();
  /// True if the last step was skipped: an f16 gradient had overflowed.
  bool step_was_skipped() const;
  double lr() const;

 private:
  std::shared_ptr<internal::Loop> loop_;
};

class PreparedScheduler {
 public:
  explicit PreparedScheduler(std::shared_ptr<internal::Loop> loop)
      : loop_(std::move(loop)) {}
  /// After an optimizer step, advances once per data-parallel rank (once with
  /// split_batches): a schedule written for one process then counts the same
  /// samples. Does nothing between steps, after a skipped step, and where the
  /// config of a DeepSpeedPlugin has the scheduler.
  void step();
  /// The rate of the next update.
  double get_last_lr() const;
  /// Calls of the script's scheduler so far.
  std::int64_t steps_done() const;

 private:
  std::shared_ptr<internal::Loop> loop_;
};

}  // namespace shardbook::accelerate
