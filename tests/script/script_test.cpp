// ./shardbook plan, bench, notebook and test gpu, and mistakes in the command.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>

#include "tests/script/script_support.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;

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

// The copies would build at once, and give their ranks different options.
TEST_F(Script, ALauncherIsToldToStartTheProgramInItsPlace) {
  const std::string words = " ./shardbook run ddp -- --backend gloo";
  EXPECT_EQ(run("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2" + words).text,
            "shardbook: run: mpirun has started 2 copies of this script "
            "(OMPI_COMM_WORLD_SIZE=2); start the program in its place: mpirun "
            "-n 2 build/chapters/02_ddp/ch02_ddp --backend gloo\n");
  expect_end(
      run("RANK=0 WORLD_SIZE=4 ./shardbook run"), 2,
      {"place: torchrun --no-python --nproc-per-node 4 build/chapters/"});
  const Outcome second = run("PMI_RANK=1 PMI_SIZE=2" + words);
  EXPECT_EQ(second.status, 2);
  EXPECT_EQ(second.text, "");
  expect_done(run("RANK=0 WORLD_SIZE=1" + words), {"ch02_ddp --backend gloo"});
}

TEST_F(Script, AnotherShellThanBashIsToldSo) {
  const Outcome outcome = run("dash shardbook doctor");
  if (has_text(outcome.text, "dash: ")) GTEST_SKIP() << "there is no dash";
  expect_text(outcome.text,
              {"shardbook: this is a script for bash; run ./shardbook, or bash "
               "shardbook\n"});
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

// The version is meson.build's; in a checkout, the commit follows.
// It needs no compiler, and installs none.
TEST_F(Script, TheSiteIsBuiltByAPythonThatHasSphinx) {
  write("/bin/dpkg-query", read("/bin/dpkg-query") + "| grep -v ' g[+][+] '\n");
  write("/bin/with-sphinx", "#!/bin/sh\n[ \"$1\" = -c ] || echo \"$@\"\n");
  const std::string book = "SHARDBOOK_PYTHON=bin/with-sphinx ./shardbook book";
  const std::string built =
      "-B " + root_ + "/chapters/site/build_site.py " + root_ + "/build";
  EXPECT_EQ(run(book + " --no-api --serve --no-install").text,
            built + " --no-api\n" + built + " --serve\n");
  // What was not built is not shown
  write("/bin/with-sphinx", "#!/bin/sh\n[ \"$1\" = -c ] || exit 1\n");
  EXPECT_EQ(run(book + " --serve --no-install").status, 1);
  write("/bin/dpkg-query", "#!/bin/sh\nexit 0\n");
  expect_end(run(book + " --no-install"), 2,
             {"katex               required  renders their formulas",
              "a required package is missing"});
}

TEST_F(Script, TheVersionNeedsNoBuild) {
  write("/meson.build", "project(\"s\",\n  version: '1.2.3',\n)\n");
  EXPECT_EQ(run("./shardbook --version").text, "shardbook 1.2.3\n");
  if (run("git --version").status != 0) GTEST_SKIP() << "there is no git";
  run("git init -q . && git add meson.build && "
      "git -c user.name=a -c user.email=a commit -q -m a && "
      "echo >>meson.build");
  const std::string text = run("./shardbook --version").text;
  EXPECT_EQ(text.rfind("shardbook 1.2.3 (", 0), 0u) << text;
  expect_text(text, {"-dirty)\n"});
}

TEST_F(Script, AListOfTheChaptersNeedsNoBuild) {
  expect_done(run("./shardbook run --list"),
              {"02 ddp                   the batch, over ranks (distributed_"});
  EXPECT_FALSE(fs::exists(root_ + "/build/.lock"));
}

// In the book itself: every chapter says what it splits.
TEST_F(Script, ListAndHelpFit80Columns) {
  const std::string list = run(SHARDBOOK_ROOT "/shardbook run --list").text;
  EXPECT_EQ(std::count(list.begin(), list.end(), '\n'), 18) << list;
  EXPECT_FALSE(has_text(list, " \n")) << list;
  std::istringstream lines(list + run("./shardbook help").text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST_F(Script, AProgramKnowsTheCommandThatStartedIt) {
  for (const char* name : {"02_ddp/ch02_ddp", "planner/shardbook_plan"}) {
    write(std::string("/build/chapters/") + name,
          "#!/bin/sh\necho \"see $SHARDBOOK_COMMAND --help\"\n");
  }
  expect_text(run("./shardbook run 2 -- --nope").text,
              {"see ./shardbook run ddp -- --help\n"});
  expect_text(run("./shardbook plan --nope").text,
              {"see ./shardbook plan --help\n"});
}

TEST_F(Script, MistakesInTheCommandAreNamed) {
  for (const auto& [words, text] :
       {std::pair{"run --steps 3", "options of a program go after --"},
        {"doctor --steps 3", "--steps: unknown option; ./shardbook help"},
        {"run ddp --nmae a", "--nmae: unknown option (did you mean --name?)"},
        {"test --sanitise=thread", "option (did you mean --sanitize?)"},
        {"doctor --list", "--list goes with run only"},
        {"run --list ddp", "run --list ddp: it lists all chapters"},
        {"completion", "completion: give the shell, bash or zsh"},
        {"completion fish", "completion fish: give the shell, bash or zsh"},
        {"test core -- --steps 3", "test takes no options after --"},
        {"report -- --steps 3", "report takes no options after --"},
        {"test --sanitize=memory", "give address,undefined or thread"},
        {"run --sanitize=thread", "--sanitize goes with test only"},
        {"test core --pack folder", "--pack goes with test gpu only"},
        {"test gpu --pack", "--pack needs a value"},
        {"run --jobs many", "--jobs many: give a number from 1 up"},
        {"run --jobs", "--jobs needs a value"},
        {"run --serve", "--serve goes with book only"},
        {"book ddp", "book ddp: it takes no words, only --serve and --no-api"},
        {"run --execute", "--execute and --update go with notebook only"},
        {"notebook ddp", "names and --update go with --execute"},
        {"notebook --update", "names and --update go with --execute"},
        {"notebook --execute 7", "notebook 7: there is no such notebook"},
        {"notebook --execute -- -v", "takes no options after --"},
        {"lesson", "lesson: give a chapter, as in ./shardbook lesson ddp"},
        {"toy", "toy: give a chapter, as in ./shardbook toy ddp"},
        {"toy single_device", "toy single_device: its documents have no "},
        {"lesson ddp --solution", "--solution goes with exercise only"},
        {"mistake ddp --pytorch", "--pytorch goes with lesson and exercise"},
        {"lesson 1f1b --pytorch", "this lesson is in C++ alone"},
        {"exercise ddp gpipe",
         "exercise ddp gpipe: only --step N, --hint, --watch, --solution, or "
         "--file FILE and --format json, may follow"},
        {"exercise ddp --step", "--step needs a value"},
        {"mistake ddp --step 1", "--step goes with exercise only"},
        {"grade", "grade: give one folder, with FOLDER/STUDENT/CHAPTER.cpp"},
        {"grade . --format xml", "grade --format xml: only json"},
        {"run ddp --format json", "--format=json: options of a program go"},
        {"lesson ddp --file a.cpp", "--file=a.cpp: unknown option"},
        {"mistake walk",
         "walk: no such chapter; ./shardbook run --list lists them"},
        {"run dpp", "dpp: no such chapter (did you mean ddp?)"},
        {"lesson zeor", "zeor: no such chapter (did you mean zero?)"},
        {"run cifar-moee", "cifar-moee: no such chapter (did you mean cifar_"},
        {"toy single", "toy single: its documents have no "},
        {"run --name .", "--name .: give letters, digits, "},
        {"walk", "walk: no such command; there are run compare report plan"},
        {"tset", "tset: no such command (did you mean test?); there are "}}) {
    expect_end(run(std::string("./shardbook ") + words), 2, {text});
  }
}

}  // namespace
}  // namespace shardbook
