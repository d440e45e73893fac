#include "comm/signals.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "comm/processes.h"

namespace shardbook {
namespace {

std::atomic<int> first_signal{0};
std::atomic<bool> is_checked{false};

sigset_t watched_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  return signals;
}

void receive(sigset_t signals) {
  const bool is_first = is_first_process();
  for (;;) {
    int signal = 0;
    if (sigwait(&signals, &signal) != 0) continue;
    if (first_signal.exchange(signal) == 0 && is_checked) continue;
    constexpr char kText[] = "interrupted\n";
    if (is_first && write(STDERR_FILENO, kText, sizeof kText - 1) < 0) {
      // Nothing is left to do about it.
    }
    _exit(128 + signal);
  }
}

}  // namespace

void watch_signals() {
  static std::once_flag once;
  std::call_once(once, [] {
    const sigset_t signals = watched_signals();
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    // It lives as long as the process and touches nothing that is destroyed.
    std::thread(receive, signals).detach();
  });
}

void begin_checking_signals() { is_checked = true; }

int received_signal() { return first_signal; }

}  // namespace shardbook
