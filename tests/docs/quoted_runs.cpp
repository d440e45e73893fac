// Runs that a page quotes: found, repeated, compared.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <regex>
#include <sstream>

#include "tests/cli/command.h"
#include "tests/docs/pages.h"
#include "tests/support/temp_folder.h"

namespace shardbook::docs {
namespace {

constexpr double kRelative = 2e-3;
// Training makes more of the rounding of another processor.
constexpr double kRelativeOfLosses = 1e-2;
// Differences from one device are rounding; their size means nothing.
constexpr double kTiny = 1e-3;

bool is_number(const std::string& word, double* value) {
  char* end = nullptr;
  *value = std::strtod(word.c_str(), &end);
  return end != word.c_str() && *end == '\0';
}

bool same_word(const std::string& a, const std::string& b, double relative) {
  double x = 0, y = 0;
  if (!is_number(a, &x) || !is_number(b, &y)) return a == b;
  const bool both_tiny = std::abs(x) < kTiny && std::abs(y) < kTiny;
  return both_tiny || std::abs(x - y) <= relative * std::abs(x);
}

std::vector<std::string> words_of(const std::string& line) {
  // Brackets and signs at the end of a number are words of their own.
  std::string spaced;
  for (char c : line) {
    if (c == '(' || c == ')' || c == ',' || c == ':') {
      spaced += {' ', c, ' '};
    } else {
      spaced += c;
    }
  }
  std::istringstream stream(spaced);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

bool same_line(const std::string& a, const std::string& b) {
  const auto x = words_of(a), y = words_of(b);
  const auto free = [](const std::vector<std::string>& words) {
    // Wall time, and peaks that nobody predicts
    return !words.empty() && (words[0] == "time" ||
                              (words[0] == "peak" && words.back() != "equal"));
  };
  if (free(x) && free(y) && x[0] == y[0]) return true;
  if (x.size() != y.size()) return false;
  const double relative =
      !x.empty() && x[0] == "loss" ? kRelativeOfLosses : kRelative;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!same_word(x[i], y[i], relative)) return false;
  }
  return true;
}

// What starts the program itself: "./shardbook run ddp -- --steps 5" is
// build/chapters/02_ddp/ch02_ddp; "./shardbook toy ddp" is
// build/chapters/toy_02_ddp, and likewise for lessons; "./shardbook run cifar_moe"
// is build/chapters/cifar_moe; "./shardbook plan" is the planner's.
std::string program_line(const std::string& build, const std::string& command) {
  static const std::regex kCommand(
      "./shardbook (plan|toy|lesson|run)( [^ -]\\S*)?(?: --(?= |$))?(.*)");
  std::smatch found;
  if (!std::regex_match(command, found, kCommand)) return command;
  const std::string kind = found[1], options = found[3];
  const std::string name = found.length(2) > 0 ? found.str(2).substr(1) : "";
  std::string program = "'" + build + "'/chapters/";
  if (kind == "plan") return program + "planner/shardbook_plan" + options;
  if (kind != "run") return program + kind + "_??_" + name + options;
  if (std::filesystem::is_regular_file(build + "/chapters/" + name)) {
    return program + name + options;
  }
  for (const std::string& chapter : chapter_names()) {
    if (chapter.substr(3) != name) continue;
    program += chapter + "/ch" + chapter;
  }
  return program + options;
}

}  // namespace

std::vector<QuotedRun> find_quoted_runs(const std::string& page) {
  std::vector<QuotedRun> runs;
  const Lines lines = split_lines(page);
  for (std::size_t i = 0; i + 1 < lines.size(); ++i) {
    if (lines[i] != "```console" || lines[i + 1].rfind("$ ", 0) != 0) continue;
    QuotedRun run;
    run.line = static_cast<int>(i) + 1;
    run.command = lines[++i].substr(2);
    while (run.command.ends_with(" \\") && ++i < lines.size()) {
      run.command.pop_back();
      run.command += lines[i].substr(lines[i].find_first_not_of(' '));
    }
    for (++i; i < lines.size() && lines[i] != "```"; ++i) {
      run.output.push_back(lines[i]);
    }
    runs.push_back(run);
  }
  return runs;
}

Lines run_program(const std::string& build, const std::string& command) {
  const std::size_t pipe = std::min(command.find(" | "), command.size());
  const std::string program = program_line(build, command.substr(0, pipe));
  // Pages quote other lines of the same run: it runs once
  static const TempFolder folder;
  static std::map<std::string, std::string> runs;
  const auto [run, is_new] =
      runs.emplace(program, folder / std::to_string(runs.size()));
  const std::string& kept = run->second;
  if (is_new) {
    run_command("LC_ALL=C.UTF-8 " + program + " >'" + kept + ".out' 2>'" +
                kept + ".err' </dev/null");
  }
  return split_lines(run_command("{ cat '" + kept + ".err' && cat '" + kept +
                                 ".out'" + command.substr(pipe) + "; } 2>&1")
                         .text);
}

std::string compare_output(const Lines& quoted, const Lines& printed) {
  auto line_of = [](const Lines& lines, std::size_t i) {
    return i < lines.size() ? lines[i] : std::string("(nothing)");
  };
  for (std::size_t i = 0; i < std::max(quoted.size(), printed.size()); ++i) {
    if (i >= quoted.size() || i >= printed.size() ||
        !same_line(quoted[i], printed[i])) {
      return "line " + std::to_string(i + 1) + " says\n  " +
             line_of(quoted, i) + "\nbut it prints\n  " + line_of(printed, i);
    }
  }
  return "";
}

}  // namespace shardbook::docs
