// What Tab offers after ./shardbook in bash and zsh.

#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "tests/script/script_support.h"

namespace shardbook {
namespace {

constexpr const char* kHelp = R"sh(#!/bin/sh
cat <<END
DDP.

Options:
  -h,--help                   Print this help message and exit


Ranks:
  --backend NAME=threads      what the ranks are (threads, gloo, sim)
  --data TEXT=book            book, random or FILE
  --fold,--no-fold{false}     run ranks once
  --save-names NAME=torchvision
                              the names in --save
                              (torchvision, transformers)


Exit status: --none of these, (a, b)
END
)sh";

// Prints each line of the file `words`, and what is offered in the place of its
// last word.
constexpr const char* kAsk = R"py(
import sys
sys.path.insert(0, "chapters/table")
import completion
for line in open("words"):
    *before, last = line.rstrip("\n").split(" ")
    print(*before, last + ":", *completion.offers(*before, last=last))
)py";

class Completion : public Script {
 protected:
  void SetUp() override {
    Script::SetUp();
    write("/build/chapters/02_ddp/ch02_ddp", kHelp);
    write("/chapters/02_ddp/mistakes.txt",
          "== forgot-to-divide: numbers\nSymptom: none.\n- a\n+ b\n"
          "== divided-twice: numbers\n- a\n+ c\n");
    write("/chapters/02_ddp/lesson.cpp",
          "inline int a();\n// --- the strategy\ninline int b();\n"
          "inline int c();\n// --- end\ninline int d();\n");
    write("/notebooks/02_ddp.ipynb", "{}");
    write("/bench/kernels_bench.cpp", "");
    write("/build/runs/small/rows.tsv", "");
    write("/build/meson-info/intro-tests.json", "[{\"name\": \"core\"}]");
  }

  std::string hide_root(const std::string& text) const {
    return std::regex_replace(text, std::regex(root_), "ROOT");
  }
};

TEST_F(Completion, OffersWhatMayFollow) {
  const std::string expected =
      "r: run report\n"
      "-: --version --no-install --jobs\n"
      "run d: ddp distributed_data_parallel dualpipe\n"
      "run ci: cifar_moe\n"
      "run --l: --list\n"
      "run ddp -- --: --help --backend --data --fold --no-fold --save-names\n"
      "run ddp -- --backend : threads gloo sim\n"
      "run ddp -- --backend=s: --backend=sim\n"
      // As bash cuts it
      "run ddp -- --backend = s: sim\n"
      "run ddp -- --save-names t: torchvision transformers\n"
      "run gpipe -- --x:\n"
      "compare gpipe zero_f: zero_fsdp\n"
      "lesson zero_f: zero_fsdp\n"
      "toy pipe: pipeline pipedream\n"
      "exercise ddp --s: --step --solution\n"
      "exercise ddp --step : 1 2\n"
      "exercise ddp --f: --file --format\n"
      "lesson ddp --p: --pytorch\n"
      "grade class --: --csv --format --no-install --jobs\n"
      "mistake ddp : forgot-to-divide divided-twice\n"
      "report : small\n"
      "notebook --execute : ddp\n"
      "bench k: kernels\n"
      "bench this: this-machine\n"
      "test : gpu core\n"
      "completion : bash zsh\n";
  write("/words", std::regex_replace(expected, std::regex(":.*"), ""));
  write("/ask.py", kAsk);
  EXPECT_EQ(run("python3 -S -B ask.py").text, expected);
}

// The commands of help.txt, which Tab offers, are those that there are.
TEST_F(Completion, EveryCommandOfTheHelpIsThere) {
  const std::string help = read("/chapters/table/help.txt");
  const std::string script = read("/shardbook");
  const std::string cases = script.substr(script.find("case $command in"));
  const std::regex command("\n  ([a-z]+)\\b");
  for (std::sregex_iterator at(help.begin(), help.end(), command), end;
       at != end; ++at) {
    EXPECT_TRUE(
        std::regex_search(cases, std::regex(" " + at->str(1) + "( \\||\\))")))
        << at->str(1);
  }
}

TEST_F(Completion, BashOffersChaptersAndOptions) {
  write("/complete.bash", R"sh(
eval "$(./shardbook completion bash)"
complete -p shardbook
offer() {
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _shardbook "$1" || true
  echo "$1: ${COMPREPLY[*]}"
}
offer ./shardbook run d
cd build
offer ../shardbook run ddp -- --f
cd /
offer "$OLDPWD/../shardbook" r
HOME=$OLDPWD/.. offer "~/shardbook" run --l
PATH=$OLDPWD/..:$PATH offer shardbook run ci
offer nowhere/shardbook r
)sh");
  EXPECT_EQ(hide_root(run("bash complete.bash").text),
            "complete -o default -F _shardbook shardbook\n"
            "./shardbook: ddp distributed_data_parallel dualpipe\n"
            "../shardbook: --fold\n"
            "ROOT/build/../shardbook: run report\n"
            "~/shardbook: --list\n"
            "shardbook: cifar_moe\n"
            "nowhere/shardbook: \n");
}

// With stand-ins for the parts of zsh's own completion.
TEST_F(Completion, ZshOffersChaptersAndOptions) {
  if (run("zsh --version").status != 0) GTEST_SKIP() << "there is no zsh";
  write("/complete.zsh", R"sh(
compdef() { print compdef "$@" }
compadd() { print -- "${words[1]}: ${(P)2}" }
_files() { print "${words[1]}: files" }
eval "$(./shardbook completion zsh)"
offer() {
  words=("$@") CURRENT=$# PREFIX=${@[-1]}
  _shardbook
}
offer ./shardbook run d
cd build
offer ../shardbook run ddp -- --f
cd /
offer "$OLDPWD/../shardbook" r
HOME=$OLDPWD/..
offer "~/shardbook" run --l
path+=($OLDPWD/..)
offer shardbook run ci
offer nowhere/shardbook r
)sh");
  EXPECT_EQ(hide_root(run("zsh -f complete.zsh").text),
            "compdef _shardbook shardbook\n"
            "./shardbook: ddp distributed_data_parallel dualpipe\n"
            "../shardbook: --fold\n"
            "ROOT/build/../shardbook: run report\n"
            "~/shardbook: --list\n"
            "shardbook: cifar_moe\n"
            "nowhere/shardbook: files\n");
}

}  // namespace
}  // namespace shardbook
