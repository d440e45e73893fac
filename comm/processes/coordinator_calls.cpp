// Matches the calls of the ranks, and notices a rank that never joins one.

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "comm/processes/coordinator.h"
#include "comm/processes/socket.h"

namespace shardbook::internal {
namespace {

std::string never_joins(int rank) {
  return fmt::format("rank {} failed: it ended without joining", rank);
}

}  // namespace

void Coordinator::rank_ended(int rank) {
  {
    const std::lock_guard lock(mutex_);
    ended_.insert(rank);
    for (auto& [generation, world] : worlds_) {
      if (misses(world, rank)) fail_world(generation, never_joins(rank));
    }
  }
  eventfd_write(wake_.value(), 1);
}

void Coordinator::handle_call(Line& line, const Frame& frame) {
  check_fields(frame, 4);
  World& world = worlds_[line.generation];
  if (!world.failure.empty()) return;
  const bool is_exchange = frame.kind == FrameKind::kExchange;
  const std::string& key = frame.fields[0];
  const std::string& signature = frame.fields[2];
  // An exchange is described by its name, which is also its signature.
  const std::string& text = is_exchange ? signature : frame.fields[3];

  auto [found, is_first] = world.meetings.try_emplace(key);
  Meeting& meeting = found->second;
  if (is_first) {
    meeting.members = split_ranks(frame.fields[1], options_.world_size);
    meeting.signature = signature;
  } else if (meeting.signature != signature) {
    const auto& [other, other_text] = *meeting.texts.begin();
    fail_world(
        line.generation,
        fmt::format("calls do not match: rank {} called {}, rank {} called {}",
                    other, other_text, line.rank, text));
    return;
  }
  meeting.texts[line.rank] = text;
  if (is_exchange) meeting.values[line.rank] = frame.fields[3];

  if (meeting.texts.size() == meeting.members.size()) {
    Frame answer{FrameKind::kExchanged, {key}};
    for (const int member : meeting.members) {
      answer.fields.push_back(meeting.values[member]);
    }
    for (const int member : meeting.members) {
      if (is_exchange) send(line.generation, member, answer);
    }
    world.meetings.erase(found);
    return;
  }
  for (const int member : meeting.members) {
    const bool has_ended = world.left.count(member) + ended_.count(member) > 0;
    if (has_ended && meeting.texts.count(member) == 0) {
      return fail_world(line.generation, never_joins(member));
    }
  }
}

void Coordinator::handle_leave(Line& line) {
  World& world = worlds_[line.generation];
  world.left.insert(line.rank);
  if (misses(world, line.rank)) {
    return fail_world(line.generation, never_joins(line.rank));
  }
  if (static_cast<int>(world.left.size()) == options_.world_size) {
    for (int rank = 0; rank < options_.world_size; ++rank) {
      send(line.generation, rank, {FrameKind::kAllLeft, {}});
    }
  }
}

bool Coordinator::misses(const World& world, int rank) {
  for (const auto& [key, meeting] : world.meetings) {
    const auto& members = meeting.members;
    if (meeting.texts.count(rank) == 0 &&
        std::find(members.begin(), members.end(), rank) != members.end()) {
      return true;
    }
  }
  return false;
}

}  // namespace shardbook::internal
