#pragma once

// Micro-batches for an engine: a data set dealt out to data-parallel ranks.
//
//   Loader loader(training_data(dataset), {4, seed}, dp);
//   while (const std::optional<Batch> batch = loader.next()) { }
//
// Samples are shuffled by the seed and the epoch, alike on all ranks, and dealt
// out by the rank in the data-parallel group alone: ranks that share a model (tp,
// pp, cp) read the same ones. The last micro-batch of an epoch may be short; the
// ranks have equally many, since the first samples repeat.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "chapters/common/models/data.h"
#include "comm/process_group.h"

namespace shardbook::engine {

/// Samples by number.
struct TrainingData {
  std::int64_t num_samples = 0;
  /// These samples, in this order.
  std::function<Batch(const std::vector<std::int64_t>& samples)> batch = {};
};
/// Sample i of a data set: tokens [i S, i S + S). Images have no end: their
/// number must be given.
TrainingData training_data(const Dataset& data, std::int64_t num_samples = 0);

struct LoaderOptions {
  std::int64_t micro_batch_size = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;
};

class Loader {
 public:
  /// `dp` is the group of data-parallel ranks. Throws Error without samples.
  Loader(TrainingData data, const LoaderOptions& options,
         const ProcessGroup& dp);

  /// The next micro-batch of this rank; none at the end of an epoch, and then
  /// the first one of the next.
  std::optional<Batch> next();
  /// The same without ends: for train_batch.
  Batch next_repeating();
  /// Micro-batches of an epoch.
  std::int64_t size() const;
  std::int64_t epoch() const { return epoch_; }
  /// Begins this epoch.
  void set_epoch(std::int64_t epoch);
  /// This rank's samples in the current epoch, in order.
  const std::vector<std::int64_t>& samples() const { return samples_; }

 private:
  TrainingData data_;
  LoaderOptions options_;
  int ranks_, rank_;
  std::int64_t epoch_ = 0;
  std::size_t next_ = 0;
  std::vector<std::int64_t> samples_;
};

}  // namespace shardbook::engine
