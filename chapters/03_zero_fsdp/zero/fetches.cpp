#include "chapters/03_zero_fsdp/zero/fetches.h"

#include <limits>

namespace shardbook::zero {

void Fetches::fetch(std::size_t unit) {
  if (numels_[unit] == 0) return;
  record(unit);
  State& state = states_[unit];
  if (state == State::kFull) return;
  if (state == State::kKept) {
    state = State::kFull;
    prefetch(unit);
    return;
  }
  if (state == State::kSharded) {
    make_room(numels_[unit]);
    start(unit);
  }
  // The next ones travel while this one computes
  prefetch(unit);
  effects_.finish_gather(unit);
  state = State::kFull;
}

void Fetches::end_use(std::size_t unit, bool may_keep) {
  if (states_[unit] != State::kFull) return;
  const bool is_soon = is_trace_complete_ && may_keep &&
                       reuse_distance(unit) < options_.max_reuse_distance;
  if (is_soon && live_ <= options_.max_live_parameters) {
    states_[unit] = State::kKept;
  } else {
    release(unit);
  }
}

void Fetches::release_all() {
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    if (states_[unit] != State::kSharded) release(unit);
  }
}

void Fetches::end_micro_step() {
  release_all();
  is_trace_complete_ = true;
  trace_.resize(cursor_);
}

void Fetches::record(std::size_t unit) {
  if (is_trace_complete_ && cursor_ < trace_.size() &&
      trace_[cursor_] == unit) {
    cursor_ += 1;
    return;
  }
  // The order differs from last time: record it from here on
  trace_.resize(cursor_);
  is_trace_complete_ = false;
  trace_.push_back(unit);
  cursor_ += 1;
}

/// Elements that are fetched before the unit is fetched again; above any limit
/// if it is not.
std::int64_t Fetches::reuse_distance(std::size_t unit) const {
  std::int64_t elements = 0;
  for (std::size_t i = cursor_; i < trace_.size(); ++i) {
    if (trace_[i] == unit) return elements;
    elements += numels_[trace_[i]];
  }
  return std::numeric_limits<std::int64_t>::max();
}

// Releases kept units, those used farthest ahead first, until `elements` fit.
void Fetches::make_room(std::int64_t elements) {
  while (live_ + elements > options_.max_live_parameters) {
    std::size_t farthest = states_.size();
    for (std::size_t unit = 0; unit < states_.size(); ++unit) {
      if (states_[unit] == State::kKept &&
          (farthest == states_.size() ||
           reuse_distance(unit) > reuse_distance(farthest))) {
        farthest = unit;
      }
    }
    if (farthest == states_.size()) return;
    release(farthest);
  }
}

void Fetches::prefetch(std::size_t unit) {
  if (!is_trace_complete_) return;
  std::int64_t ahead = 0;
  for (std::size_t i = cursor_; i < trace_.size(); ++i) {
    const std::size_t next = trace_[i];
    if (states_[next] == State::kKept) continue;
    // A unit in use is released before it is fetched again
    if (next == unit || states_[next] == State::kFull) return;
    // The last unit may exceed the limits: a large one would never fit
    if (ahead >= options_.prefetch_bucket_size) return;
    ahead += numels_[next];
    if (states_[next] != State::kSharded) continue;
    if (live_ >= options_.max_live_parameters) return;
    start(next);
  }
}

void Fetches::start(std::size_t unit) {
  effects_.start_gather(unit);
  // Set last: if the line above throws, the unit is still in shards
  states_[unit] = State::kInFlight;
  live_ += numels_[unit];
}

void Fetches::release(std::size_t unit) {
  effects_.release(unit);
  states_[unit] = State::kSharded;
  live_ -= numels_[unit];
}

}  // namespace shardbook::zero
