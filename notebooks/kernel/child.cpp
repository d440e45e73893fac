#include "notebooks/kernel/child.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "notebooks/kernel/interruption.h"

namespace shardbook::notebook {
namespace {

void write_all(int file, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t n = write(file, text.data() + at, text.size() - at);
    if (n < 0 && errno != EINTR) return;
    if (n > 0) at += static_cast<std::size_t>(n);
  }
}

// The last byte of a child's answer: its work returned, or it left remarks.
constexpr char kReturned = '\n';
constexpr char kRemarked = '\0';

// Data for a child that a signal ends.
const std::string* child_remarks = nullptr;
int child_answer = -1;

/// Writes the remarks, then lets the signal end the child.
void leave_remarks(int signal) {
  ::signal(signal, SIG_DFL);
  write_all(child_answer, *child_remarks);
  write_all(child_answer, std::string(1, kRemarked));
  raise(signal);
}

/// Limits count the child's own CPU time: other programs may leave it little of
/// the processor.
[[noreturn]] void run_child(const std::function<std::string()>& work,
                            const std::string& remarks, int answer,
                            int limit_s) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto seconds = static_cast<rlim_t>(limit_s);
  const rlimit limit{seconds, seconds + 1};
  setrlimit(RLIMIT_CPU, &limit);
  child_remarks = &remarks;
  child_answer = answer;
  // The child also has the cell thread's signal stack.
  struct sigaction action {};
  action.sa_flags = SA_ONSTACK;
  action.sa_handler = leave_remarks;
  for (const int signal :
       {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGPROF, SIGXCPU}) {
    sigaction(signal, &action, nullptr);
  }
  write_all(answer, work() + kReturned);
  _exit(0);
}

/// Reads until the child closes its end. False if the child has to be stopped:
/// after an interrupt, or when it waits for something that never comes.
bool read_answer(int answer, std::string& text) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::minutes(20);
  std::array<char, 65536> buffer;
  while (!is_interrupted() && Clock::now() < end) {
    pollfd waiting{answer, POLLIN, 0};
    if (poll(&waiting, 1, 100) <= 0) continue;
    const ssize_t n = read(answer, buffer.data(), buffer.size());
    if (n == 0) return true;
    if (n > 0) text.append(buffer.data(), static_cast<std::size_t>(n));
  }
  return false;
}

}  // namespace

void limit_rest_of_child(int seconds) {
  const itimerval rest{{0, 0}, {seconds, 0}};
  setitimer(ITIMER_PROF, &rest, nullptr);
}

ChildResult in_child(const std::function<std::string()>& work,
                     const std::string& remarks, int limit_s) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    return {.text = std::string("has no pipe: ") + std::strerror(errno)};
  }
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    run_child(work, remarks, ends[1], limit_s);
  }
  close(ends[1]);
  if (child < 0) {
    close(ends[0]);
    return {.text = std::string("has no process: ") + std::strerror(errno)};
  }
  std::string answer;
  const bool ended = read_answer(ends[0], answer);
  close(ends[0]);
  if (!ended) kill(child, SIGKILL);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const char last = answer.empty() ? kRemarked : answer.back();
  if (!answer.empty()) answer.pop_back();
  if (ended && last == kReturned && WIFEXITED(status)) {
    return {.finished = true, .text = answer};
  }
  ChildResult result{.interrupted = is_interrupted() && !ended,
                     .remarks = answer};
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (result.interrupted) {
    result.text = "was interrupted";
  } else if (!ended) {
    result.text = "waits for ever";
  } else if (signal == SIGXCPU || signal == SIGPROF) {
    result.text = "did not end within " + std::to_string(limit_s) + " seconds";
  } else if (signal != 0) {
    result.text = std::string("crashed (") + strsignal(signal) + ")";
  } else {
    result.text = "ended too early";
  }
  return result;
}

}  // namespace shardbook::notebook
