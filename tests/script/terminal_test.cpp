// What ./shardbook shows on a terminal while it builds and runs: one line of
// progress, which leaves nothing behind.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "chapters/common/run/exit_status.h"
#include "tests/script/script_support.h"

namespace shardbook {
namespace {

// A terminal after some text was printed to it.
struct Screen {
  explicit Screen(const std::string& text) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      std::string& line = lines.back();
      if (text.compare(i, 3, "\033[K") == 0) {
        line.resize(column);
        i += 2;
      } else if (text[i] == '\r') {
        column = 0;
      } else if (text[i] == '\n') {
        lines.emplace_back();
        column = 0;
      } else {
        line.resize(std::max(line.size(), column + 1));
        line[column++] = text[i];
        widest_progress =
            std::max(widest_progress, line[0] == '[' ? column : 0);
      }
    }
  }

  std::string text() const {
    std::string all;
    for (const std::string& line : lines) all += line + "\n";
    return all;
  }

  std::vector<std::string> lines = {""};
  std::size_t column = 0;
  std::size_t widest_progress = 0;
};

class TerminalScript : public Script {
 protected:
  void SetUp() override {
    if (!has_terminals()) GTEST_SKIP() << "there is no pseudo-terminal here";
    Script::SetUp();
  }

  // Runs words of bash; see run_on_terminal.
  Outcome run_in_terminal(
      const std::string& words, int columns, const std::string& awaited = "",
      const std::function<void(int)>& react = press_ctrl_c) const {
    return run_on_terminal("export TERM=xterm; " + in_the_tree(words), columns,
                           awaited, react);
  }
};

constexpr const char* kRows =
    "[Proof] --backend threads\n"
    "00_single_device | One device\n"
    "05_gpipe | A pipeline whose name no narrow terminal could ever show\n"
    "[Split] --backend sim\n"
    "02_ddp   | DDP        | --complain\n"
    "03_zero_fsdp | ZeRO   | --complain\n";

TEST_F(TerminalScript, ProgressCountsUpAndIsClearedAtTheEnd) {
  write("/chapters/rows.txt", kRows);
  const Outcome outcome = run_in_terminal("./shardbook run", 80);
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  std::size_t at = 0;
  for (const char* row :
       {"[1/4] 00_single_device, One device ...", "[2/4] 05_gpipe, A pipeline",
        "[3/4] 02_ddp, DDP ... (", " s left)", "[4/4] 03_zero_fsdp, ZeRO"}) {
    at = outcome.text.find(row, at);
    ASSERT_NE(at, std::string::npos) << row << " in " << outcome.text;
  }
  const std::string screen = Screen(outcome.text).text();
  EXPECT_FALSE(has_text(screen, "/4]")) << screen;
  EXPECT_FALSE(has_text(screen, " left)")) << screen;
  // Errors of rows that ran side by side are whole
  expect_text(screen, {"02_ddp, DDP:\nch02_ddp: one\nch02_ddp: two\n",
                       "03_zero_fsdp, ZeRO:\nch03_zero_fsdp: one\n"
                       "ch03_zero_fsdp: two\n"});
}

TEST_F(TerminalScript, ProgressFitsNarrowTerminals) {
  write("/chapters/rows.txt", kRows);
  // It builds until its line has been on the screen, or for half a minute
  write("/bin/ninja", "#!/bin/sh\necho \"[1/9] " + std::string(200, 'x') +
                          "\"\nfor i in $(seq 300); do [ ! -e '" + root_ +
                          "/seen' ] || exit 0; sleep 0.1; done\n");
  for (const int columns : {40, 60}) {
    const std::string text =
        run_in_terminal("./shardbook run single gpipe", columns,
                        "building: [1/9] xxx",
                        [this](int) { write("/seen", ""); })
            .text;
    std::filesystem::remove(root_ + "/seen");
    expect_text(text,
                {"building: [1/9] xxx", "[2/2] 05_gpipe, A pip", "left)"});
    const Screen screen(text);
    EXPECT_LT(screen.widest_progress, static_cast<std::size_t>(columns - 2));
    EXPECT_FALSE(has_text(screen.text(), "building")) << screen.text();
    EXPECT_FALSE(has_text(screen.text(), "/2]")) << screen.text();
  }
}

TEST_F(TerminalScript, CtrlCLeavesACleanLineAndWhatHadEnded) {
  write("/chapters/rows.txt",
        "[Proof] --backend threads\n"
        "00_single_device | One device\n"
        "02_ddp           | DDP | --complain --stay\n");
  const Outcome outcome = run_in_terminal("./shardbook run", 80, "[2/2]");
  const std::string screen = Screen(outcome.text).text();
  expect_text(screen, {"\nshardbook: stopped by SIGINT\n"});
  for (const char* gone : {"[2/2]", "^C", "ch02_ddp"}) {
    EXPECT_FALSE(has_text(screen, gone)) << screen;
  }
  expect_text(read("/build/runs/last-interrupted/rows.tsv"),
              {"01.json\t\tOne device", "# Interrupted after 1 of 2 runs.\n"});

  write("/bin/ninja", "#!/bin/sh\necho \"[1/9] a.cpp\"\nsleep 60\n");
  const std::string stopped =
      Screen(run_in_terminal("./shardbook run", 80, "[1/9]").text).text();
  EXPECT_TRUE(stopped.ends_with("cores.\nshardbook: stopped by SIGINT\n\n"))
      << stopped;
}

TEST_F(TerminalScript, APipeHasALinePerRowAndNoEscapes) {
  write("/chapters/rows.txt", kRows);
  for (const Outcome& outcome :
       {run("./shardbook run"),
        run_on_terminal("cd " + root_ + "; TERM=dumb PATH=" + root_ +
                        "/bin:$PATH ./shardbook run")}) {
    EXPECT_EQ(outcome.text.find('\033'), std::string::npos) << outcome.text;
    expect_text(outcome.text, {"[1/4] 00_single_device, One device",
                               "[4/4] 03_zero_fsdp", "02_ddp, DDP:"});
  }
}

// Those of the last run, where it had the row; else their mean.
TEST_F(Script, TheTimeLeftFollowsWhatRowsTookBefore) {
  run("./shardbook run ddp");
  expect_text(read("/build/runs/ddp/seconds.tsv"),
              {"\t./shardbook run ddp -- --backend threads --world-size 2\n"});
  write("/build/runs/last/seconds.tsv",
        "2.00\t./shardbook run single_device -- --backend threads\n"
        "8.00\t./shardbook run gpipe -- --backend sim --world-size 4\n");
  EXPECT_EQ(run("cd chapters/table; python3 -S -B -c \""
                "import default_rows, run_chapters as r; rows = "
                "default_rows.default_rows([\\\"05_gpipe\\\", "
                "\\\"00_single_device\\\"]); "
                "print(r.shares_of_time(rows, 4))\"")
                .text,
            "[2.0, 1.25, 1.25, 2.0]\n");
}

}  // namespace
}  // namespace shardbook
