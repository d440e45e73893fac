#pragma once

// The program of judge_changes.py: many changed lessons, of which it runs one.
//
//   PROGRAM compute N [FILE]  what lesson N computes and sends on twenty tasks,
//                             up to the first that differs from FILE's
//   PROGRAM judge N           what the judge says of it
//   PROGRAM sizes N           what fails on the twenty tasks

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/common/lesson.h"
#include "comm/launch.h"

namespace shardbook::judge_changes {

constexpr int kTasks = 20;

/// Sizes that all lessons can divide; none is a task of the judge.
inline lesson::Task task_of(int k) {
  return {12 * (1 + k % 2),     4 * (1 + k % 3),    16 + 8 * (k % 4),
          12 * (1 + k / 2 % 2), k % 3 == 0 ? 6 : 4, 100 + std::uint64_t(k)};
}

inline int ranks_of(const lesson::Lesson& lesson, int k) {
  return k % 2 == 0 ? lesson.ranks.front() : lesson.ranks.back();
}

/// FNV-1a of the bytes.
inline std::string hash(const void* data, std::size_t size) {
  std::uint64_t h = 14695981039346656037u;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < size; ++i) h = (h ^ bytes[i]) * 1099511628211u;
  return std::to_string(h);
}
inline std::string hash(const std::string& text) {
  return hash(text.data(), text.size());
}

/// A call without its label, which only people read.
inline std::string call_text(CommRecord record) {
  record.label.clear();
  return record_text(record) + " " + std::to_string(record.root_or_peer) + "\n";
}

/// What one run computes and sends: a line for each kind of result.
inline std::string results_of(const lesson::Lesson& lesson, int ranks) {
  std::vector<lesson::Result> results(static_cast<std::size_t>(ranks));
  std::vector<std::vector<std::string>> calls(results.size());
  try {
    run_ranks(ranks, [&](ProcessGroup& world) {
      const auto r = static_cast<std::size_t>(world.rank());
      results[r] = lesson.train(world);
      for (const CommRecord& each : world.records()) {
        calls[r].push_back(call_text(each));
      }
    });
  } catch (const std::exception& error) {
    return std::string("ends ") + error.what() + "\n";
  }
  std::string weights, sent, in_order;
  double sum = 0;  // people see the size of a difference
  for (const NamedTensor& each : results[0].weights) {
    const std::vector<double> values = each.tensor.to_vector<double>();
    weights += each.name + hash(values.data(), values.size() * sizeof(double));
    for (const double value : values) sum += std::abs(value);
  }
  for (std::size_t r = 0; r < calls.size(); ++r) {
    for (const std::string& call : calls[r]) in_order += call;
    std::sort(calls[r].begin(), calls[r].end());
    for (const std::string& call : calls[r]) sent += call;
    sent += std::to_string(results[r].bytes);
  }
  char numbers[96];
  std::snprintf(numbers, sizeof numbers, " sum %.17g\nloss %.17g", sum,
                results[0].loss);
  return "weights " + hash(weights) + numbers + "\nsends " + hash(sent) +
         "\norder " + hash(in_order) + "\n";
}

inline void compute(const lesson::Lesson& lesson, const std::string& expected) {
  std::ifstream file(expected);
  bool is_same = true;
  for (int k = 0; k < kTasks && is_same; ++k) {
    lesson::set_task(task_of(k));
    std::istringstream lines(results_of(lesson, ranks_of(lesson, k)));
    for (std::string line, other; std::getline(lines, line);) {
      std::printf("%d %s\n", k, line.c_str());
      std::fflush(stdout);
      is_same &= expected.empty() || (std::getline(file, other) &&
                                      other == std::to_string(k) + " " + line);
    }
  }
}

using Lessons = std::vector<std::function<lesson::Lesson()>>;

inline int run(const Lessons& lessons, const std::vector<std::string>& words) {
  const lesson::Lesson lesson = lessons.at(std::stoul(words.at(2)))();
  if (words[1] == "compute") {
    compute(lesson, words.size() > 3 ? words[3] : "");
    return 0;
  }
  if (words[1] == "judge") return compare(lesson);
  int num_failed = 0;
  for (int k = 0; k < kTasks; ++k) {
    lesson::set_task(task_of(k));
    const lesson::Verdict verdict = judge(lesson, ranks_of(lesson, k));
    if (verdict.failed.empty()) continue;
    ++num_failed;
    std::printf("task %d:\n%s", k, verdict.text.c_str());
  }
  return num_failed;
}

}  // namespace shardbook::judge_changes
