// ./shardbook compare: which programs run, with which options, and what is
// refused.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "chapters/common/run/exit_status.h"
#include "tests/script/script_support.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;

// A chapter's program: its options, or its words as its report.
constexpr const char* kComparedProgram = R"sh(#!/bin/bash
name=${0##*/}
if [[ $1 == --help-all ]]; then
  echo "Usage: $name"
  echo "  -h,--help               Print this help message and exit"
  for option in world-size backend model batch seq cluster stay wrong silent; do
    echo "  --$option TEXT=a        of all chapters"
  done
  echo "  --fold,--no-fold{false} run ranks that do the same once"
  [[ $name != ch03* ]] || echo "  --strategy NAME=fsdp    what is sharded"
  exit
fi
[[ $1 == --report ]] ||
  { echo "error: $*; see $SHARDBOOK_COMMAND --help" >&2; exit 2; }
[[ " $* " != *" --stay "* ]] || sleep 60
[[ " $* " != *" --wrong "* ]] || { echo "error: --wrong" >&2; exit 2; }
[[ " $* " != *" --silent "* ]] || exit 0
echo "{\"run\": \"$name ${*:3}\"}" >"$2"
)sh";

class CompareScript : public Script {
 protected:
  void SetUp() override {
    Script::SetUp();
    for (const char* name :
         {"00_single_device", "02_ddp", "03_zero_fsdp", "06_1f1b"}) {
      write(std::string("/build/chapters/") + name + "/ch" + name,
            kComparedProgram);
    }
  }

  void expect_refused(const std::string& words, const std::string& sentence) {
    const Outcome outcome = run("./shardbook compare " + words);
    EXPECT_EQ(outcome.status, 2) << words;
    EXPECT_EQ(outcome.text, "shardbook: " + sentence + "\n") << words;
    EXPECT_FALSE(fs::exists(root_ + "/build/runs/compare"));
  }
};

constexpr const char* kExample =
    "./shardbook compare ddp 'zero --strategy fsdp' -- --world-size 8";

TEST_F(CompareScript, EachRunHasItsOwnOptionsAndThoseOfAll) {
  const Outcome outcome = run(
      "./shardbook compare ddp \"zero  --strategy fsdp\" \"06 --world-size 2\" "
      "-- --world-size 4 --backend gloo --model=\"a b\" --no-fold");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  const std::string rows = read("/build/runs/compare/rows.tsv");
  EXPECT_EQ(
      rows,
      "01.json\tCompared\tone device\t./shardbook run single_device -- "
      "--backend gloo '--model=a b' --no-fold --backend threads\n"
      "02.json\tCompared\tddp\t./shardbook run ddp -- --world-size 4 "
      "--backend gloo '--model=a b' --no-fold\n"
      "03.json\tCompared\tzero --strategy fsdp\t./shardbook run zero_fsdp "
      "-- --world-size 4 --backend gloo '--model=a b' --no-fold "
      "--strategy fsdp\n"
      "04.json\tCompared\t06 --world-size 2\t./shardbook run 1f1b -- "
      "--world-size 4 --backend gloo '--model=a b' --no-fold "
      "--world-size 2\n");
  // The stand-in of the table prints the rows.
  expect_text(outcome.text, {rows, "build/runs/compare/report.html\n"});
  expect_text(read("/build/runs/compare/03.json"),
              {"ch03_zero_fsdp --world-size 4 --backend gloo --model=a b "
               "--no-fold --strategy fsdp"});
}

TEST_F(CompareScript, WithoutOptionsItIsSimulated) {
  const Outcome outcome =
      run("./shardbook compare ddp --name mine 2>/dev/null; "
          "./shardbook compare ddp --name=other -- 2>/dev/null");
  expect_text(outcome.text, {"run ddp -- --world-size 4 --backend sim --model",
                             "run ddp --\n"});
  EXPECT_TRUE(fs::exists(root_ + "/build/runs/mine/report.html"));
  EXPECT_FALSE(fs::exists(root_ + "/build/runs/compare"));
}

TEST_F(CompareScript, RefusesWhatCannotBeCompared) {
  const std::string leave_out =
      "leave out --report: one table of all runs is printed, and their reports "
      "are kept";
  expect_refused(
      "", std::string("compare: give the runs to compare, as in ") + kExample);
  expect_refused("ddp \"zero --strategy \\\"fsdp\"",
                 "compare: zero --strategy \"fsdp: No closing quotation; write "
                 "a run as in " +
                     std::string(kExample));
  expect_refused(
      "\" \"",
      std::string("compare: ' ': a run begins with a chapter, as in ") +
          kExample);
  expect_refused("ddp accelerate",
                 "compare: accelerate: this program has a training of its own; "
                 "give chapters, which can all train the same model");
  expect_refused("ddp ddp", "compare: ddp: this run is given twice");
  expect_refused("\"ddp --report=a\"", "compare: ddp --report=a: " + leave_out);
  expect_refused("ddp -- --report a", "compare: " + leave_out);
  expect_refused(
      "ddp -- --save a",
      "compare: --save a: all runs would write this file; give it to "
      "one run, inside its quotes");
  expect_refused(
      "zero --strategy fsdp",
      "--strategy: an option of one run goes inside its quotes, those "
      "of all after --: " +
          std::string(kExample));
  expect_text(run("./shardbook compare dpd").text, {"dpd: no such chapter"});
  EXPECT_EQ(run("./shardbook compare ddp --name a/b").status, 2);
}

TEST_F(CompareScript, AnOptionOfOneChapterDisturbsNoOther) {
  expect_refused("ddp zero -- --strategy fsdp",
                 "compare: --strategy fsdp: 02_ddp has no such option; give it "
                 "to the runs that have it, inside their quotes: 'zero "
                 "--strategy fsdp'");
  expect_refused("ddp zero -- --modle a",
                 "compare: --modle a: none of these runs has such an option "
                 "(did you mean --model?)");
  // The program explains it, before any other runs
  EXPECT_EQ(run("./shardbook compare zero \"ddp --strategy fsdp\" --").text,
            "error: --strategy fsdp; see ./shardbook run ddp -- --help\n");
  // One device has no strategy, and does not need one
  const Outcome outcome = run("./shardbook compare zero -- --strategy fsdp");
  expect_text(outcome.text, {"single_device --\n"});
}

TEST_F(CompareScript, WhatLeavesNoReportIsNamed) {
  Outcome outcome =
      run("./shardbook compare ddp \"zero --wrong\" \"1f1b --silent\"");
  EXPECT_EQ(outcome.status, 2);
  expect_text(outcome.text, {"error: --wrong",
                             "these left no report, and are not in the table: "
                             "zero --wrong, 1f1b --silent\n",
                             "02.json\tCompared\tddp\t"});
  EXPECT_FALSE(has_text(outcome.text, "03.json")) << outcome.text;
  // One device alone is no comparison
  outcome = run("rm -r build/runs/*; ./shardbook compare \"zero --wrong\"");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(fs::is_empty(root_ + "/build/runs"));
}

TEST_F(CompareScript, WhatHadEndedBeforeASignalIsKept) {
  const Outcome outcome =
      run_until("grep -q \"zero --stay\" text",
                "./shardbook compare ddp \"zero --stay\" --");
  EXPECT_EQ(outcome.text, "status 143\n") << read("/text");
  const std::string rows = read("/build/runs/compare-interrupted/rows.tsv");
  expect_text(rows, {"\tddp\t", "\n# Interrupted after 2 of 3 runs.\n"});
  EXPECT_FALSE(has_text(rows, "zero")) << rows;
}

}  // namespace
}  // namespace shardbook
