// A page lists the files that define a step, in reading order. The includes of
// these files lead from each to the next, and to no other.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/docs/pages.h"

namespace shardbook::docs {
namespace {

namespace fs = std::filesystem;

/// The text of a file, by its path from the root; empty when there is none.
using Reader = std::function<std::string(const std::string& path)>;
/// A pair of header and source, or one of them: the path without its ending.
using Unit = std::string;

/// Of a page: "**The step in six files** ... fewer than 1,500 lines", a table
/// whose links are the files, and a line "Not part of the step: ..." that links
/// to what else they include.
struct StepList {
  std::string count;  ///< "six"
  std::size_t max_lines = 0;
  std::vector<Unit> step, others;
};

StepList find_step_list(const std::string& page, const fs::path& folder) {
  static const std::regex kTitle(
      "\\*\\*The step in (\\w+) files\\*\\*.* fewer than ([0-9,]+) lines.*");
  StepList list;
  int begin = 0, end = 0, number = 0;
  for (const std::string& line : split_lines(page)) {
    ++number;
    std::smatch found;
    if (std::regex_match(line, found, kTitle)) {
      begin = number;
      list.count = found[1];
      const std::string lines = found[2];
      for (const char c : lines) {
        if (c != ',') {
          list.max_lines = 10 * list.max_lines + static_cast<unsigned>(c - '0');
        }
      }
    }
    if (line.rfind("Not part of the step: ", 0) == 0) end = number;
  }
  for (const Link& link : find_local_links(page)) {
    const Unit unit = (folder / link.target)
                          .lexically_normal()
                          .replace_extension()
                          .generic_string();
    if (begin < link.line && link.line < end) list.step.push_back(unit);
    if (link.line == end) list.others.push_back(unit);
  }
  return list;
}

/// The units that a unit includes, among those of these folders.
std::set<Unit> includes_of(const Unit& unit, const std::set<fs::path>& folders,
                           const Reader& read) {
  static const std::regex kInclude("#include \"(.*)\\.h\"");
  std::set<Unit> units;
  for (const char* ending : {".h", ".cpp"}) {
    for (const std::string& line : split_lines(read(unit + ending))) {
      std::smatch found;
      if (!std::regex_match(line, found, kInclude) || found[1] == unit)
        continue;
      if (folders.count(fs::path(found[1].str()).parent_path()) != 0) {
        units.insert(found[1]);
      }
    }
  }
  return units;
}

/// What is wrong with the list, a line each.
std::string problems(const StepList& list, const Reader& read) {
  static const Lines kNumbers = {"no",    "one",  "two", "three",
                                 "four",  "five", "six", "seven",
                                 "eight", "nine", "ten"};
  const auto has = [](const auto& units, const Unit& unit) {
    return std::find(units.begin(), units.end(), unit) != units.end();
  };
  std::string text;
  if (list.step.size() >= kNumbers.size() ||
      kNumbers[list.step.size()] != list.count) {
    text += "the title says " + list.count + " files, the table has " +
            std::to_string(list.step.size()) + "\n";
  }
  std::set<fs::path> folders;
  for (const Unit& unit : list.step) {
    folders.insert(fs::path(unit).parent_path());
  }
  std::size_t lines = 0;
  std::set<Unit> included;
  for (const Unit& unit : list.step) {
    if (unit != list.step[0] && included.count(unit) == 0) {
      text += "no file above it includes " + unit + "\n";
    }
    for (const char* ending : {".h", ".cpp"}) {
      lines += split_lines(read(unit + ending)).size();
    }
    included.merge(includes_of(unit, folders, read));
  }
  for (const Unit& unit : included) {
    if (!has(list.step, unit) && !has(list.others, unit)) {
      text += "included and not listed: " + unit + "\n";
    }
  }
  for (const Unit& unit : list.others) {
    if (included.count(unit) == 0) text += "no file includes " + unit + "\n";
    if (has(list.step, unit)) text += "listed twice: " + unit + "\n";
  }
  if (lines >= list.max_lines) {
    text += "the files have " + std::to_string(lines) + " lines\n";
  }
  return text;
}

const char kPage[] = R"(
Elsewhere [a link](away.cpp).

**The step in three files**, in order. They have fewer than 1,001 lines.

| | |
|---|---|
| 1 | [main.cpp](main.cpp) |
| 2 | [ddp.cpp](ddp.cpp) |
| 3 | [engine.cpp](../common/engine.cpp) |

Not part of the step: [bill.cpp](bill.cpp) predicts.
)";

TEST(StepFiles, AListFollowsTheIncludes) {
  std::map<std::string, std::string> files = {
      {"c/ddp/main.cpp", "#include <map>\n#include \"c/ddp/ddp.h\"\n"},
      {"c/ddp/ddp.h", "#include \"c/common/engine.h\"\n"},
      {"c/ddp/ddp.cpp",
       "#include \"c/ddp/ddp.h\"\n#include \"c/ddp/bill.h\"\n"
       "#include \"core/check.h\"\n"},
      {"c/common/engine.cpp", "x\n"}};
  const auto judged = [&](const std::string& page) {
    return problems(find_step_list(page, "c/ddp"),
                    [&](const std::string& path) {
                      return files.count(path) ? files[path] : "";
                    });
  };
  const std::string page = kPage;
  const auto without = [&](const std::string& part, const std::string& put) {
    std::string other = page;
    return other.replace(other.find(part), part.size(), put);
  };
  EXPECT_EQ(judged(page), "");
  EXPECT_EQ(judged(without("[ddp.cpp](ddp.cpp)", "")),
            "the title says three files, the table has 2\n"
            "no file above it includes c/common/engine\n"
            "included and not listed: c/ddp/ddp\n"
            "no file includes c/ddp/bill\n");
  EXPECT_EQ(judged(without("[bill.cpp](bill.cpp)", "nothing")),
            "included and not listed: c/ddp/bill\n");
  EXPECT_EQ(judged(without("1,001", "7")), "the files have 7 lines\n");
  EXPECT_NE(judged("A page without a list\n"), "");
  files["c/common/engine.cpp"] = "#include \"c/common/more.h\"\n";
  EXPECT_EQ(judged(page), "included and not listed: c/common/more\n");
}

// The includes of program.cpp lead to the listed files, which define the step.
TEST(StepFiles, PagesListTheStepInReadingOrder) {
  struct Step {
    std::string chapter, page;
    std::size_t num_files, max_lines;
  };
  for (const auto& [chapter, page, num_files, max_lines] :
       {Step{"chapters/02_ddp", "/details.md", 6, 1500},
        Step{"chapters/05_gpipe", "/details.md", 8, 2600}}) {
    const StepList list = find_step_list(read_file(chapter + page), chapter);
    ASSERT_EQ(list.step.size(), num_files) << chapter;
    EXPECT_EQ(list.step[0], chapter + "/program");
    EXPECT_LE(list.max_lines, max_lines) << chapter;
    EXPECT_EQ(problems(list, read_file), "") << chapter;
  }
}

}  // namespace
}  // namespace shardbook::docs
