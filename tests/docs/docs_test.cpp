// The pages tell the truth: what they quote is in the sources, what they link
// to exists, and the lists of the build name everything that is there.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/docs/pages.h"
#include "tests/support/temp_folder.h"

namespace shardbook::docs {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = SHARDBOOK_ROOT;

std::vector<fs::path> chapter_folders() {
  std::vector<fs::path> folders;
  for (const std::string& name : chapter_names()) {
    folders.push_back(kRoot / "chapters" / name);
  }
  return folders;
}

std::vector<fs::path> chapter_pages() {
  std::vector<fs::path> pages;
  for (const char* name :
       {"README.md", "details.md", "before.md", "comparing.md"}) {
    pages.push_back(kRoot / "chapters" / name);
  }
  for (const fs::path& folder : chapter_folders()) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".md" && !is_translation(entry.path())) {
        pages.push_back(entry.path());
      }
    }
  }
  return pages;
}

std::vector<fs::path> pages_that_quote_runs() {
  std::vector<fs::path> pages = chapter_pages();
  // The one page in Chinese alone
  pages.push_back(kRoot / "chapters" / "tutorials.zh-CN.md");
  return pages;
}

std::vector<fs::path> all_pages() {
  std::vector<fs::path> pages = pages_that_quote_runs();
  for (const char* name :
       {"README.md", "chapters/running.md", "chapters/worlds.md",
        "chapters/what_goes_wrong.md", "chapters/symbols.md",
        "chapters/from_pytorch.md", "chapters/teaching.md", "bench/README.md",
        "bench/details.md", "bench/validation.md",
        "chapters/your_own/README.md", "comm/algorithms/README.md",
        "notebooks/README.md"}) {
    if (fs::exists(kRoot / name)) pages.push_back(kRoot / name);
  }
  return pages;
}

// "chapters/02_ddp/README.md:31", as compilers write places.
std::string place(const fs::path& page, int line) {
  return fs::relative(page, kRoot).string() + ":" + std::to_string(line);
}

// A quoted file lies beside its page, or is named from the root.
fs::path find_quoted(const fs::path& page, const std::string& file) {
  const fs::path beside = page.parent_path() / file;
  return fs::exists(beside) ? beside : kRoot / file;
}

// ---- The reader of pages, on pages made up here.

const char kSource[] = R"(
void run() {
  // 1. Fill the pipeline: one micro-batch
  // after the other.
  for (int i = 0; i < p; ++i) {
    push(i);
  }

  int rest = m - p;
  // Drain the pipeline.
  while (rest-- > 0) pop();
}

void other() { stop(); }
)";

TEST(PageExcerpt, NamesFileStepAndCode) {
  const auto found = find_excerpts(
      "# Title\n```sh\nls a.cpp#b\n```\n```cpp pipe.cpp#Drain it\nx();\n```\n"
      "```cpp\nunquoted();\n```\n");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].line, 5);
  EXPECT_EQ(found[0].file, "pipe.cpp");
  EXPECT_EQ(found[0].step, "Drain it");
  EXPECT_EQ(found[0].code, Lines{"x();"});
}

TEST(PageExcerpt, EqualsItsStepOrDiffersWhereItSays) {
  const std::string fill = "Fill the pipeline", drain = "Drain the pipeline";
  const std::string loop = "for (int i = 0; i < p; ++i) {\n  push(i);\n}\n";
  struct Case {
    std::string step, code, difference;
  };
  const Case cases[] = {
      // Whatever the indentation
      {drain, "while (rest-- > 0) pop();\n", ""},
      {drain, "      while (rest-- > 0) pop();\n\n", ""},
      {drain, "// Drain the pipeline.\nwhile (rest-- > 0) pop();", ""},
      // It may stop at a blank line or a comment
      {fill, loop, ""},
      {fill, loop + "\nint rest = m - p;\n", ""},
      {drain, "while (rest--) pop();",
       "the page says \"while (rest--) pop();\", the source says "
       "\"while (rest-- > 0) pop();\""},
      {fill, "for (int i = 0; i < p; ++i) {",
       "the excerpt stops before \"  push(i);\""},
      {drain, "while (rest-- > 0) pop();\nend();",
       "the step has no line \"end();\""},
      {drain, "\n", "the excerpt is empty"},
      {"Drain the pipe", "x",
       "0 comments have the title \"Drain the pipe\"; there has to be one"}};
  for (const auto& [step, code, difference] : cases) {
    EXPECT_EQ(
        compare_excerpt({1, "pipe.cpp", step, split_lines(code)}, kSource),
        difference);
  }
  EXPECT_EQ(compare_excerpt({1, "pipe.cpp", "Go", {"x"}},
                            "// Go.\nx\n\n// 2. Go\nx\n"),
            "2 comments have the title \"Go\"; there has to be one");
}

