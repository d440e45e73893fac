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
    expect_done(run(std::string("./shardbook run ") + word + " -- --steps 5"),
                {std::string(program) + " --steps 5"});
  }
  expect_end(run("./shardbook run nothing"), 2, {"nothing: no such chapter"});
}

TEST_F(Script, AnotherProgramOfAChapterRunsByItsName) {
  write("/build/chapters/accelerate", kPlanner);
  expect_end(run("./shardbook run accelerate"), 2, {"planner: \n"});
  expect_end(run("./shardbook run accelerate -- --plugin fsdp"), 2,
             {"planner: --plugin fsdp\n"});
  expect_end(run("./shardbook run accelerate ddp"), 2,
             {"run accelerate: ddp: give its options after --"});
  expect_end(run("./shardbook run accelerate --name a"), 2,
             {"--name a: it keeps no run"});
}

TEST_F(Script, AllOptionsOfThePlannerAreItsOwn) {
  write("/build/chapters/planner/shardbook_plan", kPlanner);
  for (const char* words : {"--nodes 8 --batch 64", "-- --nodes 8 --batch 64",
                            "--no-install --nodes 8 --batch 64"}) {
    expect_end(run(std::string("./shardbook plan ") + words), 2,
               {"planner: --nodes 8 --batch 64\n"});
  }
  expect_text(run("./shardbook plan --help").text, {"planner: --help\n"});
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
  EXPECT_FALSE(has_text(one.text, "running one")) << one.text;
  expect_end(run("./shardbook bench three"), 2, {"there are: one two pytorch"});
}

TEST_F(Script, WithoutAGpuItsSuiteIsSkippedWithTheReason) {
  write("/tests/gpu/programs.txt", "tests/one\n");
  write("/build/bench/gpu/gpus", "#!/bin/sh\necho no GPU is visible\nexit 1\n");
  expect_done(run("./shardbook test gpu"), {"SKIPPED: no GPU is visible\n"});
}

TEST_F(Script, TheSuiteOfAGpuAddsUpItsPrograms) {
  write("/build/bench/gpu/gpus", "#!/bin/sh\n");
  write("/tests/gpu/programs.txt", "# a comment\ntests/one\n");
  write("/build/tests/one",
        "#!/bin/sh\necho \"[  PASSED  ] 3 tests.\"\n"
        "echo \"[  SKIPPED ] 1 test, listed below:\"\n");
  expect_done(run("./shardbook test gpu"),
              {"\n3 passed, 0 failed, 1 skipped\n"});

  write("/tests/gpu/programs.txt", "tests/one\ntests/two\ntests/none\n");
  write("/build/tests/two",
        "#!/bin/sh\necho \"[  PASSED  ] 10 tests.\"\n"
        "echo \"[  FAILED  ] 2 tests, listed below:\"\nexit 1\n");
  expect_end(
      run("./shardbook test gpu"), 1,
      {"FAILED tests/none (status 127)", "\n13 passed, 3 failed, 1 skipped\n"});
}

// A Python with nbclient, and the words that the program gets.
TEST_F(Script, NotebooksAreBuiltAndExecuted) {
  write("/bin/ninja", "#!/bin/sh\necho ninja $* >>'" + root_ + "/ninja.log'\n");
  write("/notebooks/02_ddp.ipynb", "{}");
  write("/bin/jupyter_python", "#!/bin/sh\n[ \"$1\" = -c ] || echo \"$*\"\n");
  expect_done(
      run("SHARDBOOK_PYTHON=jupyter_python ./shardbook notebook --execute "
          "--jobs 3 ddp --update"),
      {"-B " + root_ + "/notebooks/run_notebooks.py execute " + root_ +
       "/build --jobs 3 --update ddp\n"});
  expect_text(read("/ninja.log"), {"notebook_parts"});
  const Outcome opened = run(
      "SHARDBOOK_PYTHON=jupyter_python ./shardbook notebook -- --no-browser");
  expect_text(opened.text,
              {"run_notebooks.py open " + root_ + "/build --no-browser\n"});
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
        {"lesson", "lesson: give a chapter, as in ./shardbook lesson ddp"},
        {"toy", "toy: give a chapter, as in ./shardbook toy ddp"},
        {"toy single_device", "toy single_device: its documents have no "},
        {"lesson ddp --solution", "--solution goes with exercise only"},
        {"exercise ddp gpipe",
         "exercise ddp gpipe: only --solution may follow"},
        {"mistake walk", "walk: no such chapter"},
        {"run --name .", "--name .: give letters, digits, "},
        {"walk",
         "walk: no such command; there are run, lesson, toy, exercise, "
         "mistake"}}) {
    expect_end(run(std::string("./shardbook ") + words), 2, {text});
  }
}

}  // namespace
}  // namespace shardbook
