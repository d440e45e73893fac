// How ./shardbook installs, sets up and builds.

#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "tests/script/script_support.h"

namespace shardbook {
namespace {

// A project that writes what Meson finds, by the real Meson.
constexpr const char* kProject = R"py(
project('small', 'cpp')
cpp = meson.get_compiler('cpp')
parts = meson.current_source_dir() / 'parts'
configure_file(output: 'found.txt', configuration: {
  'header': cpp.has_header('part.hpp', args: '-I' + parts),
  'library': cpp.find_library('part', dirs: parts, required: false).found(),
  'package': dependency('part', required: false).found(),
  'unity_is_off': get_option('unity') == 'off'})
executable('one', 'one.cpp')
)py";

// Meson remembers headers that it did not find.
TEST_F(Script, WhatWasInstalledIsFoundAndTheBuildFolderKept) {
  write("/meson.build", kProject);
  write("/one.cpp", "int main() {}\n");
  run("rm bin/meson bin/ninja; cp -r " SHARDBOOK_ROOT "/tests/support tests/");
  const std::string call = "PKG_CONFIG_PATH=parts ./shardbook test";
  // The project has no tests.
  const Outcome first = run("SHARDBOOK_MESON_OPTIONS=-Dunity=off " + call);
  EXPECT_EQ(first.text, "shardbook: no test ran; this build knows none\n");
  for (const char* missing : {"header", "library", "package"}) {
    expect_text(read("/build/found.txt"),
                {std::string("#undef ") + missing + "\n"});
  }
  expect_done(run("ninja -C build >/dev/null"));
  write("/build/runs/last/rows.tsv", "kept\n");

  write("/parts/part.hpp", "");
  write("/parts/part.pc", "Name: part\nDescription: part\nVersion: 1\n");
  run("c++ -shared -o parts/libpart.so one.cpp");
  run("echo echo installed part 1 >>bin/dpkg-query");
  EXPECT_EQ(run(call).text, first.text);
  for (const char* found : {"header", "library", "package", "unity_is_off"}) {
    expect_text(read("/build/found.txt"),
                {std::string("#define ") + found + "\n"});
  }
  expect_text(run("ninja -C build").text, {"no work to do"});
  EXPECT_EQ(read("/build/runs/last/rows.tsv"), "kept\n");
}

// A Meson that says how it was called.
constexpr const char* kMeson = R"sh(#!/bin/sh
echo "$CXX $*" >>calls
touch build/build.ninja
[ ! -e broken ]
)sh";

TEST_F(Script, SetsUpAnewWhenSomethingHasChangedAndOnlyThen) {
  write("/bin/meson", kMeson);
  write("/bin/nvcc", "#!/bin/sh\nexit 1\n");
  const auto calls = [&](const std::string& before,
                         const std::string& environment = "") {
    run(before + "; rm -f calls; " + environment + " ./shardbook plan");
    return read("/calls");
  };
  expect_text(calls("true"), {"setup -Dwerror=false"});
  EXPECT_EQ(calls("true"), "");
  // Packages and their versions
  EXPECT_NE(calls("echo echo installed libnccl-dev 1 >>bin/dpkg-query"), "");
  EXPECT_NE(calls("echo echo installed libnccl-dev 2 >>bin/dpkg-query"), "");
  // CUDA, which no package manager may know
  EXPECT_NE(calls("echo echo Cuda, release 12.4, V >bin/nvcc"), "");
  EXPECT_NE(calls("echo echo Cuda, release 13.0, V >bin/nvcc"), "");
  EXPECT_NE(calls("mkdir lib64; touch lib64/libcudnn.so"), "");
  EXPECT_NE(calls("mkdir -p cuda/bin; mv bin/nvcc cuda/bin",
                  "PATH=$PWD/bin:/usr/bin:/bin CUDA_HOME=$PWD/cuda"),
            "");
  // What failed is tried again
  EXPECT_NE(calls("touch broken; rm build/.configured-with"), "");
  EXPECT_NE(calls("rm broken"), "");
  EXPECT_EQ(calls("true"), "");
}

TEST_F(Script, OptionsAndTheCompilerStayUntilTheBuildIsRemoved) {
  write("/bin/meson", kMeson);
  const auto set_up = [&](const std::string& environment) {
    run("rm -f calls; " + environment + " ./shardbook plan");
    return read("/calls");
  };
  set_up("CXX=clang++ SHARDBOOK_MESON_OPTIONS=\"-Dgloo=disabled -Dunity=off\"");
  EXPECT_EQ(set_up(""), "");
  set_up("SHARDBOOK_MESON_OPTIONS=-Dunity=on");
  run("echo echo installed libnccl-dev 1 >>bin/dpkg-query");
  const std::string later = set_up("");
  EXPECT_EQ(later.rfind("clang++ setup ", 0), 0u) << later;
  expect_text(later, {"-Dgloo=disabled -Dunity=off -Dunity=on /"});
  run("rm -r build/.configured-with build/build.ninja");
  EXPECT_FALSE(has_text(set_up(""), "gloo"));
}

