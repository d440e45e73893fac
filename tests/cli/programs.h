#pragma once

// The chapters' programs, as a user starts them.

#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/cli/command.h"
#include "tests/support/temp_folder.h"

namespace shardbook {

/// A folder for this run of the tests alone.
inline const TempFolder& folder() {
  static const TempFolder kFolder;
  return kFolder;
}

/// A program below the build folder; standard output and error together.
/// `variables` are added to its environment, as in "RANK=0 WORLD_SIZE=2".
inline Outcome run_program(const std::string& path, const std::string& options,
                           const std::string& variables = "") {
  return run_command("env " + variables + " timeout 120 '" SHARDBOOK_BUILD "/" +
                     path + "' " + options + " 2>&1 </dev/null");
}

/// The same on a terminal, which shows more: a line of progress.
inline Outcome run_on_terminal(const std::string& path,
                               const std::string& options) {
  return run_on_terminal("timeout 120 '" SHARDBOOK_BUILD "/" + path + "' " +
                         options);
}

// "02_ddp", or "cifar_moe" beside the chapters, with options.
inline Outcome run(const std::string& chapter, const std::string& options,
                   const std::string& variables = "") {
  const bool has_folder = std::isdigit(chapter[0]) != 0;
  return run_program(
      "chapters/" + (has_folder ? chapter + "/ch" : "") + chapter, options,
      variables);
}

/// What a program that ends well prints under --format json.
inline nlohmann::json json_of(const Outcome& outcome) {
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  return nlohmann::json::parse(outcome.text, nullptr,
                               /*allow_exceptions=*/false);
}

inline void expect_claims(const nlohmann::json& report) {
  ASSERT_TRUE(report.is_object());
  for (const char* claim : {"numbers", "bytes", "memory"}) {
    EXPECT_EQ(report["claims"][claim], "passed") << claim;
  }
}

/// A run that is sent a signal when `log` has so many lines; with a minus before
/// the signal's number, all its processes are.
inline Outcome run_until(const std::string& chapter, const std::string& options,
                         const std::string& log, int lines, int signal) {
  const std::string program = "\"" SHARDBOOK_BUILD "/chapters/" + chapter +
                              "/ch" + chapter + "\" " + options + " --log " +
                              log;
  // A job has a process group of its own, and does not ignore interrupts
  return run_command(
      "bash -c 'set -m; timeout --foreground -s KILL 120 " + program +
      " & until [ \"$(cat " + log + " 2>/dev/null | wc -l)\" -ge " +
      std::to_string(lines) +
      " ] || ! kill -0 $! 2>/dev/null; do sleep 0.01; done; kill -" +
      std::to_string(std::abs(signal)) + " -- " + (signal < 0 ? "-" : "") +
      "$!; wait $!' 2>&1 </dev/null");
}

/// How often `part` is in a text.
inline int count(const std::string& text, const std::string& part) {
  int times = 0;
  for (auto at = text.find(part); at != std::string::npos;
       at = text.find(part, at + part.size())) {
    ++times;
  }
  return times;
}

struct BadInput {
  const char* chapter;
  std::string options;
  const char* sentence;
};

/// It was refused by one sentence, which begins so.
inline void expect_sentence(const Outcome& outcome, const std::string& begin) {
  EXPECT_EQ(outcome.status, 2) << outcome.text;
  EXPECT_EQ(outcome.text.rfind(begin, 0), 0u) << outcome.text;
  EXPECT_LT(outcome.text.size(), 300u) << "more than a sentence";
}

inline void expect_refused(const BadInput& bad) {
  const Outcome outcome = run(bad.chapter, bad.options);
  SCOPED_TRACE(bad.options);
  expect_end(outcome, 2, {bad.sentence});
  EXPECT_LT(outcome.text.size(), 1500u) << "more than a sentence";
}

}  // namespace shardbook
