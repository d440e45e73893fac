// Checkpoints that do not fit, are damaged, or cannot be written: a sentence that
// names what, and nothing lost.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "tests/resume/resume_support.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;

class Refused : public ResumeTest {
 protected:
  void SetUp() override {
    expect_done(
        train("03_zero_fsdp", kZero + " --steps 4 --checkpoint-every 2"));
  }
  Outcome resume(const std::string& more) const {
    return train("03_zero_fsdp", kZero + " --steps 5 --resume " + more);
  }
  std::string file(int rank) const {
    return step(4) + "/rank-0000" + std::to_string(rank) +
           "-of-00002.safetensors";
  }
  const std::string kZero = "--world-size 2 --strategy zero1 --no-check";
};

// Some options for all: RunIdentity has every one.
TEST_F(Refused, AnotherRunIsNamed) {
  const std::vector<std::pair<std::string, std::string>> others = {
      {"--model gpt-micro", "model's n_embd 64 there, 256 here"},
      {"--lr 0.5", "--lr 0.001 there, 0.5 here"},
      {"--data book", "--data walk there, book here"},
      {"--warmup 3", "--warmup 0 there, 3 here"}};
  for (const auto& [option, text] : others) {
    expect_refused(resume(option), {step(4) + " is of another run", text});
  }
  expect_refused(resume("--steps 3"), {"--steps 3", "has done 4 steps"});
}

// As the checkpoint of a program that did not write this key yet.
TEST_F(Refused, AKeyThatTheCheckpointLacksIsNoOtherModel) {
  const std::string manifest = step(4) + "/manifest.json";
  const std::string key = "model's initializer_range";
  std::string text = read(manifest);
  const std::size_t at = text.find(key);
  ASSERT_NE(at, std::string::npos) << text;
  text.replace(at, 5, "other");
  write(manifest, text);
  expect_refused(resume(""), {"other's initializer_range"});
  text.replace(at, key.size(), "model's forgotten_one");
  write(manifest, text);
  expect_done(resume(""));
}

TEST_F(Refused, OtherTextUnderTheSameNameIsNoticed) {
  fs::remove_all(checkpoints());
  write(path("text"), std::string(500, 'a'));
  const std::string options =
      "--world-size 2 --no-check --data " + path("text");
  expect_done(train("02_ddp", options + " --steps 1"));
  write(path("text"), std::string(500, 'b'));
  expect_refused(train("02_ddp", options + " --steps 2 --resume"),
                 {"data's fingerprint"});
}

TEST_F(Refused, AFolderThatIsInUseNeedsResume) {
  expect_refused(train("03_zero_fsdp", kZero + " --steps 5"),
                 {"holds step-00000004", "--resume"});
}

TEST_F(Refused, OptionsWithoutAFolder) {
  expect_refused(plain("02_ddp", "--resume"), {"--resume", "--checkpoint"});
  expect_refused(plain("02_ddp", "--checkpoint-every 2"),
                 {"--checkpoint-every", "--checkpoint FOLDER"});
  expect_refused(train("02_ddp", "--backend sim"), {"--backend sim"});
}

TEST_F(Refused, ATrainingWithoutDrainedStates) {
  fs::remove_all(checkpoints());
  expect_refused(train("06_1f1b", "--world-size 2 --schedule pipedream"),
                 {"--checkpoint: --schedule pipedream has batches in flight"});
}

// The chapter in one file says nothing about its state
TEST_F(Refused, AStrategyWithoutAState) {
  expect_refused(run_program("tests/cli/local_sgd",
                             "--world-size 2 --checkpoint " + path("other")),
                 {"--checkpoint: this training cannot be kept"});
}

TEST_F(Refused, AnotherOptimizersStateInAnotherChapter) {
  // f16 on one device has a loss scale, which DDP has not
  fs::remove_all(checkpoints());
  ASSERT_LE(
      train("00_single_device", "--dtype f16 --steps 1 --no-check").status, 1);
  expect_refused(train("02_ddp", "--dtype f16 --steps 2 --resume"),
                 {"keeps a loss scale"});
}

// Gates drop tokens, and balance experts, within the tokens of one rank.
TEST_F(Refused, TokensThatAreRoutedInOtherGroups) {
  const std::string four = "--dtype f64 --world-size 4 --steps 1";
  const std::string two = "--dtype f64 --world-size 2 --steps 2 --resume";
  fs::remove_all(checkpoints());
  expect_done(train("13_moe", four));
  expect_refused(train("13_moe", two), {"groups of tokens 4 there, 2 here"});
  expect_done(train("13_moe", two + " --micro-batches 2"));

  // Without drops and losses of gates, groups do not matter
  const std::string free = " --dropless --aux-coefficient 0";
  fs::remove_all(checkpoints());
  expect_done(train("13_moe", four + free));
  expect_done(train("13_moe", two + free));

  const std::string experts = " --num-experts 4 --micro-batches 1 ";
  fs::remove_all(checkpoints());
  expect_done(train("14_hybrid_3d", four + experts));
  expect_refused(train("14_hybrid_3d", two + experts),
                 {"groups of tokens 4 there, 2 here"});
}