// Environments of conda ask for an older C++ in CXXFLAGS.
TEST_F(Script, AnotherStandardThanTheProjectsIsRefusedBeforeAnythingCompiles) {
  run("rm bin/meson bin/ninja");
  expect_end(
      run("CXXFLAGS=\"-O2 -std=c++17\" meson setup set_up " SHARDBOOK_ROOT), 1,
      {": -std=c++17, of CXXFLAGS, ", "this project is C++20"});
}

// A virtual environment may have a ninja of another version first in PATH.
TEST_F(Script, TheNinjaThatHasBuiltGoesOn) {
  const auto builds = [&](const std::string& environment) {
    run("rm -f calls; " + environment + " ./shardbook plan");
    return read("/calls");
  };
  const auto make_ninja = [&](const std::string& folder) {
    write(folder + "/ninja", "#!/bin/sh\necho " + folder + " $NINJA >>calls\n");
  };
  make_ninja("/bin");
  make_ninja("/venv");
  const std::string first = "/bin " + root_ + "/bin/ninja\n";
  EXPECT_EQ(builds(""), first);
  EXPECT_EQ(builds("PATH=$PWD/venv:$PATH"), first);
  run("rm bin/ninja");
  expect_text(run("PATH=$PWD/venv:$PATH ./shardbook plan").text,
              {"bin/ninja, which has built in build/, is gone; another ninja "
               "may build all again\n"});
  EXPECT_EQ(builds(""), "/venv " + root_ + "/venv/ninja\n");
}

TEST_F(Script, AFolderThatCannotBeWrittenIsNamed) {
  run("rm -r build; touch build");
  for (const char* words : {"run", "run ddp -- --steps 1", "plan --nodes 1",
                            "test", "bench", "notebook"}) {
    const Outcome outcome = run(std::string("./shardbook ") + words);
    EXPECT_EQ(outcome.status, 2) << words;
    EXPECT_TRUE(outcome.text.ends_with(
        "shardbook: build/ cannot be written (File exists); make it a "
        "folder that you can write, or copy the checkout to one\n"))
        << outcome.text;
  }
  // A folder whose files belong to somebody else
  run("rm build; mkdir -p build/.lock");
  const Outcome outcome = run("./shardbook run");
  EXPECT_EQ(outcome.status, 2);
  expect_text(outcome.text, {"shardbook: build/ cannot be written ("});
}

TEST_F(Script, TheDoctorSaysWhatComesNext) {
  write("/build/build.ninja",
        "build core/libshardbook_kernels.so: cpp_LINKER a.o\n");
  const std::string has_all = read("/bin/dpkg-query");
  const auto without = [&](const std::string& packages) {
    write("/bin/dpkg-query", has_all.substr(0, has_all.size() - 1) +
                                 " | grep -Ev \"" + packages + "\"\n");
    return run("./shardbook doctor --no-install");
  };
  // Only notebooks need these.
  const Outcome notebooks = without("xeus|llvm|libclang");
  expect_done(
      notebooks,
      {"required for notebook; it adds: compiles cells\n"
       "                                while the kernel runs\n",
       "without the kernel of the notebooks", "\nNext: ./shardbook run\n"});
  std::istringstream table(
      notebooks.text.substr(0, notebooks.text.find("\nTo install")));
  for (std::string line; std::getline(table, line);) {
    EXPECT_LE(line.size(), 80u) << line;
  }
  expect_end(without(" g[+][+] | libfmt-dev "), 2,
             {"\nNext: install g++ libfmt-dev (not done from here: "
              "--no-install was given), then ./shardbook run\n"});

  write("/build/build.ninja",
        "build notebooks/kernel/shardbook_kernel: cpp_LINKER a.o\n");
  expect_text(without("nothing").text, {"with the kernel of the notebooks"});
  write("/build/runs/last/rows.tsv", "");
  expect_text(without("nothing").text,
              {"\nNext: open build/report.html, or ./shardbook lesson ddp\n"});
}

TEST_F(Script, LibrariesForGpusAreBuiltForRunsOnGpus) {
  write("/bin/ninja", "#!/bin/sh\necho \"$@\" >>built\n");
  run("./shardbook run ddp -- --steps 1");
  EXPECT_FALSE(has_text(read("/built"), "gpu_libraries")) << read("/built");
  run("./shardbook run ddp -- --device cuda");
  expect_text(read("/built"), {"gpu_libraries"});
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

  expect_done(run(alone + "help"), {"  test [FILTER...]"});
  for (const char* command : {"run", "report", "test", "bench"}) {
    const Outcome missing = run(alone + command + " --no-install");
    expect_end(missing, 2, {"a required package is missing"});
    EXPECT_FALSE(has_text(missing.text, "python3: ")) << missing.text;
  }
  expect_done(run(alone + "run gpipe -- --steps 1"),
              {"apt-get installs what is missing", "ch05_gpipe --steps 1"});
}

TEST_F(Script, ABuildIsToldInOneLineOrByItsFirstFailure) {
  write("/bin/ninja",
        "#!/bin/sh\necho [1/2] Compiling a.cpp\necho a.cpp:1: warning: odd\n"
        "echo [2/2] Linking a\n");
  expect_done(
      run("./shardbook run gpipe -- --steps 1"),
      {"built build/: 2 steps, ", " s (1 warnings in build/build.log)\n"});
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

}  // namespace
}  // namespace shardbook
