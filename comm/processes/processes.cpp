// Starts ranks as processes and waits until they end.

#include "comm/processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <thread>
#include <utility>

#include "comm/gloo/gloo_group.h"
#include "comm/internal/rank_device.h"
#include "comm/processes/job.h"
#include "comm/processes/rendezvous.h"
#include "comm/processes/supervisor.h"
#include "comm/signals.h"
#include "core/check.h"
#include "core/own_program.h"

namespace shardbook {
namespace {

using internal::Child;
using internal::Descriptor;
using internal::Supervisor;

// Where the ranks meet. The supervisor serves them unless the options name a
// rendezvous.
struct Meeting {
  Descriptor listener;
  std::string rendezvous;
};

Meeting open_meeting(const LaunchOptions& options) {
  if (!options.rendezvous.empty()) return {{}, options.rendezvous};
  Meeting meeting;
  meeting.listener = internal::listen_on({"127.0.0.1", 0});
  const internal::HostPort address = internal::own_address(meeting.listener);
  // At once, and not after the ranks have tried for minutes
  std::string cause;
  if (!internal::try_connect(address, std::chrono::seconds(1), &cause)
           .valid()) {
    throw RunError(
        "the ranks of a host meet on its loopback network, which does not "
        "work: " +
        cause);
  }
  meeting.rendezvous = "tcp:" + internal::host_port_text(address);
  return meeting;
}

// A child does not outlive its parent.
void die_with(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
}

void end_all(const std::vector<Child>& children) {
  for (const Child& child : children) kill(child.pid, SIGKILL);
  for (const Child& child : children) waitpid(child.pid, nullptr, 0);
}

void check_world_size(int world_size) {
  SB_CHECK(world_size >= 1 && world_size <= 1024, "world size ", world_size,
           ": give 1 to 1024 processes");
}

// --- run_processes -----------------------------------------------------------

void check_single_thread() {
#ifndef __SANITIZE_THREAD__  // has a thread of its own
  const auto count_threads = [] {
    const auto threads = std::filesystem::directory_iterator("/proc/self/task");
    return std::distance(begin(threads), end(threads));
  };
  // The system lists a thread for a moment after it was joined: milliseconds
  // where it has no core to end on.
  using Clock = std::chrono::steady_clock;
  const auto give_up = Clock::now() + std::chrono::seconds(1);
  auto count = count_threads();
  while (count > 1 && Clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    count = count_threads();
  }
  SB_CHECK(count == 1, "run_processes: this process has ", count,
           " threads, and a fork copies only one; start the ranks before "
           "anything that makes threads");
#endif
}

void write_answer(int pipe, const std::string& text) {
  for (std::size_t sent = 0; sent < text.size();) {
    const ssize_t count = write(pipe, text.data() + sent, text.size() - sent);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    sent += static_cast<std::size_t>(count);
  }
}

// The work of a forked rank, whose answer is a letter and a text.
[[noreturn]] void run_child(
    const RankEnvironment& environment, int pipe,
    const std::function<std::string(ProcessGroup&)>& body,
    const LaunchOptions& options) {
  bool returned = false;
  std::string text;
  try {
    internal::run_as_rank(
        environment, [&](ProcessGroup& world) { text = body(world); }, options);
    returned = true;
  } catch (...) {
    text = internal::current_reason();
  }
  write_answer(pipe, returned ? "R" : "E");
  write_answer(pipe, text);
  std::fflush(nullptr);
  // Skip the parent process's destructors and exit handlers.
  _exit(returned ? 0 : 1);
}

}  // namespace

std::vector<std::string> run_processes(
    int world_size, const std::function<std::string(ProcessGroup&)>& body,
    const LaunchOptions& options) {
  internal::check_gloo();
  check_world_size(world_size);
  check_single_thread();
  Meeting meeting = open_meeting(options);
  std::fflush(nullptr);  // or every child prints it again

  const pid_t parent = getpid();
  std::vector<Child> children;
  for (int rank = 0; rank < world_size; ++rank) {
    int ends[2];
    SB_CHECK(pipe2(ends, O_CLOEXEC) == 0,
             "run_processes: ", std::strerror(errno));
    Child child;
    child.pipe = Descriptor(ends[0]);
    Descriptor writer(ends[1]);
    child.pid = fork();
    if (child.pid == 0) {
      die_with(parent);
      RankEnvironment environment;
      environment.rank = environment.local_rank = rank;
      environment.world_size = environment.local_world_size = world_size;
      environment.launcher = "shardbook";
      environment.job = internal::process_name(parent);
      environment.is_on_one_host = true;
      environment.rendezvous = meeting.rendezvous;
      environment.is_served_by_launcher = meeting.listener.valid();
      meeting.listener.close();
      children.clear();
      run_child(environment, writer.value(), body, options);
    }
    if (child.pid < 0) {
      const int cause = errno;
      end_all(children);
      SB_FAIL("run_processes: cannot start rank ", rank, ": ",
              std::strerror(cause));
    }
    children.push_back(std::move(child));
  }

  Supervisor supervisor(std::move(children), std::move(meeting.listener),
                        options.timeout);
  supervisor.run();

  // The coordinator has the first failure; a rank that never reached it has
  // answered with its own.
  std::string failure = supervisor.failure();
  std::vector<std::string> results;
  for (std::size_t rank = 0; rank < supervisor.children().size(); ++rank) {
    const Child& child = supervisor.children()[rank];
    const std::string start = fmt::format("rank {} failed: ", rank);
    if (child.status == 1 && child.answer.rfind('E', 0) == 0 &&
        failure == start + "its process exited with status 1") {
      failure = start + child.answer.substr(1);
    }
    results.push_back(child.answer.empty() ? "" : child.answer.substr(1));
  }
  if (!failure.empty()) throw Error(failure);
  return results;
}

// --- launch_processes --------------------------------------------------------

namespace {

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// A copy keeps our variables that do not describe ranks.
bool is_kept(const char* entry) {
  for (const char* start :
       {"SHARDBOOK_PYTHON", "SHARDBOOK_CUDA_", "SHARDBOOK_NCCL_",
        "SHARDBOOK_EMULATED_", "SHARDBOOK_STAND_IN_"}) {
    if (std::strncmp(entry, start, std::strlen(start)) == 0) return true;
  }
  return std::strncmp(entry, "SHARDBOOK_", 10) != 0;
}

// This environment, with the variables that make a copy rank `rank`.
std::vector<std::string> rank_variables(int rank, int world_size,
                                        const Meeting& meeting) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (is_kept(*entry)) variables.emplace_back(*entry);
  }
  const auto set = [&](const std::string& name, const std::string& value) {
    variables.push_back("SHARDBOOK_" + name + "=" + value);
  };
  set("RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(world_size));
  set("LOCAL_RANK", std::to_string(rank));
  set("LOCAL_WORLD_SIZE", std::to_string(world_size));
  set("JOB", internal::process_name(getpid()));
  set("RENDEZVOUS", meeting.rendezvous);
  set("SERVED_BY_LAUNCHER", meeting.listener.valid() ? "1" : "0");
  return variables;
}

// In the child, between fork and exec: only calls that are safe there.
[[noreturn]] void become_rank(int rank, pid_t parent, char* const* arguments,
                              char* const* variables) {
  // A group of its own: Ctrl-C reaches the supervisor, which passes it on once.
  setpgid(0, 0);
  die_with(parent);
  if (rank > 0) {
    const int nowhere = open("/dev/null", O_WRONLY);
    if (nowhere >= 0) dup2(nowhere, STDOUT_FILENO);
  }
  // A program that does not watch the signals is ended by them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  execve("/proc/self/exe", arguments, variables);
  _exit(127);
}

}  // namespace

