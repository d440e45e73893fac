#pragma once

// Commands of the shell, and how they end.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
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
