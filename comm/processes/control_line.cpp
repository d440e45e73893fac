#include "comm/processes/control_line.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "comm/launch.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The coordinator answers at once. A rank that hears nothing from it gives up.
constexpr milliseconds kAnswerPatience{1500};

// The coordinator needs longer to find the rank that delays the others.
constexpr milliseconds kGrace{3500};

// The reader checks the waits this often.
constexpr int kTickMs = 200;

std::string after(milliseconds time) {
  return fmt::format("timeout after {} ms: ", time.count());
}

}  // namespace

ControlLine::Wait::Wait(ControlLine& line, const std::string& text, int peer,
                        milliseconds timeout)
    : line_(line),
      text_(&text),
      peer_(std::to_string(peer)),
      timeout_(timeout) {
  begin();
}

ControlLine::Wait::Wait(ControlLine& line, const std::string& text,
                        std::string key, milliseconds timeout)
    : line_(line), text_(&text), key_(std::move(key)), timeout_(timeout) {
  begin();
}

ControlLine::Wait::Wait(ControlLine& line) : line_(line) { begin(); }

void ControlLine::Wait::begin() {
  began_ = Clock::now();
  thread_ = std::this_thread::get_id();
  const std::lock_guard lock(line_.mutex_);
  id_ = line_.num_waits_++;
  place_ = line_.waits_.insert(line_.waits_.end(), this);
}

std::vector<std::string> ControlLine::Wait::fields() const {
  return {std::to_string(id_), *text_, peer_, key_};
}

ControlLine::Wait::~Wait() {
  const std::lock_guard lock(line_.mutex_);
  line_.waits_.erase(place_);
}

