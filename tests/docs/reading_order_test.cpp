// One reading order: 00, "Before chapter 01", then 01 to 15. A page names its
// neighbours in that order apart from what a reader needs to know.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "tests/docs/pages.h"

namespace shardbook::docs {
namespace {

namespace fs = std::filesystem;

using Names = std::vector<std::string>;

const fs::path kFolder = fs::path(SHARDBOOK_ROOT) / "chapters";

/// "00_single_device", "before", "01_data_parallel", ...
Names reading_order() {
  Names order = chapter_names();
  order.insert(order.begin() + 1, "before");
  return order;
}

Names all_matches(const std::string& text, const char* pattern) {
  const std::regex expression(pattern);
  Names names;
  for (std::sregex_iterator found(text.begin(), text.end(), expression), end;
       found != end; ++found) {
    names.push_back((*found)[1]);
  }
  return names;
}

Names pages_in(const std::string& text) {
  return all_matches(text, R"(\((?:\.\./)?([0-9a-z_]+)(?:/README)?\.md\))");
}

/// What follows `label` in a page's or a source's head.
std::string part_of_head(const std::string& text, const std::string& label) {
  static const std::regex kNext(R"(( Previous: | Next: | Letters: |)"
                                R"( The last chapter|\n\n))");
  const std::size_t begin = text.find(label);
  if (begin == std::string::npos) return "";
  const std::string rest = text.substr(begin + label.size(), 1000);
  std::smatch end;
  return std::regex_search(rest, end, kNext) ? end.prefix().str() : rest;
}

std::string page_of(const std::string& name) {
  return read_file(kFolder /
                   (name == "before" ? "before.md" : name + "/README.md"));
}

std::map<std::string, std::set<std::string>> needs_of_pages() {
  std::map<std::string, std::set<std::string>> needs;
  for (const std::string& name : reading_order()) {
    const Names pages = pages_in(part_of_head(page_of(name), "\nNeeded: "));
    needs[name] = {pages.begin(), pages.end()};
  }
  return needs;
}

TEST(ReadingOrder, EachPageNamesItsNeighbours) {
  const Names order = reading_order();
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::string page = page_of(order[i]);
    const auto neighbour = [&](const char* label) {
      Names pages = pages_in(part_of_head(page, label));
      pages.resize(std::min<std::size_t>(pages.size(), 1));  // others follow
      return pages;
    };
    EXPECT_EQ(neighbour(" Previous: "), i == 0 ? Names{} : Names{order[i - 1]})
        << order[i];
    EXPECT_EQ(neighbour(" Next: "),
              i + 1 == order.size() ? Names{} : Names{order[i + 1]})
        << order[i];
  }
}

TEST(ReadingOrder, WhatAPageNeedsComesBeforeIt) {
  const Names order = reading_order();
  const auto place = [&](const std::string& name) {
    return std::find(order.begin(), order.end(), name) - order.begin();
  };
  for (const auto& [name, needed] : needs_of_pages()) {
    EXPECT_EQ(needed.empty(), name == order.front()) << name;
    for (const std::string& other : needed) {
      EXPECT_LT(place(other), place(name)) << name << " needs " << other;
    }
  }
}

TEST(ReadingOrder, ProgramsAndLessonsNeedTheChaptersOfTheirPage) {
  const Names chapters = chapter_names();
  auto needs = needs_of_pages();
  for (std::size_t i = 0; i < chapters.size(); ++i) {
    std::set<std::string> needed = needs[chapters[i]];
    needed.erase("before");
    for (const char* file : {"program.cpp", "lesson.cpp"}) {
      const std::string source = read_file(kFolder / chapters[i] / file);
      const Names named = all_matches(part_of_head(source, "// Needed: "),
                                      R"(\b([0-9]{2}_[0-9a-z_]+))");
      EXPECT_EQ(std::set<std::string>(named.begin(), named.end()), needed)
          << chapters[i] << "/" << file;
      const std::string next = i + 1 == chapters.size()
                                   ? std::string(". The last chapter.")
                                   : ". Next: " + chapters[i + 1] + ".";
      EXPECT_NE(source.find(next), std::string::npos)
          << chapters[i] << "/" << file << next;
    }
  }
}

// "One evening" skips no page that one of its pages needs.
TEST(ReadingOrder, AnEveningIsInOrderAndComplete) {
  const Names order = reading_order();
  auto needs = needs_of_pages();
  const std::string line =
      part_of_head(read_file("README.md"), "\n- **One evening**");
  // The text of a link has a number, too
  const Names evening = all_matches(line.substr(0, line.find('\n')),
                                    R"(\[[^\]]*\]|(before(?=\.md)|[0-9]{2}))");
  std::set<std::string> read;
  std::size_t last = 0;
  for (const std::string& word : evening) {
    if (word.empty()) continue;
    const auto found =
        std::find_if(order.begin(), order.end(), [&](const std::string& name) {
          return name.rfind(word == "before" ? word : word + "_", 0) == 0;
        });
    ASSERT_NE(found, order.end()) << word;
    const auto at = static_cast<std::size_t>(found - order.begin());
    EXPECT_TRUE(read.empty() || at > last) << word;
    last = at;
    for (const std::string& other : needs[*found]) {
      EXPECT_TRUE(read.count(other)) << *found << " needs " << other;
    }
    read.insert(*found);
  }
  EXPECT_GE(read.size(), 4u);
}

// The planner's reasons end with the page that derives them
TEST(Pages, ThePlannerNamesSectionsThatExist) {
  const std::regex quoted("\"([0-9a-zA-Z_/]+\\.md)#([a-z0-9-]+)\"");
  int checked = 0;
  for (const char* file : {"explain.cpp", "step.cpp", "step_parts.cpp"}) {
    const std::string text = read_file(kFolder / "planner" / file);
    for (std::sregex_iterator at(text.begin(), text.end(), quoted), end;
         at != end; ++at) {
      const fs::path page = kFolder / (*at)[1].str();
      ASSERT_TRUE(fs::exists(page)) << file << ": " << page;
      const auto anchors = find_anchors(read_file(page));
      EXPECT_TRUE(std::count(anchors.begin(), anchors.end(), (*at)[2].str()))
          << file << ": " << at->str();
      ++checked;
    }
  }
  EXPECT_GT(checked, 10);
}

}  // namespace
}  // namespace shardbook::docs
