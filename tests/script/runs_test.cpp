// ./shardbook run and report: which programs run, what is shown of them, and what
// is kept.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>

#include "chapters/common/run/exit_status.h"
#include "tests/script/script_support.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;

TEST_F(Script, WithOptionsTheProgramsOwnWordsAreShown) {
  const Outcome outcome = run("./shardbook run gpipe -- --timeline text");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  EXPECT_EQ(outcome.text,
            "ch05_gpipe --timeline text\n"
            "See it:   build/runs/gpipe/report.html\n"
            "Read it:  ./shardbook lesson gpipe, then exercise and mistake\n");
  EXPECT_EQ(read("/build/runs/gpipe/rows.tsv"),
            "01.json\t\t\t./shardbook run gpipe -- --timeline text\n");
  EXPECT_EQ(read("/build/runs/gpipe/report.html"), "page\n--book ../../..\n");
}

TEST_F(Script, AReportFindsTheBookAndTheExplorerThatIsBuilt) {
  write("/build/explorer/index.html", "");
  run("./shardbook run gpipe -- --steps 1");
  EXPECT_EQ(read("/build/runs/gpipe/report.html"),
            "page\n--book ../../..\n--explorer ../../explorer\n");
  run("./shardbook report gpipe");
  EXPECT_EQ(read("/build/report.html"),
            "page\n--book ..\n--explorer explorer\n");
}

TEST_F(Script, ARunOfAllEndsWithAnOverviewAndWhatIsNext) {
  const Outcome all = run("./shardbook run --name a 2>&1");
  expect_done(all, {"\noverview\n01.json\t\tOne device",
                    "See it:   build/runs/a/report.html\n"
                    "Read it:  ./shardbook lesson ddp, then exercise and "
                    "mistake\n"
                    "Plan it:  ./shardbook plan --model "});
  // All rows: asked for, or of some chapters only
  for (const char* words : {"run --all", "run ddp gpipe", "report a"}) {
    const Outcome rows = run(std::string("./shardbook ") + words);
    expect_done(rows, {"\tSplit\t*DDP\t"});
    EXPECT_FALSE(has_text(rows.text, "overview")) << words;
  }
  expect_end(run("./shardbook report --all"), 2, {"--all goes with run only"});
}

// A reader waits for minutes, and loses the run before.
TEST_F(Script, ARunSaysWhatComesAndWhatItReplaces) {
  write("/build/runs/last/seconds.tsv", "61.5\t./shardbook run ddp --\n");
  const Outcome again = run("./shardbook run");
  EXPECT_EQ(again.text.rfind("This builds what has changed, runs all chapters "
                             "again (last time 2 min), and replaces "
                             "build/runs/last and build/report.html.\n",
                             0),
            0u)
      << again.text;
  expect_text(again.text, {"Replaced: the run before, in build/runs/last "});

  const std::string command = "./shardbook run gpipe -- --steps 1";
  EXPECT_FALSE(has_text(run(command).text, "Replaced"));
  expect_text(run(command).text,
              {"Replaced: the run before, in build/runs/gpipe (--name NAME "
               "keeps both)\n"});
}

// Its own name, and no lesson of another chapter.
TEST_F(Script, ProgramsBesideTheChaptersRunAsWell) {
  const Outcome outcome = run("./shardbook run cifar_moe -- --moe");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  EXPECT_EQ(outcome.text,
            "cifar_moe --moe\n"
            "See it:   build/runs/cifar_moe/report.html\n");
  EXPECT_EQ(read("/build/runs/cifar_moe/rows.tsv"),
            "01.json\t\t\t./shardbook run cifar_moe -- --moe\n");
}

TEST_F(Script, WhatLeavesNoReportLeavesNoTable) {
  const Outcome outcome = run("./shardbook run gpipe -- --help");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.text, "ch05_gpipe --help\n");
  EXPECT_TRUE(fs::is_empty(root_ + "/build/runs"));
}