ControlLine::ControlLine(Options options) : options_(std::move(options)) {
  connect();
  host_ = own_address(socket_).host;
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

std::string ControlLine::host() {
  return take_mail(kNetworkKey).value_or(host_);
}

void ControlLine::connect() {
  const auto deadline = Clock::now() + options_.timeout;
  std::string wrong = options_.coordinator_name + " has published no address";
  std::string where;
  // A name that is not known costs others a question each time.
  for (milliseconds pause{20}; Clock::now() < deadline;
       pause = std::min(pause * 5 / 4, milliseconds(200))) {
    const ServingPlace place = options_.locate();
    for (const HostPort& address : place.addresses) {
      where = " at " + host_port_text(address);
      wrong = join(address, place, deadline);
      if (wrong.empty()) return;
    }
    std::this_thread::sleep_for(pause);
  }
  throw RunError(fmt::format(
      "rendezvous: rank {} did not reach {}{} within {} ms: {}", options_.rank,
      options_.coordinator_name, where, options_.timeout.count(), wrong));
}

std::string ControlLine::join(const HostPort& address,
                              const ServingPlace& place,
                              Clock::time_point give_up) {
  std::string wrong;
  socket_ = try_connect(address, milliseconds(1000), &wrong);
  return socket_.valid() ? shake_hands(place, give_up) : wrong;
}

std::string ControlLine::shake_hands(const ServingPlace& place,
                                     Clock::time_point give_up) {
  input_.clear();
  send({FrameKind::kHello,
        {std::to_string(options_.generation),
         std::to_string(options_.world_size), std::to_string(options_.rank),
         options_.job, place.serial}});
  // A busy coordinator answers late.
  const auto deadline =
      std::min(Clock::now() + milliseconds(5000), give_up + milliseconds(1000));
  try {
    while (Clock::now() < deadline) {
      if (!receive(100)) return "it closed the connection";
      if (const auto frame = take_frame(input_, kMaxHelloBytes)) {
        if (frame->kind == FrameKind::kWelcome) return "";
        check_fields(*frame, 1);
        const std::string& job = frame->fields[0];
        return fmt::format(
            "the ranks of another job{} meet there; give every job on a host a "
            "--rendezvous of its own",
            job.empty() ? "" : " (" + job + ")");
      }
      // The file of an earlier run may name a port that now belongs to another
      // program, which answers nothing.
      if (options_.locate() != place) break;
    }
  } catch (const Error&) {
    // The answer is no frame.
  }
  return "no answer; another program may serve there";
}

// Adds what arrives to input_; false when the line has ended.
bool ControlLine::receive(int timeout_ms) {
  pollfd waiting{socket_.value(), POLLIN, 0};
  if (poll(&waiting, 1, timeout_ms) == 0) return true;
  char bytes[1 << 14];
  const ssize_t count = recv(socket_.value(), bytes, sizeof bytes, 0);
  if (count < 0 && errno == EINTR) return true;
  if (count <= 0) return false;
  input_.append(bytes, static_cast<std::size_t>(count));
  last_heard_ = Clock::now();
  return true;
}

void ControlLine::read() {
  try {
    do {
      while (auto frame = take_frame(input_, kMaxFrameBytes)) {
        handle(std::move(*frame));
      }
      check_waits();
    } while (receive(kTickMs));
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
  if (frame.kind == FrameKind::kAsk && frame.fields.size() == 1) {
    send(describe_waits(frame.fields[0]));
    return;
  }
  const bool is_mail = frame.kind == FrameKind::kMail;
  std::function<void()> callback;
  std::unique_lock lock(mutex_);
  if (is_mail) callback = mail_callback_;
  if (frame.kind == FrameKind::kAllLeft) {
    all_left_ = true;
  } else if (frame.kind == FrameKind::kPong) {
    ++num_pongs_;
  } else if (!frame.fields.empty()) {
    const std::string key = frame.fields.front();
    frame.fields.erase(frame.fields.begin());
    answers_[key] = std::move(frame.fields);
  }
  changed_.notify_all();
  lock.unlock();
  if (callback) callback();
}

// Tells the coordinator of waits that are overdue; gives up when the
// coordinator has been told and does not react.
void ControlLine::check_waits() {
  std::vector<Frame> overdue;
  std::string failure;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    const auto now = Clock::now();
    for (Wait* wait : waits_) {
      if (wait->text_ == nullptr || now < wait->began_ + wait->timeout_) {
        continue;
      }
      if (!wait->reported_) {
        wait->reported_ = now;
        overdue.push_back({FrameKind::kOverdue, wait->fields()});
        overdue.back().fields.push_back(std::to_string(wait->timeout_.count()));
      } else if (now > (last_heard_ < *wait->reported_
                            ? *wait->reported_ + kAnswerPatience
                            : last_heard_ + kGrace)) {
        failure = after(wait->timeout_) + silence();
      }
    }
  }
  if (!failure.empty()) return set_failure(failure);
  for (const Frame& frame : overdue) send(frame);
}

std::string ControlLine::silence() const {
  return options_.coordinator_name +
         " does not answer: its process is stopped, or its host cannot be "
         "reached";
}

Frame ControlLine::describe_waits(const std::string& question) const {
  const std::lock_guard lock(mutex_);
  Frame frame{FrameKind::kWaits, {question, "0"}};
  for (const Wait* wait : waits_) {
    if (wait->thread_ == owner_) frame.fields[1] = "1";
    if (wait->text_ == nullptr) continue;
    for (std::string& field : wait->fields()) {
      frame.fields.push_back(std::move(field));
    }
  }
  return frame;
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
  const auto deadline = Clock::now() + patience;
  std::unique_lock lock(mutex_);
  const int num_before = num_pongs_;
  lock.unlock();
  send({FrameKind::kPing, {}});
  lock.lock();
  const bool is_there = changed_.wait_for(lock, kAnswerPatience, [&] {
    return !failure_.empty() || num_pongs_ > num_before;
  });
  if (!is_there) {
    lock.unlock();
    set_failure(silence());
    lock.lock();
  }
  changed_.wait_until(lock, deadline, [&] { return !failure_.empty(); });
  return failure_;
}

void ControlLine::send(const Frame& frame) {
  const std::string bytes = encode_frame(frame);
  const std::lock_guard lock(write_mutex_);
  for (std::size_t sent = 0; sent < bytes.size();) {
    const ssize_t count = ::send(socket_.value(), bytes.data() + sent,
                                 bytes.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // the reader notices and reports it
    sent += static_cast<std::size_t>(count);
  }
}

void ControlLine::wait_until(const std::string& key, milliseconds timeout,
                             const std::string& what,
                             const std::function<bool()>& ready) {
  const Wait wait(*this, what, key, timeout);
  std::unique_lock lock(mutex_);
  // The reader gives up first; this is the last resort.
  const milliseconds limit = timeout + 2 * kGrace;
  changed_.wait_for(lock, limit, [&] { return ready() || !failure_.empty(); });
  if (ready()) return;
  if (!failure_.empty()) {
    throw RunError(fmt::format("{} (while rank {} was in {})", failure_,
                               options_.rank, what));
  }
  throw RunError(fmt::format("{}rank {} waits for {} in {}", after(limit),
                             options_.rank, options_.coordinator_name, what));
}

std::vector<std::string> ControlLine::wait_for_answer(
    const std::string& key, const std::string& meeting, milliseconds timeout,
    const std::string& what) {
  wait_until(meeting, timeout, what, [&] { return answers_.count(key) > 0; });
  const std::lock_guard lock(mutex_);
  return std::move(answers_.extract(key).mapped());
}

void ControlLine::mail(int to, const std::string& key,
                       const std::string& text) {
  send({FrameKind::kMail, {std::to_string(to), key, text}});
}

std::optional<std::string> ControlLine::take_mail(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = answers_.find(key);
  if (found == answers_.end() || found->second.empty()) return {};
  std::string text = std::move(found->second.front());
  answers_.erase(found);
  return text;
}

std::string ControlLine::wait_for_mail(const std::string& key,
                                       const std::string& what,
                                       milliseconds timeout) {
  const auto texts = wait_for_answer(key, "", timeout, what);
  return texts.empty() ? "" : texts.front();
}

void ControlLine::set_mail_callback(std::function<void()> callback) {
  const std::lock_guard lock(mutex_);
  mail_callback_ = std::move(callback);
}

void ControlLine::report_call(const std::string& key,
                              const std::string& members,
                              const std::string& signature,
                              const std::string& text) {
  send({FrameKind::kCall, {key, members, signature, text}});
}

std::vector<std::string> ControlLine::exchange(const std::string& key,
                                               const std::string& members,
                                               const std::string& name,
                                               const std::string& text,
                                               milliseconds timeout) {
  send({FrameKind::kExchange, {key, members, name, text}});
  return wait_for_answer(key, key, timeout, name);
}

void ControlLine::fail(const std::string& reason) {
  // A reason of any length must fit into a frame.
  send({FrameKind::kFail, {reason.substr(0, 1 << 16)}});
  wait_for_failure(milliseconds(1000));
}

void ControlLine::leave(milliseconds timeout) {
  send({FrameKind::kLeave, {}});
  wait_until(kLeaveKey, timeout, "the final barrier",
             [&] { return all_left_; });
}

}  // namespace shardbook::internal
