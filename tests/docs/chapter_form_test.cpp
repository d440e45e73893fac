// Each chapter has a page for the first reading and one for the details, in the
// same order and of the same parts.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <sstream>

#include "tests/docs/pages.h"

namespace shardbook::docs {
namespace {

namespace fs = std::filesystem;

const fs::path kChapters = fs::path(SHARDBOOK_ROOT) / "chapters";

const std::vector<std::string> kSections = {
    "The problem", "The idea",   "The lesson", "The bill", "When it pays",
    "Run it",      "In PyTorch", "Try it",     "Papers"};
constexpr int kMaxWords = 1800, kMaxWordsOfIdea = 500;

/// A page cut at its headings "## TITLE". The text before the first has the
/// title "".
struct Section {
  std::string title, text;
};

std::vector<Section> sections_of(const std::string& page) {
  std::vector<Section> sections = {{}};
  bool is_fence = false;
  for (const std::string& line : split_lines(page)) {
    if (line.rfind("```", 0) == 0) is_fence = !is_fence;
    if (!is_fence && line.rfind("## ", 0) == 0) {
      sections.push_back({line.substr(3), ""});
    } else {
      sections.back().text += line + "\n";
    }
  }
  return sections;
}

/// A page without its fences and folded parts.
std::string prose_of(const std::string& page) {
  std::string prose;
  bool is_fence = false, is_folded = false;
  for (const std::string& line : split_lines(page)) {
    const bool is_mark = line.rfind("```", 0) == 0;
    if (is_mark) is_fence = !is_fence;
    if (line.rfind("<details>", 0) == 0) is_folded = true;
    const bool is_switch = line.rfind("English | [", 0) == 0;  // of languages
    if (!is_mark && !is_fence && !is_folded && !is_switch) prose += line + "\n";
    if (line.find("</details>") != std::string::npos) is_folded = false;
  }
  return prose;
}

int count_words(const std::string& text) {
  std::istringstream words(text);
  int count = 0;
  for (std::string word; words >> word;) ++count;
  return count;
}

int count(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  return static_cast<int>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), expression),
                    std::sregex_iterator()));
}

int count_images(const std::string& text) {
  return count(text, R"(!\[[^\]]+\]\([^)]+\.svg\))");
}

int count_runs(const std::string& text) {
  return static_cast<int>(find_quoted_runs(text).size());
}

/// What a page lacks, one line each.
class Faults {
 public:
  explicit Faults(std::string page) : page_(std::move(page)) {}
  void expect(bool holds, const std::string& fault) {
    if (!holds) all_ += page_ + ": " + fault + "\n";
  }
  const std::string& all() const { return all_; }

 private:
  std::string page_, all_;
};

/// The worked problems "**1.** ..." with their folded solutions.
void check_problems(const std::string& text, Faults& faults) {
  static const std::regex kProblem(
      R"re(\n\*\*[0-9]\.\*\* [^\n]+\n\n<details><summary>Solution</summary>\n)re");
  int problems = 0;
  for (std::sregex_iterator found(text.begin(), text.end(), kProblem), end;
       found != end; ++found) {
    const std::size_t begin = static_cast<std::size_t>(found->position()) +
                              static_cast<std::size_t>(found->length());
    const std::string solution =
        text.substr(begin, text.find("</details>", begin) - begin);
    faults.expect(count_runs(solution) > 0,
                  "a solution without a run that shows it");
    ++problems;
  }
  faults.expect(problems >= 3, "three problems with folded solutions");
}

void check_try_it(const std::string& text, const fs::path& folder,
                  Faults& faults) {
  faults.expect(count(text, "`./shardbook exercise [a-z0-9_]+`") > 0,
                "no exercise");
  std::istringstream mistakes(read_file(folder / "mistakes.txt"));
  for (std::string line; std::getline(mistakes, line);) {
    std::smatch name;
    if (!std::regex_match(line, name, std::regex(R"(== ([a-z0-9-]+).*)"))) {
      continue;
    }
    faults.expect(text.find("`" + name[1].str() + "`") != std::string::npos ||
                      text.find(" " + name[1].str() + "`") != std::string::npos,
                  "the mistake " + name[1].str() + " is not named");
  }
  if (fs::exists(folder / "toy.cpp")) {
    faults.expect(text.find("`./shardbook toy ") != std::string::npos,
                  "no toy");
  }
  check_problems(text, faults);
}

void check_bill(const std::string& text, Faults& faults) {
  std::size_t at = 0;
  for (const char* part : {"\n**Memory.** ", "\n**Bytes.** ", "\n**Time.** "}) {
    const std::size_t found = text.find(part, at);
    faults.expect(found != std::string::npos,
                  std::string("the bill has no paragraph ") + (part + 1));
    if (found == std::string::npos) return;
    at = text.find("\n**", found + 3);
    faults.expect(
        text.substr(found, at - found).find("$$") != std::string::npos,
        std::string("no typeset formula in ") + (part + 1));
    if (at == std::string::npos) at = text.size();
  }
  faults.expect(count_runs(text) > 0, "no run shows the bill");
}