std::optional<int> launch_processes(int world_size,
                                    const LaunchOptions& options) {
  if (options.backend == "gloo") internal::check_gloo();
  check_world_size(world_size);
  if (internal::launched_rank(world_size, options)) return {};
  Meeting meeting = open_meeting(options);
  std::fflush(nullptr);

  watch_signals();
  begin_checking_signals();
  std::vector<std::string> arguments = own_arguments();
  const std::vector<char*> argument_pointers = pointers(arguments);
  const pid_t parent = getpid();
  std::vector<Child> children;
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<std::string> variables =
        rank_variables(rank, world_size, meeting);
    const std::vector<char*> variable_pointers = pointers(variables);
    Child child;
    child.pid = fork();
    if (child.pid == 0) {
      become_rank(rank, parent, argument_pointers.data(),
                  variable_pointers.data());
    }
    if (child.pid < 0) break;  // the others notice that it never joins
    children.push_back(std::move(child));
  }
  const bool all_started = static_cast<int>(children.size()) == world_size;

  std::string failure;
  int status = kExitRunFailed;
  if (all_started) {
    Supervisor supervisor(std::move(children), std::move(meeting.listener),
                          options.timeout);
    supervisor.run();
    failure = supervisor.failure();
    status = supervisor.status();
  } else {
    failure = "cannot start another process: " + std::string(strerror(errno));
    end_all(children);
  }
  if (status == 0 && !failure.empty()) status = kExitRunFailed;
  // The ranks stopped because they were asked to: that is no error.
  if (status != 0 && received_signal() != 0) return 128 + received_signal();
  // A rank that refuses its options has printed the reason.
  if (!failure.empty() && status != kExitBadInput) {
    std::fprintf(stderr, "error: %s\n", failure.c_str());
  }
  return status;
}

}  // namespace shardbook
