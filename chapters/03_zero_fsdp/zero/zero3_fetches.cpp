#include "chapters/03_zero_fsdp/zero/zero3_fetches.h"

#include <limits>

namespace shardbook::zero {
namespace {

/// The unit that contains the others: the root, beside units of its blocks.
int root_of(const std::vector<ZeroStage3::UnitSize>& units) {
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (units[u].name.empty() && units.size() > 1) return static_cast<int>(u);
  }
  return -1;
}

}  // namespace

FetchWalk::FetchWalk(const ZeroStage3& zero)
    : units_(zero.unit_sizes()),
      options_(zero.options()),
      states_(units_.size(), State::kSharded),
      gathers_(units_.size()) {}

void FetchWalk::micro_step() {
  const int root = root_of(units_);
  std::vector<std::size_t> order;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (static_cast<int>(u) != root) order.push_back(u);
  }
  make_trace(order, root);

  // Forward
  if (root >= 0) fetch(static_cast<std::size_t>(root));
  for (const std::size_t u : order) {
    fetch(u);
    end_use(u);
  }
  // Backward
  if (root >= 0) {
    const auto r = static_cast<std::size_t>(root);
    end_use(r);
    fetch(r);
  }
  for (auto u = order.rbegin(); u != order.rend(); ++u) {
    fetch(*u);
    end_use(*u);
  }
  if (root >= 0) end_use(static_cast<std::size_t>(root));
}

void FetchWalk::make_trace(const std::vector<std::size_t>& order, int root) {
  trace_.clear();
  cursor_ = 0;
  auto add = [&](std::size_t u) {
    if (units_[u].full_bytes > 0) trace_.push_back(u);
  };
  if (root >= 0) add(static_cast<std::size_t>(root));
  for (const std::size_t u : order) add(u);
  if (root >= 0) add(static_cast<std::size_t>(root));
  for (auto u = order.rbegin(); u != order.rend(); ++u) add(*u);
}

std::int64_t FetchWalk::reuse_distance(std::size_t unit) const {
  std::int64_t elements = 0;
  for (std::size_t i = cursor_; i < trace_.size(); ++i) {
    if (trace_[i] == unit) return elements;
    elements += units_[trace_[i]].full_elements;
  }
  return std::numeric_limits<std::int64_t>::max();
}

void FetchWalk::make_room(std::int64_t elements) {
  while (live_ + elements > options_.max_live_parameters) {
    std::size_t farthest = units_.size();
    std::int64_t distance = -1;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (states_[u] != State::kKept || reuse_distance(u) <= distance) continue;
      farthest = u;
      distance = reuse_distance(u);
    }
    if (farthest == units_.size()) return;
    release(farthest);
  }
}

void FetchWalk::start(std::size_t u) {
  const ZeroStage3::UnitSize& unit = units_[u];
  states_[u] = State::kInFlight;
  live_ += unit.full_elements;
  gathers_[u] += 1;
}

void FetchWalk::prefetch(std::size_t unit) {
  std::int64_t ahead = 0;
  for (std::size_t i = cursor_; i < trace_.size(); ++i) {
    const std::size_t next = trace_[i];
    if (states_[next] == State::kKept) continue;
    if (next == unit || states_[next] == State::kFull) return;
    if (ahead >= options_.prefetch_bucket_size) return;
    ahead += units_[next].full_elements;
    if (states_[next] == State::kInFlight) continue;
    if (live_ >= options_.max_live_parameters) return;
    start(next);
  }
}

void FetchWalk::fetch(std::size_t u) {
  const ZeroStage3::UnitSize& unit = units_[u];
  if (unit.full_bytes == 0) return;
  cursor_ += 1;
  const bool is_whole = states_[u] == State::kKept;
  if (states_[u] == State::kSharded) {
    make_room(unit.full_elements);
    start(u);
  }
  if (is_whole) states_[u] = State::kFull;
  prefetch(u);
  if (is_whole) return;
  states_[u] = State::kFull;
}

void FetchWalk::end_use(std::size_t unit) {
  if (states_[unit] != State::kFull) return;
  if (reuse_distance(unit) < options_.max_reuse_distance &&
      live_ <= options_.max_live_parameters) {
    states_[unit] = State::kKept;
  } else {
    release(unit);
  }
}

void FetchWalk::release(std::size_t unit) {
  states_[unit] = State::kSharded;
  live_ -= units_[unit].full_elements;
}

}  // namespace shardbook::zero
