#pragma once

// The fetches of a micro-step of stage 3, from sizes alone: how often each unit
// is gathered. The bill of bytes reads it; nothing runs.

#include <cstdint>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero3.h"

namespace shardbook::zero {

/// Every unit runs once in forward and once in backward. Where one is the root,
/// it contains all others.
class FetchWalk {
 public:
  /// A micro-step behind the first one, which knows the order of fetches: units
  /// are gathered ahead and kept.
  explicit FetchWalk(const ZeroStage3& zero);

  void micro_step();

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

  const std::vector<ZeroStage3::UnitSize> units_;
  const ZeroOptions& options_;
  std::vector<State> states_;
  std::vector<int> gathers_;
  std::vector<std::size_t> trace_;
  std::size_t cursor_ = 0;
  std::int64_t live_ = 0;  // elements that are not sharded
};

}  // namespace shardbook::zero
