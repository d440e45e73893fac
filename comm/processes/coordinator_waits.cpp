// Finds the rank that delays the others, from the waits of all ranks.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/internal/arguments.h"
#include "comm/processes/coordinator.h"
#include "comm/processes/socket.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

// A rank's control line answers at once, whatever the rank computes. A rank
// that has not answered by then is not running.
constexpr std::chrono::milliseconds kInquiryPatience{2000};

/// "rank 1", "ranks 0, 2".
std::string rank_list(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks",
                     fmt::join(ranks, ", "));
}

}  // namespace

std::vector<int> Coordinator::awaited(const World& world, int rank,
                                      const std::string& peers,
                                      const std::string& key) const {
  if (!peers.empty()) return split_ranks(peers, options_.world_size);
  std::vector<int> members;
  const auto meeting = world.meetings.find(key);
  if (meeting != world.meetings.end()) {
    members = meeting->second.members;
  } else if (key.empty() || key == kLeaveKey) {
    members = ranks_below(options_.world_size);
  }
  const auto has_come = [&](int member) {
    if (member == rank) return true;
    if (key == kLeaveKey) return world.left.count(member) > 0;
    return meeting != world.meetings.end() &&
           meeting->second.texts.count(member) > 0;
  };
  members.erase(std::remove_if(members.begin(), members.end(), has_come),
                members.end());
  return members;
}

Coordinator::Wait Coordinator::read_wait(const World& world, int rank,
                                         const Frame& frame,
                                         std::size_t at) const {
  return {frame.fields[at], frame.fields[at + 1],
          awaited(world, rank, frame.fields[at + 2], frame.fields[at + 3])};
}

void Coordinator::handle_overdue(Line& line, const Frame& frame) {
  check_fields(frame, 5);
  World& world = worlds_[line.generation];
  // The rank must hear that we are alive, even if another one has asked.
  queue(line, {FrameKind::kPong, {}});
  if (!world.failure.empty() || world.inquiry) return;
  Inquiry inquiry{
      .number = ++num_inquiries_,
      .rank = line.rank,
      .wait = read_wait(world, line.rank, frame, 0),
      .timeout_ms = parse_number(frame.fields[4], std::int64_t{1} << 40),
      .deadline = Clock::now() + kInquiryPatience,
      .asked = {},
      .answers = {}};
  for (Line& other : lines_) {
    if (other.rank < 0 || other.generation != line.generation) continue;
    inquiry.asked.insert(other.rank);
    queue(other, {FrameKind::kAsk, {std::to_string(inquiry.number)}});
  }
  world.inquiry = std::move(inquiry);
}

void Coordinator::handle_waits(Line& line, const Frame& frame) {
  World& world = worlds_[line.generation];
  SB_CHECK(frame.fields.size() >= 2 && frame.fields.size() % 4 == 2,
           "control message of kind ", int(frame.kind), " has ",
           frame.fields.size(), " fields");
  if (!world.inquiry ||
      frame.fields[0] != std::to_string(world.inquiry->number)) {
    return;
  }
  Answer& answer = world.inquiry->answers[line.rank];
  answer.is_waiting = frame.fields[1] == "1";
  for (std::size_t i = 2; i < frame.fields.size(); i += 4) {
    answer.waits.push_back(read_wait(world, line.rank, frame, i));
  }
  if (world.inquiry->answers.size() == world.inquiry->asked.size()) {
    conclude(line.generation);
  }
}

void Coordinator::conclude(std::uint64_t generation) {
  World& world = worlds_[generation];
  const Inquiry inquiry = std::move(*world.inquiry);
  world.inquiry.reset();
  // The wait may have ended while we asked.
  const auto answer = inquiry.answers.find(inquiry.rank);
  const bool is_over =
      answer != inquiry.answers.end() &&
      std::none_of(
          answer->second.waits.begin(), answer->second.waits.end(),
          [&](const Wait& wait) { return wait.id == inquiry.wait.id; });
  if (!is_over) fail_world(generation, verdict(inquiry));
}

std::string Coordinator::verdict(const Inquiry& inquiry) {
  const std::string after =
      fmt::format("timeout after {} ms: ", inquiry.timeout_ms);

  // Follow the waits, beginning with the one that is too long.
  struct Step {
    int from;  // the rank that waits for this one
    std::string text;
  };
  std::map<int, Step> steps;
  std::vector<int> reached, silent, at_work;
  const auto reach = [&](int from, const Wait& wait) {
    for (const int peer : wait.peers) {
      if (steps.emplace(peer, Step{from, wait.text}).second) {
        reached.push_back(peer);
      }
    }
  };
  reach(inquiry.rank, inquiry.wait);
  for (std::size_t i = 0; i < reached.size(); ++i) {
    const int rank = reached[i];
    const auto answer = inquiry.answers.find(rank);
    if (answer == inquiry.answers.end()) {
      (inquiry.asked.count(rank) > 0 ? silent : at_work).push_back(rank);
    } else if (!answer->second.is_waiting) {
      at_work.push_back(rank);
    } else {
      for (const Wait& wait : answer->second.waits) reach(rank, wait);
    }
  }
  if (silent.empty()) {
    for (const int rank : inquiry.asked) {
      if (inquiry.answers.count(rank) == 0) silent.push_back(rank);
    }
  }

  // "rank 0 waits for rank 1 in recv ..., rank 1 for ...", up to `rank`.
  const auto chain = [&](int rank) {
    std::string text;
    std::set<int> seen;
    for (auto step = steps.find(rank);
         step != steps.end() && seen.insert(step->first).second;
         step = steps.find(step->second.from)) {
      text =
          fmt::format("; rank {} waits for rank {} in {}{}", step->second.from,
                      step->first, step->second.text, text);
      if (step->second.from == inquiry.rank) break;
    }
    return text;
  };
  if (!silent.empty()) {
    std::sort(silent.begin(), silent.end());
    const bool is_one = silent.size() == 1;
    return after + rank_list(silent) + (is_one ? " does" : " do") +
           " not answer: " +
           (is_one ? "its process is stopped, or its host"
                   : "their processes are stopped, or their hosts") +
           " cannot be reached" + chain(silent.front());
  }
  // The device may take too long after all ranks have made the call.
  if (inquiry.wait.peers.empty()) {
    return fmt::format(
        "{}rank {} still waits in {}, which all its ranks have called", after,
        inquiry.rank, inquiry.wait.text);
  }
  if (at_work.empty()) {
    return after + "all ranks wait for each other" +
           (reached.empty() ? "" : chain(reached.back()));
  }
  // Report all ranks that are missing in the same call.
  const Step& last = steps.at(at_work.front());
  std::vector<int> late, waiting;
  for (const int rank : at_work) {
    if (steps.at(rank).text == last.text) late.push_back(rank);
  }
  std::sort(late.begin(), late.end());
  for (const auto& [rank, answer] : inquiry.answers) {
    const bool waits_there =
        std::any_of(answer.waits.begin(), answer.waits.end(),
                    [&](const Wait& wait) { return wait.text == last.text; });
    if (answer.is_waiting && waits_there) waiting.push_back(rank);
  }
  if (waiting.empty()) waiting.push_back(last.from);
  return after + rank_list(late) + " did not join " + last.text +
         ", in which " + rank_list(waiting) +
         (waiting.size() == 1 ? " waits" : " wait") +
         (last.from == inquiry.rank ? "" : chain(last.from));
}

}  // namespace shardbook::internal
