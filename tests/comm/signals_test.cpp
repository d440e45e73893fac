// Signals are received by a thread of their own.

#include "comm/signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

namespace shardbook {
namespace {

// Runs `body` in a process of its own, which returns its exit status.
int status_of(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    signal(SIGHUP, SIG_DFL);  // these tests may run under nohup
    _exit(body());
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void wait_for_signal() {
  while (received_signal() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void wait_for_end() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

TEST(Signals, EndAProgramThatDoesNotLookAtThem) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    EXPECT_EQ(status_of([&] {
                watch_signals();
                kill(getpid(), signal);
                wait_for_end();
                return 0;
              }),
              128 + signal);
  }
}

TEST(Signals, AreLeftToAProgramThatLooksAtThem) {
  EXPECT_EQ(status_of([] {
              watch_signals();
              begin_checking_signals();
              kill(getpid(), SIGTERM);
              wait_for_signal();
              return received_signal();
            }),
            SIGTERM);
}

TEST(Signals, TheSecondOneInsists) {
  EXPECT_EQ(status_of([] {
              watch_signals();
              begin_checking_signals();
              kill(getpid(), SIGTERM);
              wait_for_signal();
              kill(getpid(), SIGINT);
              wait_for_end();
              return 0;
            }),
            128 + SIGINT);
}

// Running code may use its stack pointer for anything.
TEST(Signals, NoThreadRunsAHandler) {
  EXPECT_EQ(status_of([] {
              watch_signals();
              bool all_blocked = true;
              const auto look = [&] {
                sigset_t blocked;
                pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
                for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
                  struct sigaction action {};
                  sigaction(signal, nullptr, &action);
                  all_blocked = all_blocked && sigismember(&blocked, signal) &&
                                action.sa_handler == SIG_DFL;
                }
              };
              look();
              std::thread(look).join();
              return all_blocked ? 0 : 1;
            }),
            0);
}

TEST(Signals, HangupsStayIgnoredUnderNohup) {
  EXPECT_EQ(status_of([] {
              signal(SIGHUP, SIG_IGN);
              watch_signals();
              kill(getpid(), SIGHUP);
              kill(getpid(), SIGTERM);
              wait_for_end();
              return 0;
            }),
            128 + SIGTERM);
}

}  // namespace
}  // namespace shardbook
