#include "sim/timeline_text.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "core/check.h"
#include "tests/sim/timeline_support.h"
#include "tests/support/errors.h"

namespace shardbook::sim {
namespace {

TEST(TimelineText, OneLinePerQueue) {
  TextStyle style;
  style.width = 12 + 32 + 7;  // labels, cells, shares
  EXPECT_EQ(timeline_text({two_steps(0)}, style),
            "rank 0      0               500 ms\n"
            "compute     FFFFFFFFBBBBBBBBBBBBBBBB....OOOO   88 %\n"
            "comm world  ................CCCCCCCCCCCC....   38 %\n"
            "F forward  B backward  O optimizer  C communication  . idle\n"
            "A cell is 31.2 ms. At the right: how much of the step is busy.\n");
}

// Each number follows its letter if there is room.
TEST(TimelineText, MicroBatchesHaveTheirNumbers) {
  RankTimeline rank;
  rank.steps = {0, 32};
  const auto add = [&](const char* category, const std::string& label,
                       double begin, double end) {
    rank.events.push_back(event("matmul", category, "compute", begin, end));
    rank.events.back().label = label;
  };
  add("forward", "micro-batch 3, stage 0", 0, 4);
  add("forward", "micro-batch 3, stage 2", 4, 6);
  add("forward", "micro-batch 12", 6, 8);  // no room for two digits
  add("forward", "micro-batch 13", 8, 11);
  add("backward", "micro-batch 13", 11, 16);
  add("backward", "weights of micro-batch 3", 18, 21);
  add("backward", "micro-batch 7", 21, 22);
  add("optimizer", "update", 24, 28);
  TextStyle style;
  style.width = 10 + 32 + 7;
  const std::string text = timeline_text({rank}, style);
  expect_text(text, {"compute   F3FFF3FFF13B13BB..W3WB..OOOO....   75 %\n"
                     "F forward  B backward  W deferred weight gradients  "
                     "O optimizer  . idle\n"
                     "Numbers are micro-batches.\n"});
}

TEST(TimelineText, AlikeRanksShareTheirLines) {
  const std::string text = timeline_text(
      {two_steps(0), two_steps(1), two_steps(2), two_steps(3, 0.125)},
      TextStyle{});
  expect_text(text, {"ranks 0-2 alike  0", "rank 3           0"});
}

TEST(TimelineText, GroupsBeyondTheLimitAreCounted) {
  std::vector<RankTimeline> ranks;
  for (int r = 0; r < 10; ++r) ranks.push_back(two_steps(r, 0.01 * r));
  expect_text(timeline_text(ranks, TextStyle{}),
              {"2 more ranks are not shown"});
}

TEST(TimelineText, LinesFitTheWidth) {
  for (const int width : {40, 80, 131}) {
    TextStyle style;
    style.width = width;
    std::istringstream lines(timeline_text({two_steps(0)}, style));
    std::string line;
    for (int i = 0; i < 3 && std::getline(lines, line); ++i) {
      EXPECT_LE(line.size(), static_cast<std::size_t>(width)) << line;
    }
  }
}

TEST(TimelineText, ShortEventsAreSmallLetters) {
  RankTimeline rank;
  rank.steps = {0, 1};
  rank.events = {event("all_reduce", "comm", "comm world", 0.5, 0.501)};
  const std::string text = timeline_text({rank}, TextStyle{});
  expect_text(text, {".c.", "A small letter"});
}

TEST(TimelineText, WaitsAreIdle) {
  RankTimeline rank;
  rank.steps = {0, 1};
  rank.events = {event("matmul", "forward", "compute", 0, 0.5),
                 event("wait", "wait", "compute", 0.5, 1)};
  const std::string text = timeline_text({rank}, TextStyle{});
  expect_text(text, {"F..", " 50 %"});
}

TEST(TimelineText, PlainTextIsAscii) {
  for (const char c : timeline_text({two_steps(0)}, TextStyle{})) {
    EXPECT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << static_cast<int>(c);
  }
}

TEST(TimelineText, ColoursAndDotsOnRequestOnly) {
  TextStyle style;
  style.color = true;
  style.utf8 = true;
  const std::string text = timeline_text({two_steps(0)}, style);
  expect_text(text, {"\033[48;5;75;38;5;16mF\033[0m", "\u00b7"});
}

TEST(TimelineText, NoColourWhereStandardOutputIsAPipe) {
  // Tests run with their output in a file or a pipe.
  EXPECT_FALSE(isatty(1) == 0 && terminal_style().color);
  setenv("NO_COLOR", "1", 1);
  EXPECT_FALSE(terminal_style().color);
  unsetenv("NO_COLOR");
}

// Standard output is a terminal of 100 columns while this lives.
class Terminal {
 public:
  Terminal() : saved_(dup(STDOUT_FILENO)), main_(posix_openpt(O_RDWR)) {
    const winsize size{24, 100, 0, 0};
    if (main_ < 0 || grantpt(main_) != 0 || unlockpt(main_) != 0) return;
    const int side = open(ptsname(main_), O_RDWR | O_NOCTTY);
    if (side < 0) return;
    ok_ = ioctl(side, TIOCSWINSZ, &size) == 0 && dup2(side, STDOUT_FILENO) >= 0;
    close(side);
  }
  ~Terminal() {
    dup2(saved_, STDOUT_FILENO);
    close(saved_);
    close(main_);
  }
  bool ok() const { return ok_; }

 private:
  int saved_;
  int main_;
  bool ok_ = false;
};

TEST(TimelineText, ATerminalHasColourAndAWidth) {
  std::fflush(stdout);
  const char* term = std::getenv("TERM");
  const std::string former = term == nullptr ? "xterm" : term;
  TextStyle plain, colored, dumb;
  bool ok = false;
  {
    const Terminal terminal;
    ok = terminal.ok();
    unsetenv("NO_COLOR");
    setenv("TERM", "dumb", 1);
    dumb = terminal_style();
    setenv("TERM", "xterm", 1);
    colored = terminal_style();
    setenv("NO_COLOR", "1", 1);
    plain = terminal_style();
    unsetenv("NO_COLOR");
    setenv("TERM", former.c_str(), 1);
  }
  if (!ok) GTEST_SKIP() << "no pseudo-terminal here";
  EXPECT_TRUE(colored.color);
  EXPECT_FALSE(plain.color);
  EXPECT_FALSE(dumb.color);
  EXPECT_EQ(colored.width, 100);
}

TEST(TimelineText, NothingToShow) {
  EXPECT_EQ(timeline_text({}, TextStyle{}), "The timeline is empty.\n");
}

TEST(TimelineText, TooNarrowIsASentence) {
  TextStyle style;
  style.width = 39;
  const std::string error = error_of([&] { timeline_text({}, style); });
  EXPECT_EQ(error, "timeline: a width of 39 columns; give at least 40");
}

TEST(TimelineText, SecondsHaveThreeDigits) {
  EXPECT_EQ(seconds_text(0), "0 s");
  EXPECT_EQ(seconds_text(4e-9), "4.00 ns");
  EXPECT_EQ(seconds_text(850e-6), "850 us");
  EXPECT_EQ(seconds_text(1.3), "1.30 s");
}

}  // namespace
}  // namespace shardbook::sim