TEST_F(Script, ALookAtSomeChaptersLeavesTheTableOfAll) {
  const Outcome all = run("./shardbook run");
  expect_done(all);
  EXPECT_EQ(
      all.text.rfind("This installs what is missing, builds, and runs all "
                     "chapters: five to ten minutes on two cores.\n",
                     0),
      0u)
      << all.text;
  const std::string table = read("/build/runs/last/rows.tsv");
  expect_text(table, {"gpipe"});
  write("/build/report.html", "of all\n");
  const Outcome outcome =
      run("./shardbook run ddp -- --steps 2; ./shardbook run ddp zero; "
          "./shardbook run -- --steps 3");
  expect_text(read("/build/runs/ddp/rows.tsv"), {"--steps 2"});
  expect_text(read("/build/runs/ddp-zero_fsdp/rows.tsv"), {"DDP"});
  expect_text(read("/build/runs/all/rows.tsv"), {"--steps 3"});
  EXPECT_EQ(read("/build/runs/last/rows.tsv"), table);
  EXPECT_EQ(read("/build/report.html"), "of all\n");
  EXPECT_FALSE(has_text(outcome.text, "See it:   build/report.html"))
      << outcome.text;
}

TEST_F(Script, CommandsAreKeptAsAReaderTypesThem) {
  run("./shardbook run gpipe -- --cut 14,13,13,10 --out=~/a^b \"a b\" "
      "$\"a\tb\"");
  EXPECT_EQ(read("/build/runs/gpipe/rows.tsv"),
            "01.json\t\t\t./shardbook run gpipe -- --cut 14,13,13,10 "
            "'--out=~/a^b' 'a b' $'\\141\\011\\142'\n");
}

TEST_F(Script, AGroupOfAChapterBringsItsYardstick) {
  expect_done(run("./shardbook run ddp"));
  EXPECT_EQ(read("/build/runs/ddp/rows.tsv"),
            "01.json\t\tDDP\t./shardbook run ddp -- --backend threads "
            "--world-size 2\n"
            "02.json\tSplit\tOne device\t./shardbook run single_device -- "
            "--backend sim\n"
            "03.json\tSplit\t*DDP\t./shardbook run ddp -- --backend sim "
            "--world-size 8\n");
}

TEST_F(Script, TwoRunsAtOnceKeepApart) {
  const Outcome outcome =
      run("./shardbook run ddp --name a -- --slow --steps 1 & "
          "./shardbook run ddp --name b -- --slow --steps 2 & "
          "./shardbook run gpipe --name c -- --slow & "
          "./shardbook run zero --name c -- --slow & "
          "wait");
  expect_text(read("/build/runs/a/01.json"), {"--steps 1"});
  expect_text(read("/build/runs/b/01.json"), {"--steps 2"});
  // Whoever came last is whole.
  const bool gpipe = has_text(read("/build/runs/c/rows.tsv"), "gpipe");
  expect_text(read("/build/runs/c/01.json"),
              {gpipe ? "ch05_gpipe" : "ch03_zero_fsdp"});
  // Nothing else is left.
  int folders = 0;
  for (const auto& entry : fs::directory_iterator(root_ + "/build/runs")) {
    (void)entry;
    ++folders;
  }
  EXPECT_EQ(folders, 3);
}

TEST_F(Script, AStoppedRunLeavesNothing) {
  // Ends the script when its program has begun.
  const Outcome outcome = run_until(
      "grep -q stay text", "./shardbook run gpipe -- --stay", "cat text");
  expect_text(outcome.text, {"status 143", "shardbook: stopped by SIGTERM"});
  EXPECT_TRUE(fs::is_empty(root_ + "/build/runs"));
}

