// ./shardbook run, report and bench: which programs it starts, what it shows of
// them, and what it keeps. Nothing is built here: the script runs in a copy of
// the tree whose programs, Meson and Ninja are stand-ins.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace shardbook {
namespace {

namespace fs = std::filesystem;

// A chapter's program: says what it was given, and writes it as its report.
constexpr const char* kProgram = R"sh(#!/bin/bash
name=${0##*/} report=
echo "$name ${*:3}"
[[ " $* " != *" --help "* ]] || exit 0
log() { [[ " $params " != *" --log "* ]] || echo "$1 $name $$" >>log; }
params=$*
log begin
trap 'log end' EXIT
if [[ " $* " == *" --wait-for-ddp "* ]]; then
  for ((i = 0; i < 600; ++i)); do
    ! grep -q "begin ch02_ddp" log || break
    sleep 0.1
  done
fi
[[ " $* " != *" --slow "* ]] || sleep 1
[[ " $* " != *" --stay "* ]] || sleep 60
[[ $1 == --report ]] || exit 2
echo "{\"run\": \"$name ${*:3}\"}" >"$2"
)sh";

// The planner: says what it was given.
constexpr const char* kPlanner = R"sh(#!/bin/bash
echo "planner: $*"
exit 2
)sh";

// shardbook_table: prints the rows of the folders.
constexpr const char* kTable = R"sh(#!/bin/bash
for word; do
  case $word in
    --quiet) quiet=1 ;;
    --html) next=1 ;;
    *)
      if [[ ${next-} ]]; then echo page >"$word"; next=; continue; fi
      [[ ${quiet-} ]] || cat -- "$word/rows.tsv"
      ;;
  esac
done
)sh";

struct Outcome {
  int status = -1;
  std::string text;
};

class Script : public testing::Test {
 protected:
  void SetUp() override {
    root_ = (fs::path(testing::TempDir()) / "script-XXXXXX").string();
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
    copy_python("/chapters/table");
    copy_python("/bench");
    copy_python("/tests/gpu");
    copy_python("/notebooks");
    for (const char* name :
         {"/shardbook", "/packages.sh", "/chapters/table/help.txt",
          "/tests/gpu/suite.sh"}) {
      fs::copy_file(std::string(SHARDBOOK_ROOT) + name, root_ + name);
    }
    for (const char* name : {"00_single_device", "02_ddp", "03_zero_fsdp",
                             "05_gpipe", "06_1f1b"}) {
      const std::string chapter = std::string("/chapters/") + name;
      write(chapter + "/main.cpp", "");
      write("/build" + chapter + "/ch" + name, kProgram);
    }
    write("/chapters/rows.txt",
          "# a comment\n"
          "[Proof] --backend threads\n"
          "00_single_device | One device\n"
          "02_ddp           | DDP        | --world-size 2\n"
          "\n"
          "[Split] --backend sim\n"
          "00_single_device | One device\n"
          "02_ddp           | DDP        | --world-size 8\n"
          "[Stages] --backend sim\n"
          "00_single_device | One device\n"
          "05_gpipe         | GPipe      | --world-size 4\n");
    write("/build/chapters/table/shardbook_table", kTable);
    write("/build/compile_commands.json", "");
    for (const char* name : {"meson", "ninja", "dpkg-query"}) {
      write(std::string("/bin/") + name, "#!/bin/sh\nexit 0\n");
    }
    // Every package is there.
    write("/bin/dpkg-query",
          "#!/bin/sh\n"
          "sed -n '/^package_table/,/^END/p' '" +
              root_ +
              "/packages.sh' | "
              "sed -n 's/^\\([a-z][-a-z0-9+]*\\) .*/installed \\1 1/p'\n");
  }

  void TearDown() override { fs::remove_all(root_); }

  void copy_python(const std::string& folder) {
    fs::create_directories(root_ + folder);
    for (const auto& entry : fs::directory_iterator(SHARDBOOK_ROOT + folder)) {
      if (entry.path().extension() != ".py") continue;
      fs::copy_file(entry.path(),
                    fs::path(root_ + folder) / entry.path().filename());
    }
  }

  // The interpreter itself: a `python3` on the PATH may be a script.
  std::string python() const {
    std::string path =
        run(R"sh(python3 -c "import sys; print(sys.executable)")sh").text;
    path.pop_back();
    return path;
  }

  void write(const std::string& path, const std::string& text) {
    const fs::path file = root_ + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
    fs::permissions(file, fs::perms::owner_all);
  }

