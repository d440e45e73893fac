#include "tests/script/script_support.h"

#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

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
if [[ " $* " == *" --complain "* ]]; then
  echo "$name: one" >&2
  sleep 0.2
  echo "$name: two" >&2
fi
[[ " $* " != *" --slow "* ]] || sleep 1
[[ " $* " != *" --stay "* ]] || sleep 60
[[ $1 == --report ]] || exit 2
echo "{\"run\": \"$name ${*:3}\"}" >"$2"
)sh";

// shardbook_table: prints the rows of the folders, below the name of the table.
constexpr const char* kTable = R"sh(#!/bin/bash
for word; do
  case $word in
    --quiet) quiet=1 ;;
    --overview) echo overview ;;
    --html | --book | --explorer) next=$word ;;
    *)
      case ${next-} in
        --html) page=$word; echo page >"$page" ;;
        --*) echo "$next $word" >>"$page" ;;
      esac
      if [[ ${next-} ]]; then next=; continue; fi
      [[ ${quiet-} ]] || cat -- "$word/rows.tsv"
      ;;
  esac
done
)sh";

}  // namespace

void Script::SetUp() {
  // The caller, such as .ci/run, may have set these
  for (const char* name :
       {"SHARDBOOK_MESON_OPTIONS", "CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"}) {
    unsetenv(name);
  }
  copy_python("/chapters/course");
  copy_python("/chapters/table");
  copy_python("/bench");
  copy_python("/tests/gpu");
  copy_python("/notebooks");
  for (const char* name :
       {"/shardbook", "/packages.sh", "/chapters/table/help.txt",
        "/chapters/table/completion.bash", "/chapters/table/completion.zsh",
        "/tests/gpu/suite.sh"}) {
    fs::copy_file(std::string(SHARDBOOK_ROOT) + name, root_ + name);
  }
  for (const char* name :
       {"00_single_device", "02_ddp", "03_zero_fsdp", "05_gpipe", "06_1f1b"}) {
    const std::string chapter = std::string("/chapters/") + name;
    write(chapter + "/main.cpp", "");
    write("/build" + chapter + "/ch" + name, kProgram);
  }
  write("/build/chapters/cifar_moe", kProgram);
  write("/chapters/rows.txt",
        "# a comment\n"
        "[Proof] --backend threads\n"
        "00_single_device | One device\n"
        "02_ddp           | DDP        | --world-size 2\n"
        "\n"
        "[Split] --backend sim\n"
        "00_single_device | One device\n"
        "02_ddp           | *DDP       | --world-size 8\n"
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

void Script::copy_python(const std::string& folder) {
  fs::create_directories(root_ + folder);
  for (const auto& entry : fs::directory_iterator(SHARDBOOK_ROOT + folder)) {
    if (entry.path().extension() != ".py") continue;
    fs::copy_file(entry.path(),
                  fs::path(root_ + folder) / entry.path().filename());
  }
}

std::string Script::python() const {
  std::string path =
      run(R"sh(python3 -c "import sys; print(sys.executable)")sh").text;
  path.pop_back();
  return path;
}

void Script::write(const std::string& path, const std::string& text) {
  const fs::path file = root_ + path;
  fs::create_directories(file.parent_path());
  std::ofstream(file) << text;
  fs::permissions(file, fs::perms::owner_all);
}

std::string Script::read(const std::string& path) const {
  std::ifstream file(root_ + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string Script::in_the_tree(const std::string& words) const {
  return "cd '" + root_ + "' && PATH='" + root_ +
         "/bin':$PATH bash -c 'PATH=$PATH; " + words + "' 2>&1";
}

Outcome Script::run(const std::string& words) const {
  return run_command(in_the_tree(words) + " </dev/null");
}

Outcome Script::run_until(const std::string& condition,
                          const std::string& words,
                          const std::string& more) const {
  return run("touch text log; " + words +
             " >text 2>&1 & script=$!; for ((i = 0; i < 600; ++i)); do " +
             condition +
             " && break; sleep 0.1; done; "
             "kill -TERM $script; wait $script; echo status $?; " +
             more);
}

int num_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores)
                                                          : 1;
}

}  // namespace shardbook