TEST_F(Script, SimulatedRowsRunSideBySideAndMeasuredOnesAlone) {
  const bool have_several = num_cores() > 1;
  write("/chapters/rows.txt",
        std::string("[Proof] --log\n"
                    "00_single_device | One device | --slow\n"
                    "03_zero_fsdp     | ZeRO\n"
                    "[Split] --backend sim --log\n"
                    "05_gpipe         | GPipe |") +
            (have_several ? "--wait-for-ddp" : "") +
            "\n"
            "02_ddp           | DDP\n");
  expect_done(run("./shardbook run"));
  const std::string log = read("/log");
  const auto at = [&](const char* words) { return log.find(words); };
  EXPECT_LT(at("end ch00_single_device"), at("begin ch03_zero_fsdp"));
  EXPECT_LT(at("end ch03_zero_fsdp"), at("begin ch05_gpipe"));
  if (have_several) {
    EXPECT_LT(at("begin ch02_ddp"), at("end ch05_gpipe"));
  }
  // In the order of the file, whatever ended first.
  const std::string table = read("/build/runs/last/rows.tsv");
  EXPECT_LT(table.find("03.json\tSplit\tGPipe"),
            table.find("04.json\tSplit\tDDP"));
}

TEST_F(Script, AStoppedRunEndsAllThatItStarted) {
  write("/chapters/rows.txt",
        "[Split] --backend sim --log --stay\n"
        "05_gpipe | GPipe\n"
        "02_ddp   | DDP\n");
  const int begun = num_cores() > 1 ? 2 : 1;
  const Outcome outcome =
      run_until("(($(grep -c begin log) >= " + std::to_string(begun) + "))",
                "./shardbook run",
                "while read -r word name id; do"
                "  ! kill -0 $id 2>/dev/null || echo $name is alive; "
                "done <log");
  EXPECT_EQ(outcome.text, "status 143\n") << read("/text");
  EXPECT_TRUE(fs::is_empty(root_ + "/build/runs"));
}

TEST_F(Script, WhatHadEndedBeforeASignalIsKept) {
  write("/chapters/rows.txt",
        "[Proof] --log\n"
        "00_single_device | One device\n"
        "[Split] --backend sim --log\n"
        "05_gpipe | GPipe\n"
        "02_ddp   | DDP | --stay\n");
  write("/build/runs/last/rows.tsv", "complete\n");
  write("/build/report.html", "complete\n");
  // GPipe has ended when its process is no longer waited for.
  const Outcome outcome = run_until(
      "read -r _ _ id < <(grep \"begin ch05\" log) &&"
      " ! kill -0 $id 2>/dev/null && grep -q \"begin ch02\" log",
      "./shardbook run", "cat text");
  expect_text(outcome.text, {"status 143"});
  const std::string kept = read("/build/runs/last-interrupted/rows.tsv");
  expect_text(kept, {"01.json\t\tOne device", "02.json\tSplit\tGPipe"});
  EXPECT_FALSE(has_text(kept, "DDP")) << kept;
  expect_text(kept, {"\n# Interrupted after 2 of 3 runs.\n"});
  // The stand-in of the table prints the file.
  expect_text(outcome.text,
              {kept, "build/runs/last-interrupted/report.html\n"});
  EXPECT_EQ(read("/build/runs/last/rows.tsv"), "complete\n");
  EXPECT_EQ(read("/build/report.html"), "complete\n");
}

TEST_F(Script, ReportComparesWhatWasKept) {
  run("./shardbook run ddp --name a -- --steps 1");
  run("./shardbook run ddp --name b -- --steps 2");
  expect_done(run("./shardbook report a b"), {"--steps 1\n01.json"});
  expect_end(run("./shardbook report bb"), 2,
             {"report bb: no runs have that name (did you mean b?); there "
              "are: a b\n"});
  EXPECT_EQ(run("./shardbook report ../runs").status, 2);
  EXPECT_EQ(run("./shardbook run ddp --name a/b").status, 2);
  EXPECT_EQ(run("./shardbook test --name a").status, 2);
}

TEST_F(Script, WhatFailsIsNotKept) {
  write("/build/chapters/02_ddp/ch02_ddp", "#!/bin/sh\nexit 2\n");
  EXPECT_EQ(run("./shardbook run ddp -- --steps 1").status, 2);
  EXPECT_TRUE(fs::is_empty(root_ + "/build/runs"));
}

}  // namespace
}  // namespace shardbook
