// ./shardbook plan, bench, notebook and test gpu, and mistakes in the command.

#include <gtest/gtest.h>

#include <string>

#include "tests/script/script_support.h"

namespace shardbook {
namespace {

// The planner: says what it was given.
constexpr const char* kPlanner = R"sh(#!/bin/bash
echo "planner: $*"
exit 2
)sh";

TEST_F(Script, ChaptersHaveManyNames) {
  for (const auto& [word, program] : {std::pair{"zero", "ch03_zero_fsdp"},
                                      {"fsdp", "ch03_zero_fsdp"},
                                      {"zero-fsdp", "ch03_zero_fsdp"},
                                      {"pipeline", "ch06_1f1b"},
                                      {"3", "ch03_zero_fsdp"},
                                      {"05_gpipe", "ch05_gpipe"},
                                      {"chapters/02_ddp/", "ch02_ddp"}}) {
    const Outcome outcome =
        run(std::string("./shardbook run ") + word + " -- --steps 5");
    EXPECT_EQ(outcome.status, 0) << outcome.text;
    EXPECT_TRUE(has(outcome.text, std::string(program) + " --steps 5"))
        << outcome.text;
  }
  const Outcome unknown = run("./shardbook run nothing");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_TRUE(has(unknown.text, "nothing: no such chapter")) << unknown.text;
}

TEST_F(Script, AllOptionsOfThePlannerAreItsOwn) {
  write("/build/chapters/planner/shardbook_plan", kPlanner);
  for (const char* words : {"--nodes 8 --batch 64", "-- --nodes 8 --batch 64",
                            "--no-install --nodes 8 --batch 64"}) {
    const Outcome outcome = run(std::string("./shardbook plan ") + words);
    EXPECT_EQ(outcome.status, 2) << outcome.text;
    EXPECT_TRUE(has(outcome.text, "planner: --nodes 8 --batch 64\n"))
        << outcome.text;
  }
  EXPECT_TRUE(has(run("./shardbook plan --help").text, "planner: --help\n"));
}

TEST_F(Script, BenchmarksRunOneByOne) {
  write("/bin/ninja",
        "#!/bin/sh\n"
        "case $* in *targets*) echo bench/one_bench: cpp_LINKER; "
        "echo bench/two_bench: cpp_LINKER; esac\n");
  write("/build/bench/one_bench", "#!/bin/sh\necho one ${1##*/} $3\nexit 1\n");
  write("/build/bench/two_bench", "#!/bin/sh\necho two ${1##*/} $3\n");
  const Outcome all = run("./shardbook bench -- --quick");
  EXPECT_EQ(all.status, 1);
  EXPECT_EQ(all.text,
            "running one ...\none one.json --quick\n"
            "running two ...\ntwo two.json --quick\n"
            "Results as JSON are in build/bench-results/.\n");
  const Outcome one = run("./shardbook bench two");
  EXPECT_EQ(one.status, 0);
  EXPECT_FALSE(has(one.text, "running one")) << one.text;
  const Outcome unknown = run("./shardbook bench three");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_TRUE(has(unknown.text, "there are: one two pytorch")) << unknown.text;
}

TEST_F(Script, WithoutAGpuItsSuiteIsSkippedWithTheReason) {
  write("/tests/gpu/programs.txt", "tests/one\n");
  write("/build/bench/gpu/gpus", "#!/bin/sh\necho no GPU is visible\nexit 1\n");
  const Outcome outcome = run("./shardbook test gpu");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  EXPECT_TRUE(has(outcome.text, "SKIPPED: no GPU is visible\n"))
      << outcome.text;
}

TEST_F(Script, TheSuiteOfAGpuAddsUpItsPrograms) {
  write("/build/bench/gpu/gpus", "#!/bin/sh\n");
  write("/tests/gpu/programs.txt", "# a comment\ntests/one\n");
  write("/build/tests/one",
        "#!/bin/sh\necho \"[  PASSED  ] 3 tests.\"\n"
        "echo \"[  SKIPPED ] 1 test, listed below:\"\n");
  const Outcome good = run("./shardbook test gpu");
  EXPECT_EQ(good.status, 0) << good.text;
  EXPECT_TRUE(has(good.text, "\n3 passed, 0 failed, 1 skipped\n")) << good.text;

  write("/tests/gpu/programs.txt", "tests/one\ntests/two\ntests/none\n");
  write("/build/tests/two",
        "#!/bin/sh\necho \"[  PASSED  ] 10 tests.\"\n"
        "echo \"[  FAILED  ] 2 tests, listed below:\"\nexit 1\n");
  const Outcome bad = run("./shardbook test gpu");
  EXPECT_EQ(bad.status, 1) << bad.text;
  EXPECT_TRUE(has(bad.text, "FAILED tests/none (status 127)")) << bad.text;
  EXPECT_TRUE(has(bad.text, "\n13 passed, 3 failed, 1 skipped\n")) << bad.text;
}

// A Python with nbclient, and the words that the program gets.
TEST_F(Script, NotebooksAreBuiltAndExecuted) {
  write("/bin/ninja", "#!/bin/sh\necho ninja $* >>'" + root_ + "/ninja.log'\n");
  write("/notebooks/02_ddp.ipynb", "{}");
  write("/bin/jupyter_python", "#!/bin/sh\n[ \"$1\" = -c ] || echo \"$*\"\n");
  const Outcome outcome =
      run("SHARDBOOK_PYTHON=jupyter_python ./shardbook notebook --execute "
          "--jobs 3 ddp --update");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  EXPECT_TRUE(has(outcome.text, "-B " + root_ +
                                    "/notebooks/run_notebooks.py execute " +
                                    root_ + "/build --jobs 3 --update ddp\n"))
      << outcome.text;
  EXPECT_TRUE(has(read("/ninja.log"), "notebook_parts")) << read("/ninja.log");
  const Outcome opened = run(
      "SHARDBOOK_PYTHON=jupyter_python ./shardbook notebook -- --no-browser");
  EXPECT_TRUE(has(opened.text,
                  "run_notebooks.py open " + root_ + "/build --no-browser\n"))
      << opened.text;
}

TEST_F(Script, MistakesInTheCommandAreNamed) {
  for (const auto& [words, text] :
       {std::pair{"run --steps 3", "options of a program go after --"},
        {"doctor --steps 3", "--steps: unknown option"},
        {"test core -- --steps 3", "test takes no options after --"},
        {"report -- --steps 3", "report takes no options after --"},
        {"test --sanitize=memory", "give address,undefined or thread"},
        {"run --sanitize=thread", "--sanitize goes with test only"},
        {"test core --pack folder", "--pack goes with test gpu only"},
        {"test gpu --pack", "--pack needs a value"},
        {"run --jobs many", "--jobs many: give a number from 1 up"},
        {"run --jobs", "--jobs needs a value"},
        {"run --execute", "--execute and --update go with notebook only"},
        {"notebook ddp", "names and --update go with --execute"},
        {"notebook --update", "names and --update go with --execute"},
        {"notebook --execute 7", "notebook 7: there is no such notebook"},
        {"notebook --execute -- -v", "takes no options after --"},
        {"run --name .", "--name .: give letters, digits, "},
        {"walk", "walk: no such command; there are run, plan, report"}}) {
    const Outcome outcome = run(std::string("./shardbook ") + words);
    EXPECT_EQ(outcome.status, 2) << words;
    EXPECT_TRUE(has(outcome.text, text)) << outcome.text;
  }
}

}  // namespace
}  // namespace shardbook
