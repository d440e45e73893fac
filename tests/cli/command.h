#pragma once

// Commands of the shell, and how they end.

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/errors.h"

namespace shardbook {

struct Outcome {
  int status = -1;
  std::string text;
};

/// What a command prints to standard output.
inline Outcome run_command(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer;
  for (std::size_t n = 0;
       (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    outcome.text.append(buffer.data(), n);
  }
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

/// Whether run_on_terminal can work: some containers have no pseudo-terminals.
inline bool has_terminals() {
  int terminal = -1, side = -1;
  if (openpty(&terminal, &side, nullptr, nullptr, nullptr) != 0) return false;
  close(side);
  close(terminal);
  return true;
}

inline void press_ctrl_c(int terminal) {
  EXPECT_EQ(write(terminal, "\003", 1), 1);
}

/// What a command of sh prints to a terminal. When `awaited` has been printed,
/// somebody reacts, once.
inline Outcome run_on_terminal(
    const std::string& command, int columns = 80,
    const std::string& awaited = "",
    const std::function<void(int terminal)>& react = press_ctrl_c) {
  Outcome outcome;
  int terminal = -1;
  winsize size{};
  size.ws_col = static_cast<unsigned short>(columns);
  const pid_t child = forkpty(&terminal, nullptr, nullptr, &size);
  if (child < 0) return outcome;
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  bool waits = !awaited.empty();
  std::array<char, 4096> buffer;
  // Where the program has ended, reading fails
  for (ssize_t n; (n = read(terminal, buffer.data(), buffer.size())) > 0;) {
    outcome.text.append(buffer.data(), static_cast<std::size_t>(n));
    if (waits && outcome.text.find(awaited) != std::string::npos) {
      waits = false;
      react(terminal);
    }
  }
  close(terminal);
  int status = 0;
  waitpid(child, &status, 0);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

/// It ended with this status, and said all these parts.
inline void expect_end(const Outcome& outcome, int status,
                       const std::vector<std::string>& parts = {}) {
  EXPECT_EQ(outcome.status, status) << outcome.text;
  expect_text(outcome.text, parts);
}

inline void expect_done(const Outcome& outcome,
                        const std::vector<std::string>& parts = {}) {
  expect_end(outcome, 0, parts);
}

}  // namespace shardbook
