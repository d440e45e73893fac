#include "comm/gloo/control_line.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/check.h"

namespace shardbook::internal {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The coordinator keeps the time and names who is missing; a rank that hears
// nothing waits this much longer before it gives up by itself.
constexpr milliseconds kGrace{4000};

}  // namespace

ControlLine::ControlLine(Options options) : options_(std::move(options)) {
  connect();
  host_ = local_host(socket_);
  reader_ = std::thread([this] { read(); });
}

ControlLine::~ControlLine() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  shutdown(socket_.value(), SHUT_RDWR);
  reader_.join();
}

void ControlLine::connect() {
  const auto deadline = Clock::now() + options_.timeout;
  std::string place = "an address that it has not published";
  while (Clock::now() < deadline) {
    if (const auto address = options_.locate()) {
      place = address->host + ":" + std::to_string(address->port);
      socket_ = try_connect(*address, milliseconds(1000));
      if (socket_.valid() && shake_hands()) return;
    }
    std::this_thread::sleep_for(milliseconds(20));
  }
  SB_FAIL("rendezvous: rank ", options_.rank, " found no ",
          options_.coordinator_name, " at ", place, " within ",
          options_.timeout.count(), " ms");
}

bool ControlLine::shake_hands() {
  input_.clear();
  send({FrameKind::kHello,
        {std::to_string(options_.generation),
         std::to_string(options_.world_size), std::to_string(options_.rank)}});
  // The answer may be long in coming when the coordinator is busy.
  const auto deadline = Clock::now() + milliseconds(5000);
  while (Clock::now() < deadline) {
    pollfd waiting{socket_.value(), POLLIN, 0};
    if (poll(&waiting, 1, 100) != 1) continue;
    char bytes[4096];
    const ssize_t count = recv(socket_.value(), bytes, sizeof bytes, 0);
    if (count <= 0) return false;
    input_.append(bytes, static_cast<std::size_t>(count));
    if (const auto frame = take_frame(input_, kMaxFrameBytes)) {
      return frame->kind == FrameKind::kWelcome;
    }
  }
  return false;
}

void ControlLine::read() {
  try {
    for (;;) {
      while (auto frame = take_frame(input_, kMaxFrameBytes)) {
        handle(std::move(*frame));
      }
      char bytes[1 << 14];
      const ssize_t count = recv(socket_.value(), bytes, sizeof bytes, 0);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      input_.append(bytes, static_cast<std::size_t>(count));
    }
  } catch (const std::exception& error) {
    set_failure(options_.coordinator_name + " failed: " + error.what());
  }
  bool is_orderly;
  {
    const std::lock_guard lock(mutex_);
    is_orderly = ending_ || all_left_;
  }
  if (!is_orderly) {
    set_failure(options_.coordinator_name +
                " failed: its process ended (the line to it was cut)");
  }
  shutdown(socket_.value(), SHUT_RDWR);
}

void ControlLine::handle(Frame frame) {
  if (frame.kind == FrameKind::kFailed && frame.fields.size() == 1) {
    set_failure(frame.fields[0]);
    return;
  }
  const std::lock_guard lock(mutex_);
  if (frame.kind == FrameKind::kAllLeft) {
    all_left_ = true;
  } else if (!frame.fields.empty()) {
    const std::string key = frame.fields.front();
    frame.fields.erase(frame.fields.begin());
    answers_[key] = std::move(frame.fields);
  }
  changed_.notify_all();
}

void ControlLine::set_failure(const std::string& message) {
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = message;
    callback = failure_callback_;
    changed_.notify_all();
  }
  if (callback) callback();
}

void ControlLine::set_failure_callback(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    failure_callback_ = callback;
    if (failure_.empty()) return;
  }
  if (callback) callback();
}

std::string ControlLine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::string ControlLine::wait_for_failure(milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return !failure_.empty(); });
  return failure_;
}

void ControlLine::send(const Frame& frame) {
  const std::string bytes = encode_frame(frame);
  const std::lock_guard lock(write_mutex_);
  for (std::size_t sent = 0; sent < bytes.size();) {
    const ssize_t count = ::send(socket_.value(), bytes.data() + sent,
                                 bytes.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // the reader notices and says why
    sent += static_cast<std::size_t>(count);
  }
}

void ControlLine::wait_until(std::unique_lock<std::mutex>& lock,
                             milliseconds timeout, const std::string& what,
                             const std::function<bool()>& ready) {
  const bool woken = changed_.wait_for(
      lock, timeout + kGrace, [&] { return ready() || !failure_.empty(); });
  if (woken && ready()) return;
  SB_CHECK(failure_.empty(), failure_, " (while rank ", options_.rank,
           " was in ", what, ")");
  SB_FAIL("timeout after ", (timeout + kGrace).count(), " ms: rank ",
          options_.rank, " waits for ", options_.coordinator_name, " in ",
          what);
}

void ControlLine::set(const std::string& key, const std::string& value) {
  send({FrameKind::kSet, {key, value}});
}

std::string ControlLine::get(const std::string& key, milliseconds timeout) {
  send({FrameKind::kGet, {key}});
  std::unique_lock lock(mutex_);
  wait_until(lock, timeout, "the rendezvous, reading \"" + key + "\"",
             [&] { return answers_.count(key) > 0; });
  std::vector<std::string> answer = std::move(answers_[key]);
  answers_.erase(key);
  return answer.empty() ? "" : answer.front();
}

void ControlLine::report_call(const std::string& key,
                              const std::string& members,
                              const std::string& signature,
                              const std::string& text, milliseconds timeout) {
  send({FrameKind::kCall,
        {key, members, signature, text, std::to_string(timeout.count())}});
}

std::vector<std::string> ControlLine::exchange(const std::string& key,
                                               const std::string& members,
                                               const std::string& name,
                                               const std::string& text,
                                               milliseconds timeout) {
  send({FrameKind::kExchange,
        {key, members, name, std::to_string(timeout.count()), text}});
  std::unique_lock lock(mutex_);
  wait_until(lock, timeout, name, [&] { return answers_.count(key) > 0; });
  std::vector<std::string> answer = std::move(answers_[key]);
  answers_.erase(key);
  return answer;
}

void ControlLine::fail(const std::string& reason) {
  // A reason of any length must fit into a frame.
  send({FrameKind::kFail, {reason.substr(0, 1 << 16)}});
  wait_for_failure(milliseconds(1000));
}

void ControlLine::leave(milliseconds timeout) {
  send({FrameKind::kLeave, {}});
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout,
                    [&] { return all_left_ || !failure_.empty(); });
}

}  // namespace shardbook::internal
