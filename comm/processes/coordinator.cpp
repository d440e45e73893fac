#include "comm/processes/coordinator.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/check.h"

namespace shardbook::internal {
namespace {

// A stranger may not make us keep more than this before it has said hello.
constexpr std::size_t kMaxHelloBytes = 1024;

// A rank's control line answers at once, whatever the rank computes. A rank
// that has not answered by then is not running.
constexpr std::chrono::milliseconds kInquiryPatience{2000};

// After a failure, ranks that are still starting have this long to come and
// hear of it.
constexpr std::chrono::milliseconds kLatePatience{2000};
constexpr std::chrono::milliseconds kLateTick{50};

std::int64_t parse_number(const std::string& text, std::int64_t limit) {
  SB_CHECK(!text.empty() && text.size() <= 18 &&
               text.find_first_not_of("0123456789") == std::string::npos,
           "control message: \"", text, "\" is no number");
  const std::int64_t value = std::stoll(text);
  SB_CHECK(value <= limit, "control message: ", value, " exceeds ", limit);
  return value;
}

std::string never_joins(int rank) {
  return "rank " + std::to_string(rank) + " failed: it ended without joining";
}

void check_fields(const Frame& frame, std::size_t count) {
  SB_CHECK(frame.fields.size() == count, "control message of kind ",
           int(frame.kind), " has ", frame.fields.size(), " fields, not ",
           count);
}

}  // namespace

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    if (!text.empty()) text += ',';
    text += std::to_string(rank);
  }
  return text;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::vector<int> split_ranks(const std::string& text, int world_size) {
  std::vector<int> ranks;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    ranks.push_back(static_cast<int>(
        parse_number(text.substr(begin, end - begin), world_size - 1)));
    begin = end + 1;
  }
  return ranks;
}

Coordinator::Coordinator(Options options)
    : options_(std::move(options)),
      listener_(options_.listener.valid() ? std::move(options_.listener)
                                          : listen_on(options_.address)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      port_(bound_port(listener_)),
      thread_([this] { serve(); }) {}

Coordinator::~Coordinator() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stopped_ = Clock::now();
  }
  eventfd_write(wake_.value(), 1);
  thread_.join();
}

void Coordinator::fail(const std::string& message) {
  {
    const std::lock_guard lock(mutex_);
    if (job_failure_.empty()) job_failure_ = message;
    for (auto& [generation, world] : worlds_) fail_world(generation, message);
    if (first_failure_.empty()) first_failure_ = message;
  }
  eventfd_write(wake_.value(), 1);
}

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

std::string Coordinator::failure() const {
  const std::lock_guard lock(mutex_);
  return first_failure_;
}

void Coordinator::serve() {
  std::unique_lock lock(mutex_);
  while (!stopping_ || awaits_late_ranks()) {
    // Wait for a new line, bytes on a line, room to write, or a deadline.
    std::vector<pollfd> waiting = {{listener_.value(), POLLIN, 0},
                                   {wake_.value(), POLLIN, 0}};
    std::vector<Line*> polled;
    for (Line& line : lines_) {
      const int events = line.output.empty() ? POLLIN : POLLIN | POLLOUT;
      waiting.push_back({line.socket.value(), static_cast<short>(events), 0});
      polled.push_back(&line);
    }
    const int timeout = milliseconds_to_deadline();
    lock.unlock();
    poll(waiting.data(), waiting.size(), timeout);
    lock.lock();

    eventfd_t ignored;
    if (waiting[1].revents != 0) eventfd_read(wake_.value(), &ignored);
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (waiting[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) {
        read_line(*polled[i]);
      }
    }
    if (waiting[0].revents != 0) accept_line();
    check_deadlines();
    for (Line& line : lines_) flush(line);
    lines_.remove_if([](const Line& line) { return line.closing; });
  }
  drain();
}

// Closing a socket with unread bytes would also destroy what the rank has not
// read yet. So we end our side, and the ranks answer by ending theirs.
void Coordinator::drain() {
  const auto deadline = Clock::now() + std::chrono::seconds(1);
  for (Line& line : lines_) shutdown(line.socket.value(), SHUT_WR);
  for (Line& line : lines_) {
    char bytes[1 << 16];
    for (;;) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      pollfd waiting{line.socket.value(), POLLIN, 0};
      if (left.count() <= 0 ||
          poll(&waiting, 1, static_cast<int>(left.count())) <= 0 ||
          recv(line.socket.value(), bytes, sizeof bytes, 0) <= 0) {
        break;
      }
    }
  }
}

// A rank that finds nobody could not know whose failure has ended the others.
// The launcher knows when all ranks have ended, and does not wait.
bool Coordinator::awaits_late_ranks() const {
  if (!options_.generation || Clock::now() > stopped_ + kLatePatience) {
    return false;
  }
  const auto world = worlds_.find(*options_.generation);
  return world != worlds_.end() && !world->second.failure.empty() &&
         static_cast<int>(world->second.seen.size()) < options_.world_size;
}

