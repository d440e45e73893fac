// Runs that a page quotes: found, repeated, compared.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
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

// What starts the program itself: "./shardbook run ddp -- --steps 5" and
// "ch02_ddp --steps 5" are build/chapters/02_ddp/ch02_ddp; "./shardbook toy ddp"
// is build/chapters/toy_02_ddp, and likewise for lessons; "./shardbook run
// cifar_moe" is build/chapters/cifar_moe; "./shardbook plan" is the planner's.
std::string program_line(const std::string& build, const std::string& command) {
  const std::string plan = "./shardbook plan";
  if (command.rfind(plan, 0) == 0) {
    return "'" + build + "/chapters/planner/shardbook_plan'" +
           command.substr(plan.size());
  }
  const std::string script = "./shardbook run ";
  for (const std::string kind : {"toy", "lesson"}) {
    const std::string begin = "./shardbook " + kind + " ";
    if (command.rfind(begin, 0) == 0) {
      return "'" + build + "'/chapters/" + kind + "_??_" +
             command.substr(begin.size());
    }
  }
  std::string name = command.substr(0, command.find(' '));
  std::string options = command.substr(name.size());
  if (command.rfind(script, 0) == 0) {
    const std::size_t end = command.find(" --", script.size());
    const std::string word = command.substr(script.size(), end - script.size());
    options = end == std::string::npos ? "" : command.substr(end + 3);
    if (std::filesystem::is_regular_file(build + "/chapters/" + word)) {
      return "'" + build + "/chapters/" + word + "'" + options;
    }
    for (const auto& entry :
         std::filesystem::directory_iterator(build + "/chapters")) {
      const std::string folder = entry.path().filename().string();
      if (folder.size() > 3 && folder.substr(3) == word) name = "ch" + folder;
    }
  }
  return "'" + build + "/chapters/" +
         (name.size() > 2 ? name.substr(2) : name) + "/" + name + "'" + options;
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