std::string faults_of_first_page(const std::string& page,
                                 const fs::path& folder) {
  Faults faults(folder.filename().string() + "/README.md");
  const std::vector<Section> all = sections_of(page);
  std::vector<std::string> titles;
  for (std::size_t i = 1; i < all.size(); ++i) titles.push_back(all[i].title);
  // "In PyTorch and DeepSpeed"
  for (std::string& title : titles) {
    if (title.rfind("In PyTorch", 0) == 0) title = "In PyTorch";
  }
  faults.expect(titles == kSections, "other sections than those of chapter 02");
  if (titles != kSections) return faults.all();
  const auto text = [&](int section) { return all[section].text; };

  for (const char* link :
       {"(../before.md", "(../symbols.md)", "(details.md)"}) {
    faults.expect(text(0).find(link) != std::string::npos,
                  std::string("the head has no link ") + link);
  }
  faults.expect(count(page, "\n### ") == 0, "a heading of the third depth");
  const int words = count_words(prose_of(page));
  faults.expect(words <= kMaxWords, std::to_string(words) + " words");
  faults.expect(
      count(text(1),
            "[0-9] (B|KB|MB|GB|TB|KiB|MiB|GiB|µs|ms|s|%|tokens|bytes|times)") >
          0,
      "the problem has no number with a unit");
  const int idea = count_words(prose_of(text(2)));
  faults.expect(idea <= kMaxWordsOfIdea,
                "the idea has " + std::to_string(idea) + " words");
  const int images = count_images(text(2));
  faults.expect(images >= 1 && images <= 3, "the idea wants 1 to 3 pictures");
  faults.expect(count(text(3), "\n```cpp lesson.cpp#") > 0,
                "the lesson is not quoted");
  faults.expect(count(text(3), "\n\\$ ./shardbook lesson ") > 0,
                "the lesson does not run");
  faults.expect(count(text(3), R"(\]\(details\.md#)") >= 3,
                "what production adds, with links to details.md");
  check_bill(text(4), faults);
  faults.expect(count(text(5), R"(\\[lg]e )") > 0 &&
                    text(5).find("$$") != std::string::npos,
                "the threshold is no inequality");
  faults.expect(count_images(text(5)) > 0 && count_runs(text(5)) > 0,
                "the threshold wants a curve and a run");
  faults.expect(count_runs(text(6)) > 0, "Run it runs nothing");
  faults.expect(
      count(text(7), "\n```python\n") == 1 &&
          count(text(7), R"(\n\| [^\n|]+ \| here \|\n)") > 0,
      "In PyTorch: one fence of Python, and a table | theirs | here |");
  check_try_it(text(8), folder, faults);
  const int papers = count(text(9), "\n- ");
  faults.expect(
      papers > 0 && count(text(9), R"(\b(19|20)[0-9][0-9]\b)") >= papers,
      "a paper without its year");
  return faults.all();
}

std::string faults_of_details(const std::string& page, const fs::path& folder) {
  Faults faults(folder.filename().string() + "/details.md");
  const std::vector<Section> all = sections_of(page);
  faults.expect(all[0].text.find("(README.md)") != std::string::npos &&
                    all[0].text.find("(../symbols.md)") != std::string::npos,
                "the head links neither README.md nor the symbols");
  std::size_t next = 1;
  for (const char* title : {"A walk through the code", "The bill, line by line",
                            "What goes wrong"}) {
    while (next < all.size() && all[next].title != title) ++next;
    faults.expect(next < all.size(),
                  std::string("no section ") + title + ", or out of order");
    if (next == all.size()) return faults.all();
  }
  const std::string& wrong = all[next].text;
  faults.expect(count(wrong, "\n### ") >= 2, "fewer than two questions");
  std::size_t at = wrong.find("\n### ");
  while (at != std::string::npos) {
    const std::size_t end = wrong.find("\n### ", at + 1);
    const std::string question = wrong.substr(at, end - at);
    faults.expect(
        question.find("./shardbook ") != std::string::npos,
        "no command shows" + question.substr(4, question.find('\n', 1) - 4));
    at = end;
  }
  faults.expect(!find_excerpts(page).empty() && count_runs(page) > 0,
                "no quoted code, or no quoted run");
  return faults.all();
}