TEST(PageExcerpt, TheStrategyIsBetweenItsMarks) {
  const auto compare = [](const std::string& code) {
    return compare_excerpt(
        {1, "pipe.cpp", "the strategy", split_lines(code)},
        "// --- the strategy\n// Sum\nint s = a + b;\n\nint t = s;\n"
        "// --- end\nint main() {}\n");
  };
  EXPECT_EQ(compare("// Sum\nint s = a + b;\n\nint t = s;\n"), "");
  EXPECT_EQ(compare("// Sum\nint s = a + b;\n"), "");
  EXPECT_NE(compare("int s = a + b;"), "");
  EXPECT_NE(compare("int main() {}"), "");
}

TEST(PageLinks, AreFoundInProseOnly) {
  const auto found = find_local_links(
      "[a](x.md#top) ![b](<y.svg>) `[c](code.md)` [d](https://e.org)\n"
      "```\n[f](fence.md)\n```\n[g]: ../z.md\n<img src=\"i.png\"/> [h](#here)\n"
      "<a href=\"mailto:a@b.c\">\n");
  std::vector<std::string> targets;
  for (const Link& link : found) targets.push_back(link.target);
  EXPECT_EQ(targets, (std::vector<std::string>{"x.md#top", "y.svg", "../z.md",
                                               "#here", "i.png"}));
}

TEST(PageLinks, HeadingsHaveAnchors) {
  EXPECT_EQ(find_anchors(
                "# The bill\n```\n# no heading\n```\n## ZeRO-1, `-2` & 3 ##\n"),
            (std::vector<std::string>{"the-bill", "zero-1--2--3"}));
}

// ---- The book as it is.

TEST(Pages, EveryExcerptEqualsItsSource) {
  int checked = 0;
  std::vector<fs::path> pages = chapter_pages();
  pages.push_back(kRoot / "chapters/your_own/README.md");
  for (const fs::path& page : pages) {
    const auto excerpts = find_excerpts(read_file(page));
    // Which one? leaves the code to its details
    EXPECT_NE(excerpts.empty(), page != kRoot / "chapters" / "README.md")
        << place(page, 1) << ": the walk through the code quotes nothing";
    for (const Excerpt& excerpt : excerpts) {
      const fs::path source = find_quoted(page, excerpt.file);
      ASSERT_TRUE(fs::exists(source))
          << place(page, excerpt.line) << ": there is no " << excerpt.file;
      EXPECT_EQ(compare_excerpt(excerpt, read_file(source)), "")
          << place(page, excerpt.line) << ": " << excerpt.file << "#"
          << excerpt.step;
      ++checked;
    }
  }
  EXPECT_GT(checked, 0) << "the pages quote no source";
}

TEST(Pages, EveryLocalLinkLeadsSomewhere) {
  int checked = 0;
  for (const fs::path& page : all_pages()) {
    for (const Link& link : find_local_links(read_file(page))) {
      const std::size_t hash =
          std::min(link.target.find('#'), link.target.size());
      const fs::path target =
          hash == 0 ? page : page.parent_path() / link.target.substr(0, hash);
      if (is_translation(target)) continue;
      EXPECT_TRUE(fs::exists(target))
          << place(page, link.line) << ": " << link.target << " is not there";
      ++checked;
      if (hash == link.target.size() || target.extension() != ".md") continue;
      const auto anchors = find_anchors(read_file(target));
      EXPECT_TRUE(std::count(anchors.begin(), anchors.end(),
                             link.target.substr(hash + 1)))
          << place(page, link.line) << ": no heading has the anchor "
          << link.target.substr(hash);
    }
  }
  EXPECT_GT(checked, 0) << "the pages link to nothing";
}

// Each page has its notebook as the first line of "Run it", and the notebook
// leads back to the page.
TEST(Notebooks, ChaptersAndTheirNotebooksLinkEachOther) {
  for (const fs::path& folder : chapter_folders()) {
    const std::string name = folder.filename().string();
    const std::string file = "../../notebooks/" + name + ".ipynb";
    const std::string page = read_file(folder / "README.md");
    EXPECT_NE(page.find("\n## Run it\n\nThe [notebook](" + file + ") "),
              std::string::npos)
        << name << ": \"Run it\" does not begin with a link to the notebook";
    EXPECT_NE(read_file(folder / file).find("(../chapters/" + name + "/"),
              std::string::npos)
        << name << ": there is no notebook that links to the page";
  }
}

