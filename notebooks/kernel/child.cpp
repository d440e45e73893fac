#include "notebooks/kernel/interruption.h"

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

namespace shardbook::notebook {
namespace {

/// Between what the work of a child says and the text that it returns.
constexpr char kReturned = '\0';

/// In a child: the end of the pipe to its parent.
int to_parent = -1;

/// Limits count the child's own CPU time: other programs may leave it little of
/// the processor.
[[noreturn]] void run_child(const std::function<std::string()>& work,
                            int limit_s) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto seconds = static_cast<rlim_t>(limit_s);
  const rlimit limit{seconds, seconds + 1};
  setrlimit(RLIMIT_CPU, &limit);
  tell_parent(kReturned + work());
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

void tell_parent(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t n = write(to_parent, text.data() + at, text.size() - at);
    if (n < 0 && errno != EINTR) return;
    if (n > 0) at += static_cast<std::size_t>(n);
  }
}

void limit_rest_of_child(int seconds) {
  const itimerval rest{{0, 0}, {seconds, 0}};
  setitimer(ITIMER_PROF, &rest, nullptr);
}

ChildResult in_child(const std::function<std::string()>& work, int limit_s) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    return {.text = std::string("has no pipe: ") + std::strerror(errno)};
  }
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    to_parent = ends[1];
    run_child(work, limit_s);
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
  const std::size_t end = answer.find(kReturned);
  ChildResult result{
      .finished = ended && end != std::string::npos && WIFEXITED(status),
      .interrupted = is_interrupted() && !ended,
      .said = answer.substr(0, end)};
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (result.finished) {
    result.text = answer.substr(end + 1);
  } else if (result.interrupted) {
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