  std::string read(const std::string& path) const {
    std::ifstream file(root_ + path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // Standard output and error together.
  Outcome run(const std::string& words) const {
    const std::string command = "cd '" + root_ + "' && PATH='" + root_ +
                                "/bin':$PATH bash -c 'PATH=$PATH; " + words +
                                "' 2>&1 </dev/null";
    Outcome outcome;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return outcome;
    std::array<char, 4096> buffer;
    for (std::size_t n = 0;
         (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
      outcome.text.append(buffer.data(), n);
    }
    const int status = pclose(pipe);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
  }

  std::string root_;
};

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// Those that ./shardbook may use.
int num_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores)
                                                          : 1;
}

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

TEST_F(Script, WithOptionsTheProgramsOwnWordsAreShown) {
  const Outcome outcome = run("./shardbook run gpipe -- --timeline text");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  EXPECT_EQ(outcome.text,
            "ch05_gpipe --timeline text\nAs pictures: build/report.html\n");
  EXPECT_EQ(read("/build/runs/last/rows.tsv"),
            "01.json\t\t\t./shardbook run gpipe -- --timeline text\n");
  EXPECT_EQ(read("/build/report.html"), "page\n");
}

TEST_F(Script, WhatLeavesNoReportLeavesNoTable) {
  const Outcome outcome = run("./shardbook run gpipe -- --help");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.text, "ch05_gpipe --help\n");
  EXPECT_FALSE(fs::exists(root_ + "/build/runs/last"));
}

TEST_F(Script, AGroupOfAChapterBringsItsYardstick) {
  EXPECT_EQ(run("./shardbook run ddp").status, 0);
  EXPECT_EQ(read("/build/runs/last/rows.tsv"),
            "01.json\t\tDDP\t./shardbook run ddp -- --backend threads "
            "--world-size 2\n"
            "02.json\tSplit\tOne device\t./shardbook run single_device -- "
            "--backend sim\n"
            "03.json\tSplit\tDDP\t./shardbook run ddp -- --backend sim "
            "--world-size 8\n");
}

TEST_F(Script, TwoRunsAtOnceKeepApart) {
  const Outcome outcome =
      run("./shardbook run ddp --name a -- --slow --steps 1 & "
          "./shardbook run ddp --name b -- --slow --steps 2 & "
          "./shardbook run gpipe -- --slow & ./shardbook run zero -- --slow & "
          "wait");
  EXPECT_TRUE(has(read("/build/runs/a/01.json"), "--steps 1")) << outcome.text;
  EXPECT_TRUE(has(read("/build/runs/b/01.json"), "--steps 2")) << outcome.text;
  // Whoever came last is whole.
  const bool gpipe = has(read("/build/runs/last/rows.tsv"), "gpipe");
  EXPECT_TRUE(has(read("/build/runs/last/01.json"),
                  gpipe ? "ch05_gpipe" : "ch03_zero_fsdp"));
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
  const Outcome outcome =
      run("./shardbook run gpipe -- --stay >text 2>&1 & "
          "for ((i = 0; i < 600; ++i)); do"
          "  ! grep -q stay text || break; sleep 0.1; "
          "done; kill -TERM $!; wait $!; echo status $?; cat text");
  EXPECT_TRUE(has(outcome.text, "status 143")) << outcome.text;
  EXPECT_TRUE(has(outcome.text, "shardbook: stopped by SIGTERM"))
      << outcome.text;
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
  const Outcome outcome = run("./shardbook run");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
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
      run("touch log; ./shardbook run >text 2>&1 & "
          "for ((i = 0; i < 600; ++i)); do"
          "  (($(grep -c begin log) < " +
          std::to_string(begun) +
          ")) || break; sleep 0.1; "
          "done; kill -TERM $!; wait $!; echo status $?; "
          "while read -r word name id; do"
          "  ! kill -0 $id 2>/dev/null || echo $name is alive; "
          "done <log");
  EXPECT_EQ(outcome.text, "status 143\n") << read("/text");
  EXPECT_TRUE(fs::is_empty(root_ + "/build/runs"));
}