TEST(ChapterForm, FaultsAreNamed) {
  const fs::path folder = kChapters / "02_ddp";
  const std::string page = read_file(folder / "README.md");
  EXPECT_EQ(faults_of_first_page(page, folder), "");
  const auto without = [&](const std::string& words) {
    std::string text = page;
    const std::size_t at = text.find(words);
    EXPECT_NE(at, std::string::npos) << words;
    return faults_of_first_page(text.replace(at, words.size(), ""), folder);
  };
  EXPECT_NE(without("## When it pays\n"), "");
  EXPECT_NE(without("](details.md)"), "");
  EXPECT_NE(without("**Bytes.** "), "");
  EXPECT_NE(without("`forgot-to-divide`"), "");
  EXPECT_NE(without("<details><summary>Solution</summary>\n"), "");
  EXPECT_NE(without("![Exposed"), "");
}

TEST(ChapterForm, EachChapterHasIt) {
  for (const std::string& name : chapter_names()) {
    const fs::path folder = kChapters / name;
    EXPECT_EQ(faults_of_first_page(read_file(folder / "README.md"), folder) +
                  faults_of_details(read_file(folder / "details.md"), folder),
              "");
  }
}

// Each question of a chapter's details is on the page of all questions.
TEST(ChapterForm, TheCommonPageHasEveryQuestion) {
  const std::string common = read_file(kChapters / "what_goes_wrong.md");
  for (const std::string& name : chapter_names()) {
    const std::vector<Section> all =
        sections_of(read_file(kChapters / name / "details.md"));
    for (const Section& section : all) {
      if (section.title != "What goes wrong") continue;
      std::string questions;
      for (const std::string& line : split_lines(section.text)) {
        if (line.rfind("### ", 0) == 0) questions += line + "\n";
      }
      for (const std::string& anchor : find_anchors(questions)) {
        EXPECT_NE(common.find("(" + name + "/details.md#" + anchor + ")"),
                  std::string::npos)
            << name << "/details.md#" << anchor;
      }
    }
  }
}

// Which one? is a first reading as well: the map, the rules, and cases that are
// worked on paper and by the planner.
TEST(ChapterForm, WhichOneHasThreeWorkedCases) {
  const std::string page = read_file(kChapters / "README.md");
  EXPECT_LE(count_words(prose_of(page)), kMaxWords);
  int cases = 0;
  for (const Section& section : sections_of(page)) {
    if (section.title == "The map") {
      EXPECT_EQ(count_images(section.text), 1);
    }
    if (section.title == "The rules") {
      EXPECT_GE(count(section.text, "#when-it-pays\\)"), 5);
    }
    if (section.title.rfind("Case ", 0) != 0) continue;
    ++cases;
    for (const char* part : {"**Memory.**", "**Threshold", "**Decision.**"}) {
      EXPECT_NE(section.text.find(part), std::string::npos)
          << section.title << ": " << part;
    }
    EXPECT_GE(count(section.text, "\\$ ./shardbook plan "), 1) << section.title;
  }
  EXPECT_EQ(cases, 3);
  for (const char* model : {"8b", "70b", "405b"}) {
    EXPECT_NE(page.find(std::string("plan --model llama-3.1-") + model),
              std::string::npos)
        << model;
  }
  EXPECT_GE(count_runs(read_file(kChapters / "details.md")), 12);
}

// The tokens of a micro-batch are a product, b·s. "bs" reads as "batch size".
TEST(ChapterForm, TokensReadAsAProduct) {
  for (const auto& entry : fs::recursive_directory_iterator(kChapters)) {
    if (entry.path().extension() != ".md") continue;
    EXPECT_EQ(
        count(prose_of(read_file(entry.path())), R"([${(][0-9]*[bB]s[ $}(/])"),
        0)
        << entry.path();
  }
}

// Pages that were split quote and run no less than before.
TEST(ChapterForm, CommandsDoNotGetFewer) {
  struct Least {
    int commands, runs;
  };
  const std::map<std::string, Least> least = {
      {"00_single_device", {10, 2}},
      {"01_data_parallel", {7, 2}},
      {"02_ddp", {42, 29}},
      {"03_zero_fsdp", {17, 8}},
      {"04_model_parallel", {10, 3}},
      {"05_gpipe", {16, 7}},
      {"06_1f1b", {22, 17}},
      {"07_tensor_parallel", {10, 4}},
      {"08_tensor_parallel_2d", {9, 4}},
      {"09_tensor_parallel_2p5d", {9, 4}},
      {"10_tensor_parallel_3d", {10, 5}},
      {"11_dtensor", {8, 3}},
      {"12_sequence_parallel", {11, 5}},
      {"13_moe", {12, 5}},
      {"14_hybrid_3d", {18, 9}},
      {"15_engine", {13, 3}}};
  for (const auto& [name, at_least] : least) {
    std::string both;  // with PipeDream's page
    for (const auto& entry : fs::directory_iterator(kChapters / name)) {
      if (entry.path().extension() != ".md") continue;
      if (!is_translation(entry.path())) both += read_file(entry.path());
    }
    EXPECT_GE(count(both, "\\./shardbook "), at_least.commands) << name;
    EXPECT_GE(count_runs(both), at_least.runs) << name;
  }
}

}  // namespace
}  // namespace shardbook::docs