int Coordinator::milliseconds_to_deadline() const {
  auto nearest = Clock::now() + std::chrono::hours(1);
  for (const auto& [generation, world] : worlds_) {
    if (!world.failure.empty()) continue;
    if (world.inquiry) nearest = std::min(nearest, world.inquiry->deadline);
  }
  if (stopping_) nearest = std::min(nearest, Clock::now() + kLateTick);
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(nearest - Clock::now());
  return static_cast<int>(std::max<std::int64_t>(0, left.count()));
}

void Coordinator::accept_line() {
  Descriptor socket(accept4(listener_.value(), nullptr, nullptr,
                            SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) return;
  lines_.emplace_back();
  lines_.back().socket = std::move(socket);
}

void Coordinator::read_line(Line& line) {
  char bytes[1 << 16];
  while (!line.closing) {
    const ssize_t count = recv(line.socket.value(), bytes, sizeof bytes, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count <= 0) {
      end_line(line, "");
      break;
    }
    line.input.append(bytes, static_cast<std::size_t>(count));
    try {
      const auto limit = [&] {
        return line.rank < 0 ? kMaxHelloBytes : kMaxFrameBytes;
      };
      while (!line.closing) {
        const auto frame = take_frame(line.input, limit());
        if (!frame) break;
        handle(line, *frame);
      }
    } catch (const std::exception& error) {
      end_line(line, error.what());
    }
  }
}

void Coordinator::flush(Line& line) {
  while (!line.closing && !line.output.empty()) {
    const ssize_t count = ::send(line.socket.value(), line.output.data(),
                                 line.output.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;  // full: poll says when to go on; broken: so does it
    line.output.erase(0, static_cast<std::size_t>(count));
  }
}

void Coordinator::end_line(Line& line, const std::string& cause) {
  line.closing = true;
  if (line.rank < 0) return;
  const auto world = worlds_.find(line.generation);
  if (world == worlds_.end() || world->second.left.count(line.rank) > 0) return;
  std::string reason = cause;
  if (reason.empty() && options_.explain_end) {
    reason = options_.explain_end(line.rank);
  }
  if (reason.empty()) reason = "its process ended";
  fail_world(line.generation,
             "rank " + std::to_string(line.rank) + " failed: " + reason);
}

void Coordinator::handle(Line& line, const Frame& frame) {
  if (line.rank < 0) return handle_hello(line, frame);
  World& world = worlds_[line.generation];
  switch (frame.kind) {
    case FrameKind::kSet: {
      check_fields(frame, 2);
      const std::string& key = frame.fields[0];
      world.values[key] = frame.fields[1];
      const auto [begin, end] = world.value_waiters.equal_range(key);
      for (auto waiter = begin; waiter != end; ++waiter) {
        send(line.generation, waiter->second,
             {FrameKind::kValue, {key, frame.fields[1]}});
      }
      world.value_waiters.erase(begin, end);
      break;
    }
    case FrameKind::kGet: {
      check_fields(frame, 1);
      const auto value = world.values.find(frame.fields[0]);
      if (value != world.values.end()) {
        queue(line, {FrameKind::kValue, {value->first, value->second}});
      } else {
        world.value_waiters.emplace(frame.fields[0], line.rank);
      }
      break;
    }
    case FrameKind::kCall:
    case FrameKind::kExchange:
      handle_call(line, frame);
      break;
    case FrameKind::kFail:
      check_fields(frame, 1);
      fail_world(line.generation, "rank " + std::to_string(line.rank) +
                                      " failed: " + frame.fields[0]);
      break;
    case FrameKind::kLeave:
      handle_leave(line);
      break;
    case FrameKind::kPing:
      queue(line, {FrameKind::kPong, {}});
      break;
    case FrameKind::kOverdue:
      handle_overdue(line, frame);
      break;
    case FrameKind::kWaits:
      handle_waits(line, frame);
      break;
    default:
      SB_FAIL("a rank sent a control message of kind ", int(frame.kind));
  }
}

void Coordinator::handle_hello(Line& line, const Frame& frame) {
  SB_CHECK(frame.kind == FrameKind::kHello, "no hello");
  check_fields(frame, 3);
  const auto generation = static_cast<std::uint64_t>(
      parse_number(frame.fields[0], std::int64_t{1} << 60));
  const std::int64_t world_size = parse_number(frame.fields[1], 1 << 20);
  const std::int64_t rank = parse_number(frame.fields[2], 1 << 20);
  if (options_.generation && *options_.generation != generation) {
    line.closing = true;  // early for the next world: it asks again
    return;
  }
  // A wrong newcomer is told, and is no rank of this world.
  std::string refusal;
  if (world_size != options_.world_size) {
    refusal = "rank " + std::to_string(rank) + " comes with world size " +
              std::to_string(world_size) + ", the others with " +
              std::to_string(options_.world_size);
  } else if (rank >= world_size) {
    refusal = "rank " + std::to_string(rank) +
              " does not exist in a world of " + std::to_string(world_size);
  }
  for (const Line& other : lines_) {
    if (&other != &line && !other.closing && other.rank == rank &&
        other.generation == generation) {
      refusal = "two processes claim to be rank " + std::to_string(rank);
    }
  }
  World& world = worlds_[generation];
  if (!job_failure_.empty()) world.failure = job_failure_;
  queue(line, {FrameKind::kWelcome, {}});
  if (!refusal.empty()) {
    queue(line, {FrameKind::kFailed, {refusal}});
    fail_world(generation, refusal);
    flush(line);
    line.closing = true;
    return;
  }
  line.rank = static_cast<int>(rank);
  line.generation = generation;
  world.seen.insert(line.rank);
  if (!world.failure.empty()) {
    queue(line, {FrameKind::kFailed, {world.failure}});
  }
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
    meeting.is_exchange = is_exchange;
  } else if (meeting.signature != signature) {
    const auto& [other, other_text] = *meeting.texts.begin();
    fail_world(line.generation,
               "calls do not match: rank " + std::to_string(other) +
                   " called " + other_text + ", rank " +
                   std::to_string(line.rank) + " called " + text);
    return;
  }
  meeting.texts[line.rank] = text;
  if (is_exchange) meeting.values[line.rank] = frame.fields[3];

  if (meeting.texts.size() == meeting.members.size()) {
    if (is_exchange) finish_exchange(line.generation, key, meeting);
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

void Coordinator::finish_exchange(std::uint64_t generation,
                                  const std::string& key,
                                  const Meeting& meeting) {
  Frame answer{FrameKind::kExchanged, {key}};
  for (const int member : meeting.members) {
    answer.fields.push_back(meeting.values.at(member));
  }
  for (const int member : meeting.members) send(generation, member, answer);
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

void Coordinator::check_deadlines() {
  const auto now = Clock::now();
  for (auto& [generation, world] : worlds_) {
    if (world.inquiry && world.inquiry->deadline <= now) conclude(generation);
  }
}

// --- Who holds the others up -------------------------------------------------

std::vector<int> Coordinator::awaited(const World& world, int rank,
                                      const std::string& peers,
                                      const std::string& key) const {
  if (!peers.empty()) return split_ranks(peers, options_.world_size);
  std::vector<int> members;
  const auto meeting = world.meetings.find(key);
  if (meeting != world.meetings.end()) {
    members = meeting->second.members;
  } else if (key.empty() || key == kLeaveKey) {
    for (int r = 0; r < options_.world_size; ++r) members.push_back(r);
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
  // The rank must hear that we are alive, also where another one has asked.
  queue(line, {FrameKind::kPong, {}});
  if (!world.failure.empty() || world.inquiry) return;
  Inquiry inquiry;
  inquiry.number = ++num_inquiries_;
  inquiry.rank = line.rank;
  inquiry.wait = read_wait(world, line.rank, frame, 0);
  inquiry.timeout_ms = parse_number(frame.fields[4], std::int64_t{1} << 40);
  inquiry.deadline = Clock::now() + kInquiryPatience;
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
      "timeout after " + std::to_string(inquiry.timeout_ms) + " ms: ";

  // Walk along the waits, beginning with the one that takes too long.
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
      text = "; rank " + std::to_string(step->second.from) +
             " waits for rank " + std::to_string(step->first) + " in " +
             step->second.text + text;
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
  if (at_work.empty()) {
    return after + "all ranks wait for each other" +
           (reached.empty() ? "" : chain(reached.back()));
  }
  // Those that the same wait is for are missing together.
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

void Coordinator::fail_world(std::uint64_t generation,
                             const std::string& message) {
  World& world = worlds_[generation];
  if (!world.failure.empty()) return;  // only the first cause counts
  world.failure = message;
  world.meetings.clear();
  if (first_failure_.empty()) first_failure_ = message;
  for (Line& line : lines_) {
    if (line.rank >= 0 && line.generation == generation) {
      queue(line, {FrameKind::kFailed, {message}});
    }
  }
}

void Coordinator::send(std::uint64_t generation, int rank, const Frame& frame) {
  for (Line& line : lines_) {
    if (line.rank == rank && line.generation == generation) queue(line, frame);
  }
}

void Coordinator::queue(Line& line, const Frame& frame) {
  if (!line.closing) line.output += encode_frame(frame);
}

}  // namespace shardbook::internal
