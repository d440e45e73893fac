#pragma once

// The chapters' programs, as a user starts them.

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/temp_folder.h"

namespace shardbook {

struct Outcome {
  int status = -1;
  std::string text;
};

/// A folder for this run of the tests alone.
inline const TempFolder& folder() {
  static const TempFolder kFolder;
  return kFolder;
}

// A program below the build folder; standard output and error together.
// `variables` are added to its environment, as in "RANK=0 WORLD_SIZE=2".
inline Outcome run_program(const std::string& path, const std::string& options,
                           const std::string& variables = "") {
  const std::string command = "env " + variables +
                              " timeout 120 '" SHARDBOOK_BUILD "/" + path +
                              "' " + options + " 2>&1 </dev/null";
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

// The same on a terminal, which shows more: a line of progress.
inline Outcome run_on_terminal(const std::string& path,
                               const std::string& options) {
  const std::string command =
      "timeout 120 '" SHARDBOOK_BUILD "/" + path + "' " + options;
  Outcome outcome;
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child < 0) return outcome;
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  std::array<char, 4096> buffer;
  // Where the program has ended, reading fails
  for (ssize_t n; (n = read(terminal, buffer.data(), buffer.size())) > 0;) {
    outcome.text.append(buffer.data(), static_cast<std::size_t>(n));
  }
  close(terminal);
  int status = 0;
  waitpid(child, &status, 0);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

// "02_ddp" with options.
inline Outcome run(const std::string& chapter, const std::string& options,
                   const std::string& variables = "") {
  return run_program("chapters/" + chapter + "/ch" + chapter, options,
                     variables);
}

struct BadInput {
  const char* chapter;
  std::string options;
  const char* sentence;
};

inline void expect_refused(const BadInput& bad) {
  const Outcome outcome = run(bad.chapter, bad.options);
  EXPECT_EQ(outcome.status, 2) << bad.options << "\n" << outcome.text;
  EXPECT_NE(outcome.text.find(bad.sentence), std::string::npos)
      << bad.options << "\n"
      << outcome.text;
  EXPECT_LT(outcome.text.size(), 1500u) << "more than a sentence";
}

}  // namespace shardbook
