#include "comm/processes/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/processes.h"
#include "comm/processes/job.h"
#include "comm/signals.h"

namespace shardbook::internal {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// After a failure the other ranks have this long to report their calls.
constexpr milliseconds kGraceAfterFailure{3000};

// How a process ended (WEXITED) or stopped (WSTOPPED), without collecting it;
// empty while it runs.
std::optional<siginfo_t> state_of(pid_t pid, int state) {
  siginfo_t info{};
  const int status =
      waitid(P_PID, static_cast<id_t>(pid), &info, state | WNOHANG | WNOWAIT);
  if (status != 0 || info.si_pid == 0) return {};
  return info;
}

std::string end_text(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) {
    return fmt::format("its process exited with status {}", info.si_status);
  }
  return fmt::format("its process was killed by signal {} ({})", info.si_status,
                     strsignal(info.si_status));
}

}  // namespace

Supervisor::Supervisor(std::vector<Child> children, Descriptor listener,
                       milliseconds timeout)
    : children_(std::move(children)), timeout_(timeout) {
  if (!listener.valid()) return;
  coordinator_ = std::make_unique<Coordinator>(Coordinator::Options{
      .listener = std::move(listener),
      .world_size = static_cast<int>(children_.size()),
      .job = process_name(getpid()),
      .explain_end = [this](int rank) { return explain(rank); }});
}

Supervisor::~Supervisor() {
  coordinator_.reset();
  // Kill and collect the children that are left.
  for (const Child& child : children_) {
    if (!child.ended) kill(child.pid, SIGKILL);
    while (waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

void Supervisor::run() {
  std::optional<Clock::time_point> kill_at;
  while (std::any_of(children_.begin(), children_.end(),
                     [](const Child& child) { return !child.ended; })) {
    std::vector<pollfd> waiting;
    for (const Child& child : children_) {
      waiting.push_back({child.pipe.value(), POLLIN, 0});
    }
    poll(waiting.data(), waiting.size(), 20);
    pass_on_signal();
    for (std::size_t i = 0; i < children_.size(); ++i) {
      if (waiting[i].revents != 0) read_answer(children_[i]);
      check_end(static_cast<int>(i));
      check_stop(static_cast<int>(i));
    }
    if (!kill_at && has_failure()) kill_at = Clock::now() + kGraceAfterFailure;
    if (kill_at && Clock::now() > *kill_at) send_signal(SIGKILL);
  }
  for (Child& child : children_) {
    while (child.pipe.valid()) read_answer(child);
  }
}

std::string Supervisor::failure() const {
  if (!failure_.empty()) return failure_;
  return coordinator_ ? coordinator_->failure() : "";
}

void Supervisor::fail(const std::string& failure) {
  if (!this->failure().empty()) return;
  failure_ = failure;
  if (coordinator_) coordinator_->fail(failure_);
}

// Called by the coordinator when a rank's line has ended; its process may end a
// moment later.
std::string Supervisor::explain(int rank) {
  const pid_t pid = children_[static_cast<std::size_t>(rank)].pid;
  for (int i = 0; i < 100; ++i) {
    if (const auto info = state_of(pid, WEXITED)) return end_text(*info);
    std::this_thread::sleep_for(milliseconds(5));
  }
  return "it left without a word";
}

void Supervisor::check_end(int rank) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  if (child.ended) return;
  const auto info = state_of(child.pid, WEXITED);
  if (!info) return;
  child.ended = true;
  child.status = info->si_code == CLD_EXITED ? info->si_status : kExitRunFailed;
  if (coordinator_ && child.status == 0) coordinator_->rank_ended(rank);
  if (child.status == 0) return;
  status_ = status_ == 0 ? child.status : std::min(status_, child.status);
  fail(fmt::format("rank {} failed: {}", rank, end_text(*info)));
}

// A stopped rank neither computes nor answers. Its peers may notice late, and
// after its last call they never do.
void Supervisor::check_stop(int rank) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  if (child.ended || !state_of(child.pid, WSTOPPED)) {
    child.stopped_since.reset();
    return;
  }
  const auto now = Clock::now();
  if (!child.stopped_since) child.stopped_since = now;
  if (now >= *child.stopped_since + timeout_) {
    fail(fmt::format(
        "timeout after {} ms: rank {} does not answer: its process is stopped",
        timeout_.count(), rank));
  }
  // It cannot end by itself.
  if (has_failure()) kill(child.pid, SIGKILL);
}

void Supervisor::read_answer(Child& child) {
  char bytes[1 << 16];
  const ssize_t count = read(child.pipe.value(), bytes, sizeof bytes);
  if (count > 0) {
    child.answer.append(bytes, static_cast<std::size_t>(count));
  } else if (count == 0 || errno != EINTR) {
    child.pipe.close();
  }
}

// The first signal asks the ranks to end; a second one ends this process, and
// the ranks with it.
void Supervisor::pass_on_signal() {
  if (has_passed_on_ || received_signal() == 0) return;
  has_passed_on_ = true;
  send_signal(received_signal());
}

void Supervisor::send_signal(int signal) {
  for (const Child& child : children_) {
    if (!child.ended) kill(child.pid, signal);
  }
}

}  // namespace shardbook::internal