TEST_F(Script, ReportComparesWhatWasKept) {
  run("./shardbook run ddp --name a -- --steps 1");
  run("./shardbook run ddp --name b -- --steps 2");
  const Outcome outcome = run("./shardbook report a b");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  EXPECT_TRUE(has(outcome.text, "--steps 1\n01.json")) << outcome.text;
  EXPECT_EQ(run("./shardbook report none").status, 2);
  EXPECT_EQ(run("./shardbook report ../runs").status, 2);
  EXPECT_EQ(run("./shardbook run ddp --name a/b").status, 2);
  EXPECT_EQ(run("./shardbook test --name a").status, 2);
}

TEST_F(Script, AllOptionsOfThePlannerAreItsOwn) {
  write("/build/chapters/15_engine/planner/shardbook_plan", kPlanner);
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

TEST_F(Script, LibrariesForGpusAreBuiltForRunsOnGpus) {
  write("/bin/ninja", "#!/bin/sh\necho \"$@\" >>built\n");
  run("./shardbook run ddp -- --steps 1");
  EXPECT_FALSE(has(read("/built"), "gpu_libraries")) << read("/built");
  run("./shardbook run ddp -- --device cuda");
  EXPECT_TRUE(has(read("/built"), "gpu_libraries")) << read("/built");
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

TEST_F(Script, WhatFailsIsNotKept) {
  write("/build/chapters/02_ddp/ch02_ddp", "#!/bin/sh\nexit 2\n");
  EXPECT_EQ(run("./shardbook run ddp -- --steps 1").status, 2);
  EXPECT_FALSE(fs::exists(root_ + "/build/runs/last"));
  EXPECT_TRUE(fs::is_empty(root_ + "/build/runs"));
}

// A fresh machine has no Python: apt-get brings it, with Meson.
TEST_F(Script, NothingCallsPythonBeforeItIsInstalled) {
  const std::string bin = root_ + "/bin";
  run("for tool in bash env cat dirname readlink nproc awk mkdir cut grep sed "
      "tail tr sleep flock sh ln; do ln -s $(command -v $tool) bin; done");
  write("/bin/dpkg-query", "#!/bin/sh\n[ -e " + bin + "/python3 ] || exit 1\n" +
                               read("/bin/dpkg-query"));
  write("/bin/apt-cache", "#!/bin/sh\necho known\n");
  write("/bin/apt-get", "#!/bin/sh\nln -s " + python() + " " + bin + "\n");
  write("/bin/sudo", "#!/bin/sh\n[ $1 = -n ] || exec \"$@\"\n");
  const std::string alone = "PATH=" + bin + " ./shardbook ";

  const Outcome help = run(alone + "help");
  EXPECT_EQ(help.status, 0) << help.text;
  EXPECT_TRUE(has(help.text, "./shardbook test [FILTER...]")) << help.text;
  for (const char* command : {"run", "report", "test", "bench"}) {
    const Outcome missing = run(alone + command + " --no-install");
    EXPECT_EQ(missing.status, 2) << missing.text;
    EXPECT_TRUE(has(missing.text, "a required package is missing"))
        << missing.text;
    EXPECT_FALSE(has(missing.text, "python3: ")) << missing.text;
  }
  const Outcome installed = run(alone + "run gpipe -- --steps 1");
  EXPECT_EQ(installed.status, 0) << installed.text;
  EXPECT_TRUE(has(installed.text, "apt-get installs what is missing"));
  EXPECT_TRUE(has(installed.text, "ch05_gpipe --steps 1")) << installed.text;
}

TEST_F(Script, ABuildIsToldInOneLineOrByItsFirstFailure) {
  write("/bin/ninja",
        "#!/bin/sh\necho [1/2] Compiling a.cpp\necho a.cpp:1: warning: odd\n"
        "echo [2/2] Linking a\n");
  const Outcome good = run("./shardbook run gpipe -- --steps 1");
  EXPECT_EQ(good.status, 0);
  EXPECT_TRUE(has(good.text, "built build/: 2 steps, ")) << good.text;
  EXPECT_TRUE(has(good.text, " s (1 warnings in build/build.log)\n"));
  write("/bin/ninja",
        "#!/bin/sh\necho [1/3] Compiling a.cpp\necho FAILED: a.o\n"
        "echo ccache c++ -c a.cpp\necho a.cpp:1: error: odd\n"
        "echo [2/3] Compiling b.cpp\nexit 1\n");
  const Outcome bad = run("./shardbook run gpipe -- --steps 1");
  EXPECT_EQ(bad.status, 1);
  EXPECT_EQ(bad.text.rfind("FAILED: a.o\na.cpp:1: error: odd\n"
                           "shardbook: the build failed; all of it is in ",
                           0),
            0u)
      << bad.text;
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
