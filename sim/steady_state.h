#pragma once

// Repeated work is simulated until its times repeat, and then multiplied.
//
//   repeat(world, num_micro_batches, [&](std::int64_t i) { ... });
//
// With real data every repetition runs. On shapes, the first few run until two
// in a row have moved every queue of every rank by the same time; all others
// except the last are added to clock and ledger without being run. The result
// is the same as if all had run, up to rounding (tests compare the two), and
// thousands of micro-batches cost no more than ten.

#include <cstdint>
#include <deque>
#include <functional>

#include "comm/process_group.h"
#include "sim/virtual_clock.h"

namespace shardbook::sim {

/// Calls body(0) ... body(count - 1), which do the same on the same shapes; the
/// first and the last may differ. All ranks of `world` call it together.
void repeat(ProcessGroup& world, std::int64_t count,
            const std::function<void(std::int64_t)>& body);

/// The same for loops that are not a function: `num_settled` between two
/// repetitions, and `skip` when it is not 0.
class SteadyState {
 public:
  explicit SteadyState(ProcessGroup& world);

  /// Whether this world may skip: on shapes, with a clock, and if the members of
  /// `world` are all ranks whose messages share links.
  bool may_skip() const { return clock_ != nullptr; }
  /// Whether messages may be under way when time is skipped. Otherwise, all that
  /// was sent before must have been received.
  bool may_skip_messages() const { return may_skip() && moves_messages_; }
  /// The least n for which the last n repetitions have moved all queues of all
  /// ranks by the same time as the n before, and memory holds as much as before;
  /// 0: none. (Ranks that wait for each other in turn repeat every few times.)
  /// Collective.
  int num_settled();
  /// Adds `times` repetitions to clock and ledger, a multiple of `num_settled`.
  /// Messages under way arrive that much later.
  void skip(std::int64_t times);

 private:
  /// Between two repetitions.
  struct Moment {
    DeviceClock::State clock;
    CommLog::Mark records;
    std::int64_t bytes = 0;
  };
  double advance(std::size_t first, std::size_t last) const;

  ProcessGroup& world_;
  VirtualClock* clock_ = nullptr;
  bool moves_messages_ = false;
  std::deque<Moment> moments_;
  int num_settled_ = 0;
};

}  // namespace shardbook::sim
