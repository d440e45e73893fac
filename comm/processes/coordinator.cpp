#include "comm/processes/coordinator.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "comm/processes/socket.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

// After a failure, ranks that are still starting have this long to join and
// learn of it.
constexpr std::chrono::milliseconds kLatePatience{2000};

// While there are deadlines, the coordinator checks them this often.
constexpr int kDeadlineTickMs = 50;

HostPort address_for_itself(const Descriptor& listener) {
  HostPort address = own_address(listener);
  if (address.host == "::" || address.host == "0.0.0.0") {
    address.host = "127.0.0.1";
  }
  return address;
}

}  // namespace

Coordinator::Coordinator(Options options)
    : options_(std::move(options)),
      listener_(std::move(options_.listener)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      address_(address_for_itself(listener_)),
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
    const bool has_deadline =
        stopping_ ||
        std::any_of(worlds_.begin(), worlds_.end(), [](const auto& world) {
          return world.second.inquiry.has_value();
        });
    lock.unlock();
    poll(waiting.data(), waiting.size(), has_deadline ? kDeadlineTickMs : -1);
    lock.lock();

    eventfd_t ignored;
    if (waiting[1].revents != 0) eventfd_read(wake_.value(), &ignored);
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (waiting[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) {
        read_line(*polled[i]);
      }
    }
    if (waiting[0].revents != 0) accept_line();
    for (auto& [generation, world] : worlds_) {
      const bool is_late =
          world.inquiry && world.inquiry->deadline <= Clock::now();
      if (is_late) conclude(generation);
    }
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

// A late rank that finds no coordinator could not know which failure ended the
// others. The launcher knows when all ranks have ended, and does not wait.
bool Coordinator::awaits_late_ranks() const {
  if (!options_.generation || Clock::now() > stopped_ + kLatePatience) {
    return false;
  }
  const auto world = worlds_.find(*options_.generation);
  return world != worlds_.end() && !world->second.failure.empty() &&
         static_cast<int>(world->second.seen.size()) < options_.world_size;
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
    if (count <= 0) break;  // full or broken: poll reports either
    line.output.erase(0, static_cast<std::size_t>(count));
  }
}

void Coordinator::end_line(Line& line, const std::string& cause) {
  line.closing = true;
  if (line.rank < 0) return;
  const auto world = worlds_.find(line.generation);
  if (world == worlds_.end() || world->second.left.count(line.rank) > 0) return;
  fail_world(line.generation, fmt::format("rank {} failed: {}", line.rank,
                                          !cause.empty() ? cause
                                          : options_.explain_end
                                              ? options_.explain_end(line.rank)
                                              : "its process ended"));
}

void Coordinator::handle(Line& line, const Frame& frame) {
  if (line.rank < 0) return handle_hello(line, frame);
  switch (frame.kind) {
    case FrameKind::kCall:
    case FrameKind::kExchange:
      handle_call(line, frame);
      break;
    case FrameKind::kFail:
      check_fields(frame, 1);
      fail_world(line.generation,
                 fmt::format("rank {} failed: {}", line.rank, frame.fields[0]));
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
    case FrameKind::kMail:
      check_fields(frame, 3);
      send(line.generation,
           static_cast<int>(
               parse_number(frame.fields[0], options_.world_size - 1)),
           {FrameKind::kMail, {frame.fields[1], frame.fields[2]}});
      break;
    default:
      SB_FAIL("a rank sent a control message of kind ", int(frame.kind));
  }
}

void Coordinator::handle_hello(Line& line, const Frame& frame) {
  SB_CHECK(frame.kind == FrameKind::kHello, "no hello");
  check_fields(frame, 5);
  if (frame.fields[3] != options_.job || frame.fields[4] != options_.serial) {
    return turn_away(line, {FrameKind::kStranger, {options_.job}});
  }
  const auto generation = static_cast<std::uint64_t>(
      parse_number(frame.fields[0], std::int64_t{1} << 60));
  const std::int64_t world_size = parse_number(frame.fields[1], 1 << 20);
  const std::int64_t rank = parse_number(frame.fields[2], 1 << 20);
  if (options_.generation && *options_.generation != generation) {
    line.closing = true;  // early for the next world: it asks again
    return;
  }
  // A newcomer that does not fit is refused, and is no rank of this world.
  std::string refusal;
  if (world_size != options_.world_size) {
    refusal =
        fmt::format("rank {} comes with world size {}, the others with {}",
                    rank, world_size, options_.world_size);
  } else if (rank >= world_size) {
    refusal = fmt::format("rank {} does not exist in a world of {}", rank,
                          world_size);
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
    fail_world(generation, refusal);
    return turn_away(line, {FrameKind::kFailed, {refusal}});
  }
  line.rank = static_cast<int>(rank);
  line.generation = generation;
  world.seen.insert(line.rank);
  if (!world.failure.empty()) {
    queue(line, {FrameKind::kFailed, {world.failure}});
  }
  if (static_cast<int>(world.seen.size()) == options_.world_size) {
    note_all_came(generation);
  }
}

void Coordinator::turn_away(Line& line, const Frame& frame) {
  queue(line, frame);
  flush(line);
  line.closing = true;
}

void Coordinator::note_all_came(std::uint64_t generation) {
  if (options_.generation) listener_.close();
  // Ranks on this host may have come by loopback, and must tell the others an
  // address that these can reach.
  std::vector<Line*> on_this_host;
  std::string network;
  for (Line& line : lines_) {
    if (line.rank < 0 || line.generation != generation) continue;
    const std::string host = own_address(line.socket).host;
    if (is_loopback(host)) {
      on_this_host.push_back(&line);
    } else {
      network = host;
    }
  }
  if (network.empty()) return;
  for (Line* line : on_this_host) {
    queue(*line, {FrameKind::kMail, {kNetworkKey, network}});
  }
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
