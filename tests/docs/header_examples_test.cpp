// An example in a header's comment is code that compiles: each stands in
// examples_of_*.cpp as well, below the header's name.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "tests/docs/pages.h"

namespace shardbook::docs {
namespace {

namespace fs = std::filesystem;

const fs::path kProject = SHARDBOOK_ROOT;

Lines lines_of(const fs::path& path) { return split_lines(read_file(path)); }

std::string without_remark(const std::string& line) {
  static const std::regex kRemark("(^|\\s)//.*");
  return std::regex_replace(line, kRemark, "");
}

// Leaves out white space and the remark at the end.
std::string bare(std::string line) {
  line = without_remark(line);
  line.erase(std::remove_if(line.begin(), line.end(),
                            [](unsigned char c) { return std::isspace(c); }),
             line.end());
  return line;
}

bool is_code(const Lines& paragraph) {
  // JSON also ends lines with brackets; tables have columns
  const std::string first = without_remark(paragraph[0]);
  if (first.rfind("{\"", 0) == 0) return false;
  static const std::regex kColumns("\\S {2,}\\S");
  if (std::regex_search(first, kColumns)) return false;
  return std::any_of(
      paragraph.begin(), paragraph.end(), [](const std::string& line) {
        const std::string code = bare(line);
        return !code.empty() && (code.back() == ';' || code.back() == '{');
      });
}

// Paragraphs of code in comments: behind an empty line of comment, and further
// in by two spaces.
std::vector<Lines> examples_in(const fs::path& header) {
  static const std::regex kInside("\\s*//[/!]? {3}(.*)"), kEmpty("\\s*//[/!]?");
  std::vector<Lines> examples;
  Lines paragraph;
  bool may_begin = false;
  for (const std::string& line : lines_of(header)) {
    std::smatch inside;
    if (std::regex_match(line, inside, kInside) &&
        (may_begin || !paragraph.empty())) {
      paragraph.push_back(inside[1]);
    } else {
      if (!paragraph.empty() && is_code(paragraph)) {
        examples.push_back(paragraph);
      }
      paragraph.clear();
    }
    may_begin = std::regex_match(line, kEmpty);
  }
  return examples;
}

// The text below "// --- core/tensor.h", by header.
std::map<std::string, std::string> compiled_examples() {
  std::map<std::string, std::string> text;
  for (const auto& entry :
       fs::directory_iterator(kProject / "tests" / "docs")) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("examples_of_", 0) != 0) continue;
    std::string header;
    for (const std::string& line : lines_of(entry.path())) {
      if (line.rfind("// --- ", 0) == 0) {
        header = line.substr(7);
        text[header];
      } else if (!header.empty()) {
        text[header] += bare(line);
      }
    }
  }
  return text;
}

TEST(HeaderExamples, AreCompiled) {
  std::map<std::string, std::string> compiled = compiled_examples();
  int num_examples = 0;
  for (const char* folder : {"core", "comm", "sim", "chapters"}) {
    for (const auto& entry :
         fs::recursive_directory_iterator(kProject / folder)) {
      if (entry.path().extension() != ".h") continue;
      const std::string header =
          fs::relative(entry.path(), kProject).generic_string();
      for (const auto& example : examples_in(entry.path())) {
        ++num_examples;
        std::string rest = compiled[header];
        for (const std::string& line : example) {
          // A line with dots stands for others
          if (line.find("...") != std::string::npos ||
              line.find("(each") != std::string::npos ||
              line.find("/* each") != std::string::npos) {
            continue;
          }
          const std::string code = bare(line);
          const std::size_t at = rest.find(code);
          if (at == std::string::npos) {
            ADD_FAILURE() << header << ": the example's line is not compiled "
                          << "in tests/docs/examples_of_*.cpp:\n  " << line;
            continue;
          }
          rest.erase(0, at + code.size());
        }
      }
    }
  }
  EXPECT_GT(num_examples, 45);
  for (const auto& [header, text] : compiled) {
    EXPECT_TRUE(fs::exists(kProject / header) &&
                !examples_in(kProject / header).empty())
        << header << " has no example";
  }
}

}  // namespace
}  // namespace shardbook::docs
