#pragma once

// Where the script's loop is: shared by everything that prepare has returned.

#include <cstdint>
#include <memory>
#include <vector>

#include "chapters/15_engine/internal/backend.h"
#include "chapters/15_engine/prepared.h"

namespace shardbook::accelerate::internal {

/// The samples of one batch of one process. Throws Error where a batch does not
/// split.
std::int64_t batch_of_a_rank(const ShardOptions& options, int ranks);

struct LoaderState {
  DataLoader loader;
  ShardOptions setup;
  int ranks = 1;
  int rank = 0;
  std::int64_t epoch = 0;
  std::size_t next = 0;
  std::vector<std::vector<std::int64_t>> batches;
  /// Samples of the last round over all processes that are no repetitions; 0:
  /// all of them.
  std::int64_t remainder = 0;
  std::weak_ptr<Loop> loop;

  void begin_epoch(std::int64_t number);
  /// Samples of one batch of every process.
  std::int64_t round() const { return batch_of_a_rank(setup, ranks) * ranks; }
  std::int64_t samples_done() const {
    return static_cast<std::int64_t>(next) * round();
  }
  bool is_at_end() const { return next == batches.size(); }
  bool gives_even_batches() const;
};

struct Loop {
  bool split_batches = false;
  std::unique_ptr<Backend> backend;
  std::shared_ptr<engine::LrScheduler> scheduler;
  std::shared_ptr<LoaderState> training;
  /// The loader whose epoch runs: for gather_for_metrics.
  std::weak_ptr<LoaderState> active;
  /// Micro-steps since the last window began.
  std::int64_t step = 0;
  bool sync_gradients = true;

  void set_lr();
};

}  // namespace shardbook::accelerate::internal
