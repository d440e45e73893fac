// Bad input is one clear sentence and exit status 2; nothing is half-written.

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "tests/cli/programs.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

/// A file of this program's own.
std::string own_file(const std::string& name) {
  static const TempFolder folder;
  return folder / name;
}

std::string write_file(const std::string& name, const std::string& bytes) {
  const std::string path = own_file(name);
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

struct BadInput {
  const char* chapter;
  std::string options;
  const char* sentence;
};

void expect_refused(const BadInput& bad) {
  const Outcome outcome = run(bad.chapter, bad.options);
  EXPECT_EQ(outcome.status, 2) << bad.options << "\n" << outcome.text;
  EXPECT_NE(outcome.text.find(bad.sentence), std::string::npos)
      << bad.options << "\n" << outcome.text;
  EXPECT_LT(outcome.text.size(), 1500u) << "more than a sentence";
}

TEST(CommandLine, OptionsThatAreUnknownOrImpossible) {
  for (const BadInput& bad : std::initializer_list<BadInput>{
           {"00_single_device", "--nope", "unknown option --nope"},
           {"00_single_device", "--steps -3", "--steps -3: out of range"},
           {"00_single_device", "--steps", "--steps"},
           {"00_single_device", "--lr fast", "--lr fast: not a number"},
           {"00_single_device", "--dtype f8", "--dtype f8: give one of"},
           {"00_single_device", "--model foo", "--model foo: give one of"},
           {"00_single_device", "--seq 100000", "has 256 positions"},
           {"00_single_device", "--world-size 2", "this chapter has one"},
           {"00_single_device", "--micro-batches 25", "give 1 to 24"},
           {"00_single_device", "--master-weights", "needs --dtype bf16"},
           {"00_single_device", "--device-memory lots", "give bytes"},
           {"00_single_device", "--nesterov", "needs --optimizer sgd"},
           {"01_data_parallel", "--backend gloo", "--backend gloo"},
           {"02_ddp", "--world-size 0", "--world-size 0: out of range"},
           {"02_ddp", "--world-size 5", "does not divide"},
           {"02_ddp", "--backend nccl", "--backend nccl: give one of"},
           {"06_1f1b", "--schedule 2f2b", "--schedule 2f2b: give one of"},
           {"06_1f1b", "--schedule no.json", "no.json"},
           {"06_1f1b", "--world-size 3 --schedule dualpipe", "--schedule dual"},
           {"06_1f1b", "--schedule pipedream --clip 1", "--clip 1"},
           {"05_gpipe", "--world-size 7", "give at most one stage per layer"},
           {"05_gpipe", "--balance 1,2", "2 stages for --world-size 1"},
           {"05_gpipe", "--checkpoint some", "--checkpoint some: give one of"},
           {"05_gpipe", "--micro-batches 25", "give 1 to 24"},
           {"05_gpipe", "--long-skips --model mlp", "--long-skips: the layers"},
           {"05_gpipe", "--long-skips --save x.safetensors",
            "--long-skips: a file does not say"}}) {
    expect_refused(bad);
  }
}

TEST(CommandLine, FilesThatLie) {
  const std::string missing = own_file("there/is/none");
  expect_refused({"00_single_device", "--load " + missing, "no such"});
  expect_refused({"00_single_device", "--data " + missing, "cannot be read"});
  expect_refused({"00_single_device", "--data /", "--data /"});
  expect_refused({"00_single_device", "--save " + missing + " --steps 0",
                  "cannot create a file"});
  expect_refused({"00_single_device", "--log " + missing, "cannot be written"});
  expect_refused({"00_single_device",
                  "--data " + write_file("empty.txt", ""), "is empty"});
  expect_refused({"00_single_device",
                  "--data " + write_file("short.txt", "abc"), "too few"});
  expect_refused(
      {"00_single_device",
       "--data " + write_file("latin.txt", "caf\xe9" + std::string(99, ' ')),
       "byte 3 is not UTF-8"});
  expect_refused({"00_single_device",
                  "--load " + write_file("cut.safetensors", "abc"), "cut"});
  expect_refused(
      {"00_single_device",
       "--load " + write_file("lie.safetensors",
                              "\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
       "header length"});
  expect_refused({"00_single_device",
                  "--model " + write_file("bad.json", "{\"n_embd\": -1}"),
                  "\"n_embd\" is -1"});
}

TEST(CommandLine, AModelOfAnotherShapeIsRefused) {
  const std::string path = own_file("nano.safetensors");
  EXPECT_EQ(run("00_single_device",
                "--steps 0 --no-check --save " + path).status, 0);
  expect_refused({"00_single_device", "--model gpt-micro --load " + path,
                  "the model needs"});
}

TEST(CommandLine, TheOldCheckpointSurvivesAFullDisk) {
  const std::string path = write_file("old.safetensors", "old");
  // The shell's limit on file sizes stands for the full disk.
  const std::string limited =
      "sh -c 'ulimit -f 8; trap \"\" XFSZ; exec \"$0\" \"$@\"' '"
      SHARDBOOK_BUILD "/chapters/00_single_device/ch00_single_device' "
      "--steps 0 --no-check --save " + path + " 2>&1";
  FILE* pipe = popen(limited.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::array<char, 4096> buffer{};
  const std::size_t n = fread(buffer.data(), 1, buffer.size() - 1, pipe);
  const int status = pclose(pipe);
  EXPECT_EQ(WEXITSTATUS(status), 2) << std::string(buffer.data(), n);
  std::ifstream file(path);
  std::string text;
  file >> text;
  EXPECT_EQ(text, "old");
}

TEST(CommandLine, HelpIsNotAMistake) {
  for (const char* chapter : {"00_single_device", "01_data_parallel",
                              "02_ddp"}) {
    const Outcome outcome = run(chapter, "--help");
    EXPECT_EQ(outcome.status, 0);
    EXPECT_NE(outcome.text.find("--world-size"), std::string::npos);
  }
}

}  // namespace
}  // namespace shardbook