TEST(Notebooks, EveryLocalLinkLeadsSomewhere) {
  static const std::regex kLink(R"(\]\((\.\./[^)#]*|[a-z0-9_]+\.[a-z]+))");
  int checked = 0;
  for (const auto& entry : fs::directory_iterator(kRoot / "notebooks")) {
    if (entry.path().extension() != ".ipynb") continue;
    const std::string text = read_file(entry.path());
    for (std::sregex_iterator link(text.begin(), text.end(), kLink), end;
         link != end; ++link) {
      const std::string target = (*link)[1];
      EXPECT_TRUE(fs::exists(kRoot / "notebooks" / target))
          << entry.path().filename() << ": " << target << " is not there";
      ++checked;
    }
  }
  EXPECT_GT(checked, 0) << "the notebooks link to nothing";
}

TEST(PageRuns, ABackslashContinuesTheCommand) {
  const auto runs = find_quoted_runs(
      "```console\n$ ./shardbook run ddp -- --steps 5 \\\n    --batch 8\nloss\n"
      "```\n```console\n$ ./shardbook toy ddp\n```\n");
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].command, "./shardbook run ddp -- --steps 5 --batch 8");
  EXPECT_EQ(runs[0].output, Lines{"loss"});
  EXPECT_EQ(runs[1].output, Lines{});
}

TEST(PageRuns, NumbersMayDifferALittleAndTimesMuch) {
  const Lines quoted = {"loss 5.5451 -> 5.54", "time 3.1 ms per step"};
  EXPECT_EQ(compare_output(quoted, {"loss 5.5452 -> 5.54", "time 9 ms"}), "");
  EXPECT_NE(compare_output(quoted, {"loss 5.46 -> 5.54", "time 9 ms"}), "");
  EXPECT_NE(compare_output(quoted, {"lost 5.5451 -> 5.54", "time 9 ms"}), "");
  EXPECT_NE(compare_output(quoted, {"loss 5.5451 -> 5.54"}), "");
}

TEST(Pages, EveryQuotedRunPrintsWhatThePageSays) {
  int num_runs = 0;
  for (const fs::path& page : pages_that_quote_runs()) {
    const std::vector<QuotedRun> runs = find_quoted_runs(read_file(page));
    EXPECT_FALSE(runs.empty()) << page << " quotes no run";
    for (const QuotedRun& run : runs) {
      ++num_runs;
      const Lines output = run_program(SHARDBOOK_BUILD, run.command);
      EXPECT_EQ(compare_output(run.output, output), "")
          << place(page, run.line) << ": " << run.command;
    }
  }
  EXPECT_GT(num_runs, 0);
}

// A reader types what a page shows, and sees a model learn. The one loss that
// may rise is that of a run without a stash.
TEST(Pages, QuotedRunsCanBeTypedAndLearn) {
  static const std::regex kLoss(R"(loss +([0-9.]+) -> ([0-9.]+)\b.*)");
  int num_losses = 0;
  for (const fs::path& page : pages_that_quote_runs()) {
    for (const QuotedRun& run : find_quoted_runs(read_file(page))) {
      EXPECT_EQ(run.command.rfind("./shardbook ", 0), 0u)
          << place(page, run.line) << ": " << run.command;
      const bool may_rise = run.command.find("--no-stash") != std::string::npos;
      for (const std::string& line : run.output) {
        std::smatch found;
        if (!std::regex_match(line, found, kLoss)) continue;
        ++num_losses;
        EXPECT_EQ(std::stod(found[2]) < std::stod(found[1]), !may_rise)
            << place(page, run.line) << ": " << line;
      }
    }
  }
  EXPECT_GT(num_losses, 20);
}

// Programs are not in the reader's PATH.
TEST(Pages, CommandsBeginWithTheScript) {
  static const std::regex kProgram("(^|`)(ch[0-9][0-9]_[a-z0-9_]+ -[^`]*)");
  for (const fs::path& page : all_pages()) {
    int number = 0;
    for (const std::string& line : split_lines(read_file(page))) {
      ++number;
      std::smatch found;
      EXPECT_FALSE(std::regex_search(line, found, kProgram))
          << place(page, number) << ": " << found[2] << ": ./shardbook run";
    }
  }
}

