#pragma once

// How many messages a cell may send.
//
// A socket keeps a thousand messages for a front end that is busy, and drops
// later ones, among them the end of the cell, for which the front end then
// waits forever. After a burst, a cell that prints without end is slowed down.

#include <algorithm>
#include <chrono>

namespace shardbook::notebook {

class Pace {
 public:
  /// A message was sent.
  void count() {
    next_ = std::max(next_, Clock::now() - kBurst * kInterval) + kInterval;
  }

  /// Time until the next message may be sent; 0: now.
  int wait_ms() const {
    const auto wait =
        std::chrono::ceil<std::chrono::milliseconds>(next_ - Clock::now());
    return std::max(0, static_cast<int>(wait.count()));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kBurst = 100;
  static constexpr std::chrono::milliseconds kInterval{20};

  /// A message may be sent from then on.
  Clock::time_point next_{};
};

}  // namespace shardbook::notebook
