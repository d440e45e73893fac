#include "sim/steady_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/context.h"
#include "sim/timed_group.h"

namespace shardbook::sim {
namespace {

// Running fewer than this costs less than finding out whether they repeat.
constexpr std::int64_t kFewest = 6;
// Times that have not settled by then never will.
constexpr std::int64_t kLongestSettling = 12;
constexpr std::size_t kLongestPeriod = 8;

// The time by which all queues that are in use moved; negative where they
// moved by different times. A host may get further ahead: that delays nothing.
double common_advance(const DeviceClock::State& from,
                      const DeviceClock::State& to) {
  const double advance = to.times[0] - from.times[0];
  for (std::size_t i = 1; i < to.times.size(); ++i) {
    if (i < from.times.size() && to.times[i] == from.times[i]) continue;
    if (i >= from.times.size()) return -1;
    const double mine = to.times[i] - from.times[i];
    if (std::abs(mine - advance) <= 1e-9 * advance) continue;
    const bool is_host = i + 1 == to.times.size();
    if (!is_host || mine > advance || from.times[i] > from.times[0] ||
        to.times[i] > to.times[0]) {
      return -1;
    }
  }
  return advance;
}

bool is_on_shapes() { return RankContext::current().device.is_meta(); }

}  // namespace

SteadyState::SteadyState(ProcessGroup& world) : world_(world) {
  const auto* group = dynamic_cast<const TimedGroup*>(&world);
  const bool sees_all =
      group == nullptr || !group->shares_links() || group->has_all_that_run();
  if (is_on_shapes() && sees_all) clock_ = VirtualClock::current();
  moves_messages_ = group != nullptr && group->shares_links();
}

// The time by which all queues moved between two moments that hold as much
// memory; negative where they moved by different times.
double SteadyState::advance(std::size_t first, std::size_t last) const {
  const Moment &from = moments_[first], &to = moments_[last];
  return from.bytes == to.bytes ? common_advance(from.clock, to.clock) : -1;
}

int SteadyState::num_settled() {
  moments_.push_back({clock_->main().state(), world_.mark_records(),
                      RankContext::current().device.memory().current_total});
  if (moments_.size() > 2 * kLongestPeriod + 1) moments_.pop_front();
  const std::size_t now = moments_.size() - 1;
  // A word of fixed width per period; blank if the queues here do not agree
  constexpr std::size_t kWidth = 16;
  std::string words;
  for (std::size_t n = 1; n <= kLongestPeriod; ++n) {
    const double before = 2 * n <= now ? advance(now - 2 * n, now - n) : -1;
    const double last = before > 0 ? advance(now - n, now) : -1;
    const bool agree = before > 0 && std::abs(last - before) <= 1e-9 * last;
    words += agree ? fmt::format("{:>{}.8e}", last, kWidth)
                   : std::string(kWidth, ' ');
  }
  const std::vector<std::string> all = world_.exchange(words);
  num_settled_ = 0;
  for (std::size_t n = kLongestPeriod; n >= 1; --n) {
    const std::size_t at = (n - 1) * kWidth;
    const std::string mine = words.substr(at, kWidth);
    if (mine.back() == ' ') continue;
    const bool agree = std::all_of(
        all.begin(), all.end(),
        [&](const auto& each) { return each.compare(at, kWidth, mine) == 0; });
    if (agree) num_settled_ = static_cast<int>(n);
  }
  return num_settled_;
}

void SteadyState::skip(std::int64_t times) {
  const Moment& to = moments_.back();
  const Moment& from =
      moments_[moments_.size() - 1 - static_cast<std::size_t>(num_settled_)];
  clock_->skip(from.clock, to.clock, times / num_settled_);
  world_.repeat_records(from.records, times / num_settled_);
}

void repeat(ProcessGroup& world, std::int64_t count,
            const std::function<void(std::int64_t)>& body) {
  SteadyState steady(world);
  bool may_skip = steady.may_skip() && count >= kFewest;
  for (std::int64_t i = 0; i < count; ++i) {
    body(i);
    const std::int64_t left = count - 1 - (i + 1);
    if (!may_skip || left <= 0 || i >= kLongestSettling) continue;
    const int settled = steady.num_settled();
    if (settled == 0 || settled > left) continue;
    const std::int64_t skipped = left - left % settled;
    steady.skip(skipped);
    i += skipped;
    may_skip = false;
  }
}

}  // namespace shardbook::sim
