#pragma once

// The fetches of a micro-step of stage 3, from sizes alone: which units are
// gathered when, and how much memory that takes. The bill reads it; nothing
// runs.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero3.h"

namespace shardbook::zero {

/// An amount of memory, and its peak.
class Level {
 public:
  void add(std::int64_t bytes) {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  std::int64_t peak() const { return peak_; }
  /// The peak from now on.
  void forget_peak() { peak_ = now_; }

 private:
  std::int64_t now_ = 0, peak_ = 0;
};

/// Every unit runs once in forward and once in backward. Where one is the root,
/// it contains all others.
class FetchWalk {
 public:
  /// The order of fetches is known from the second micro-step on: only then
  /// units are gathered ahead and kept.
  FetchWalk(const ZeroStage3& zero, bool knows_order);

  /// With `root_has_head` the root's gradients begin before the others'.
  void micro_step(bool root_has_head);

  /// Peaks, in bytes.
  std::int64_t parameters() const { return parameters_.peak(); }
  /// Messages of the forward, before there is a loss; and from the loss on.
  std::int64_t forward_communication() const { return forward_communication_; }
  std::int64_t communication() const { return communication_.peak(); }
  /// By unit: how often it was gathered.
  const std::vector<int>& gathers() const { return gathers_; }

 private:
  enum class State { kSharded, kInFlight, kFull, kKept };

  void make_trace(const std::vector<std::size_t>& order, int root);
  std::int64_t reuse_distance(std::size_t unit) const;
  void make_room(std::int64_t elements);
  void start(std::size_t unit);
  void prefetch(std::size_t unit);
  void fetch(std::size_t unit);
  void end_use(std::size_t unit);
  void release(std::size_t unit);
  void reduce(std::size_t unit);
  void finish_reduction();

  const std::vector<ZeroStage3::UnitSize> units_;
  const ZeroOptions& options_;
  const bool knows_order_;
  std::vector<State> states_;
  std::vector<int> gathers_;
  std::vector<std::size_t> trace_;
  std::size_t cursor_ = 0;
  std::int64_t live_ = 0;  // elements that are not sharded
  std::int64_t flying_ = 0, forward_communication_ = 0;
  Level parameters_, communication_;
};

}  // namespace shardbook::zero
