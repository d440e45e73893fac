#pragma once

// The order of stage 3's fetches: which units are gathered ahead, which stay
// whole for their next use, and which are released. All of it follows from
// sizes. The runtime and the bill both use it.

#include <cstdint>
#include <functional>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero_options.h"

namespace shardbook::zero {

class Fetches {
 public:
  /// Operations on a unit.
  struct Effects {
    using Effect = std::function<void(std::size_t unit)>;
    Effect start_gather, finish_gather, release;
  };
  /// `numels`: gathered elements of each unit; 0 if nothing is gathered.
  Fetches(std::vector<std::int64_t> numels, const ZeroOptions& options,
          Effects effects)
      : numels_(std::move(numels)),
        options_(options),
        effects_(std::move(effects)),
        states_(numels_.size(), State::kSharded) {}

  /// A forward begins the next micro-step, or is run again.
  void begin_forward() { cursor_ = 0; }
  /// Makes a unit whole, and begins to gather those that follow it.
  void fetch(std::size_t unit);
  /// The unit has been used. Keeps it whole when it is used again soon;
  /// `may_keep` is false in a forward without a backward.
  void end_use(std::size_t unit, bool may_keep);
  /// Releases units that were gathered ahead and not used, or that an exception
  /// left behind.
  void release_all();
  /// From now on the order of fetches is known.
  void end_micro_step();

 private:
  enum class State { kSharded, kInFlight, kFull, kKept };

  void record(std::size_t unit);
  std::int64_t reuse_distance(std::size_t unit) const;
  void make_room(std::int64_t elements);
  void start(std::size_t unit);
  void prefetch(std::size_t unit);
  void release(std::size_t unit);

  const std::vector<std::int64_t> numels_;
  const ZeroOptions& options_;
  Effects effects_;
  std::vector<State> states_;
  /// Fetches of a micro-step in order, and the position of the current one.
  std::vector<std::size_t> trace_;
  std::size_t cursor_ = 0;
  bool is_trace_complete_ = false;
  std::int64_t live_ = 0;  ///< elements of units that are not sharded
};

}  // namespace shardbook::zero