// Batch norm normalises by the images of a piece.
TEST_F(Refused, ImagesInOtherPieces) {
  write(path("resnet.json"), R"({"model_type": "resnet", "depths": [1, 1],
      "hidden_sizes": [4, 8], "embedding_size": 4, "layer_type": "basic",
      "num_labels": 5})");
  struct Case {
    std::string chapter, pieces, others, difference;
  };
  const std::string m2 = "--micro-batches 2", m4 = "--micro-batches 4";
  const auto accumulates = [](const std::string& pieces) {
    return R"(--world-size 1 --config '{"gradient_accumulation_steps": )" +
           pieces + "}'";
  };
  for (const Case& each :
       {Case{"00_single_device", m2, m4,
             "4 images, each 2 apart there, 2 images, each 4 apart here"},
        Case{"04_model_parallel", "--split-size 4", "--split-size 2",
             "4 images in a row there, 2 images in a row here"},
        Case{"05_gpipe", m2, m4,
             "4 images in a row there, 2 images in a row here"},
        Case{"15_engine", accumulates("2"), accumulates("4"),
             "4 images, each 2 apart there, 2 images, each 4 apart here"}}) {
    SCOPED_TRACE(each.chapter);
    const std::string images =
        "--data random --image-size 8 --model " + path("resnet.json") + " ";
    fs::remove_all(checkpoints());
    expect_done(train(each.chapter, images + each.pieces + " --steps 1"));
    expect_refused(
        train(each.chapter, images + each.others + " --steps 2 --resume"),
        {"batch norms see " + each.difference});
    expect_done(
        train(each.chapter, images + each.pieces + " --steps 2 --resume"));
  }
}

// --- Damage ------------------------------------------------------------------

TEST_F(Refused, ALostFileIsNamed) {
  fs::remove(file(2));
  expect_refused(resume(""), {file(2)});
}

TEST_F(Refused, AShortFileIsNamed) {
  fs::resize_file(file(1), fs::file_size(file(1)) - 100);
  expect_refused(resume(""), {file(1)});
}

TEST_F(Refused, AFlippedBitIsFound) {
  std::string bytes = read(file(2));
  bytes[bytes.size() - 1000] ^= 4;
  write(file(2), bytes);
  expect_refused(resume(""), {file(2), "is damaged"});
  // On another mesh as well
  expect_refused(train("02_ddp", "--world-size 4 --steps 5 --resume"),
                 {file(2), "is damaged"});
}

TEST_F(Refused, AManifestThatIsNone) {
  write(step(4) + "/manifest.json", "{\"format\": 7");
  expect_refused(resume(""), {step(4) + "/manifest.json", "is damaged"});
  write(step(4) + "/manifest.json", R"({"format": "shardbook checkpoint 1"})");
  expect_refused(resume(""), {step(4), "an older version of the book"});
  fs::remove(step(4) + "/manifest.json");
  expect_refused(resume(""), {step(4), "is no whole checkpoint"});
  // Do what the sentence says
  fs::remove_all(step(4));
  expect_done(resume(""));
}

TEST_F(Refused, WhatAKilledRunWasWritingIsNoCheckpoint) {
  fs::rename(step(4), checkpoints() + "/.step-00000004.tmp");
  expect_done(resume(""));
  EXPECT_EQ(names(),
            (std::vector<std::string>{"step-00000002", "step-00000005"}));
}

// --- Folders -----------------------------------------------------------------

TEST_F(Refused, FoldersThatCannotBe) {
  write(path("file"), "");
  const auto with = [&](const std::string& folder) {
    return plain("02_ddp", "--steps 1 --checkpoint " + folder);
  };
  expect_refused(with(path("file")), {path("file"), "it is a file"});
  expect_refused(with(path("none/below")),
                 {path("none/below"), "cannot create a folder in"});
}

TEST_F(Refused, TwoRunsInOneFolder) {
  const int lock = ::open((checkpoints() + "/.lock").c_str(), O_RDWR);
  ASSERT_GE(lock, 0);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  expect_refused(resume(""), {"another run keeps its checkpoints here"});
  ::close(lock);
}

TEST_F(Refused, AFullDiskLosesNothing) {
  // A limit on the size of files, whose signal is ignored: writes fail
  const std::string program =
      SHARDBOOK_BUILD "/chapters/03_zero_fsdp/ch03_zero_fsdp";
  write(path("limited"), "#!/bin/bash\ntrap '' XFSZ\nulimit -f 200\nexec " +
                             program + " \"$@\"\n");
  fs::permissions(path("limited"), fs::perms::owner_all);
  const std::string options = kSmall + (" " + kZero) +
                              " --steps 6 --resume --checkpoint " +
                              checkpoints();
  const std::string before = read(file(1));
  const Outcome outcome =
      run_command(path("limited") + " " + options + " 2>&1 >/dev/null");
  expect_end(outcome, 3,
             {"--checkpoint: not kept after step 6", "cannot write",
              step(4) + " is whole"});
  EXPECT_EQ(names(),
            (std::vector<std::string>{"step-00000002", "step-00000004"}));
  EXPECT_EQ(read(file(1)), before);
  expect_done(resume(""));
}

}  // namespace
}  // namespace shardbook