// Two suites may run on one machine.
TEST(Tests, WriteToFoldersOfTheirOwn) {
  static const std::regex kFixed(
      R"re("/(tmp|var/tmp|dev/shm)/|ofstream(?: \w+)?\("[^"]|)re"
      R"re(fopen\("[^"]+", *"[wa])re");
  int num_files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(kRoot / "tests")) {
    const std::string end = entry.path().extension().string();
    if (end != ".cpp" && end != ".h") continue;
    ++num_files;
    int number = 0;
    for (const std::string& line : split_lines(read_file(entry.path()))) {
      ++number;
      bool may_be_fixed = false;
      for (const char* part : {"tmp/", "shm/", "ofstream", "fopen"}) {
        may_be_fixed |= line.find(part) != std::string::npos;
      }
      EXPECT_FALSE(may_be_fixed && std::regex_search(line, kFixed))
          << place(entry.path(), number) << ": " << line;
    }
  }
  EXPECT_GT(num_files, 200);
}

// Pages and comments show scripts as commands, without their interpreter.
TEST(Scripts, CanBeRunByTheirPath) {
  int num_scripts = 0;
  for (const char* room :
       {"bench", "chapters", "core", "notebooks", "sim", "tests"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / room)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".py" && extension != ".sh") continue;
      if (read_file(entry.path()).rfind("#!", 0) != 0) continue;
      ++num_scripts;
      const fs::perms permissions = entry.status().permissions();
      EXPECT_TRUE((permissions & fs::perms::owner_exec) != fs::perms::none)
          << entry.path() << ": chmod +x";
    }
  }
  EXPECT_GT(num_scripts, 5);
}

TEST(Chapters, EveryProgramHasARowInTheDefaultRun) {
  std::set<std::string> rows;
  for (const auto& line : split_lines(read_file(kRoot / "chapters/rows.txt"))) {
    if (!line.empty() && line[0] != '#') {
      rows.insert(line.substr(0, line.find(' ')));
    }
  }
  EXPECT_FALSE(rows.empty());
  for (const fs::path& folder : chapter_folders()) {
    if (!fs::exists(folder / "main.cpp")) continue;
    EXPECT_TRUE(rows.count(folder.filename().string()))
        << "chapters/rows.txt does not run " << folder.filename();
  }
}

TEST(Citation, NamesTheVersionOfTheBuild) {
  static const std::regex kBuild(R"(\n  version: '([0-9.]+)')");
  const std::string build = read_file(kRoot / "meson.build");
  std::smatch version;
  ASSERT_TRUE(std::regex_search(build, version, kBuild));
  EXPECT_NE(read_file(kRoot / "CITATION.cff")
                .find("\nversion: " + version[1].str() + "\n"),
            std::string::npos)
      << version[1];
}

// Meson lists the headers when it configures; a header that came later would
// go unchecked.
TEST(PublicHeaders, AllAreCompiledAlone) {
  std::set<std::string> listed;
  std::istringstream words(SHARDBOOK_PUBLIC_HEADERS);
  for (std::string word; words >> word;) listed.insert(word);
  EXPECT_GT(listed.size(), 0u);
  const std::regex is_private("/(" SHARDBOOK_PRIVATE_FOLDERS ")/");
  for (const char* room : {"core", "comm", "sim", "chapters", "notebooks"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / room)) {
      const std::string path = fs::relative(entry.path(), kRoot).string();
      if (entry.path().extension() != ".h" ||
          std::regex_search(path, is_private)) {
        continue;
      }
      EXPECT_TRUE(listed.count(path))
          << path << " is new: meson setup --reconfigure";
    }
  }
}

// cling has the clang of 2019; Debian's oldest is the nearest to it.
TEST(PublicHeaders, AnOldClangReadsThem) {
  const TempFolder folder;
  std::ofstream source(folder / "all.cpp");
  std::istringstream words(SHARDBOOK_PUBLIC_HEADERS);
  // Notebooks include one header of helpers each, all in one namespace
  std::ofstream lessons(folder / "lessons.cpp");
  int number = 0;
  for (std::string word; words >> word;) {
    if (word.rfind("notebooks/lessons/", 0) == 0) {
      lessons << "#define notes notes_" << ++number << "\n#include \"" << word
              << "\"\n#undef notes\n";
    } else {
      source << "#include \"" << word << "\"\n";
    }
  }
  source.close();
  lessons.close();
  const std::string command =
      "cd '" + folder.path() + "' && for clang in clang++-11 clang++-13 " +
      "clang++-14 clang++-15 clang++-16 none; do command -v $clang && break; " +
      "done >name; read clang <name || exit 77; exec $clang -std=c++17 " +
      "-fsyntax-only -Wall -Wextra -Werror -Wno-unused-parameter -I'" +
      kRoot.string() + "' all.cpp lessons.cpp 2>log";
  const int status = WEXITSTATUS(std::system(command.c_str()));
  if (status == 77) GTEST_SKIP() << "there is no clang of version 11 to 16";
  EXPECT_EQ(status, 0) << read_file(folder / "log");
}

}  // namespace
}  // namespace shardbook::docs
