// What a message advises works, and sizes that nobody can mean are refused at once.

#include <gtest/gtest.h>

#include <string>

#include "tests/cli/programs.h"

namespace shardbook {
namespace {

TEST(Advice, NamesWhatWasGivenAndAWayThatWorks) {
  for (const BadInput& bad : std::initializer_list<BadInput>{
           {"15_engine", "--world-size 5",
            "--batch 24 is not a multiple of data-parallel ranks 5; give a "
            "multiple of 5"},
           {"15_engine",
            "--config '{\"train_batch_size\": 8, \"optimizer\": {\"type\": "
            "\"Adam\", \"params\": {\"bias_correction\": false}}}'",
            "leaving the key out changes the numbers"},
           {"07_tensor_parallel", "--world-size 3",
            "--world-size 3: the ranks share 4 heads"},
           {"07_tensor_parallel", "--world-size 2 --model mlp",
            "--model mlp: this chapter shards the layers of a GPT"},
           {"12_sequence_parallel",
            "--world-size 2 --kind megatron --model mlp",
            "--model mlp: this chapter"},
           // 12 micro-batches would not divide over 5 ranks either
           {"06_1f1b",
            "--world-size 5 --schedule interleaved --micro-batches 20",
            "not 20; give a multiple of 20\n"},
           {"14_hybrid_3d", "--world-size 2 --pp 2 --partition 2,2",
            "has 6 layers: embedding, 4 blocks and head; give a list such as "
            "3,3"}}) {
    expect_refused(bad);
  }
}

TEST(Advice, AnUnknownOptionNamesTheNearestAndWhereAllAre) {
  for (const auto& [options, sentence] :
       {std::pair{"--stpes 3", "--stpes 3 (did you mean --steps?); see "},
        {"--world_sze=2", "--world_sze=2 (did you mean --world-size?)"},
        {"--optim sgd", "--optim sgd (did you mean --optimizer?)"},
        {"batch 8", "unknown option batch 8 (did you mean --batch?)"},
        {"--no-chekc", "--no-chekc (did you mean --no-check?)"},
        {"--xyzzy", "--xyzzy; see ch02_ddp --help\n"}}) {
    expect_end(run("02_ddp", options), 2, {sentence});
  }
  // As ./shardbook starts a program
  const std::string shell = "SHARDBOOK_COMMAND='./shardbook run ddp --'";
  expect_end(run("02_ddp", "--xyzzy", shell), 2,
             {"--xyzzy; see ./shardbook run ddp -- --help\n"});
  // An option that is refused is no advice
  expect_end(run("13_moe", "--load-svgg"), 2, {"--load-svgg; see"});
}

// Tab completes from a program's --help-all.
TEST(Advice, TabKnowsTheOptionsOfAProgramAndTheirValues) {
  expect_done(
      run_command("cd '" SHARDBOOK_ROOT "/chapters/table' && python3 -S -B -c '"
                  "import completion; options = completion.program_options("
                  "\"" SHARDBOOK_BUILD "/chapters/02_ddp/ch02_ddp\"); "
                  "print(*options); print(*options[\"--backend\"])'"),
      {"--help --help-all --world-size", "--fold --no-fold ", "--bucket-mb ",
       "\nthreads gloo nccl sim\n"});
}

// Each would fill the memory, or take hours.
TEST(Advice, SizesThatNobodyCanMeanAreRefusedAtOnce) {
  for (const std::string world :
       {"--cluster none", "--cluster dgx-a100", "--backend sim"}) {
    for (const std::string size :
         {"--batch 999999999", "--seq 999999999", "--world-size 999999999"}) {
      for (const char* chapter :
           {"00_single_device", "06_1f1b", "14_hybrid_3d"}) {
        expect_refused({chapter, world + " --data random " + size, "give a"});
      }
    }
  }
  expect_refused(
      {"02_ddp", "--backend sim --steps 999999999", "give at most 10000"});
  for (const char* key : {"n_layer", "n_embd"}) {
    expect_refused(
        {"05_gpipe",
         std::string("--backend sim --model '{\"") + key + "\": 999999996}'",
         "999999996; give a positive integer, at most "});
  }
  // What a run would need is known from shapes
  for (const char* chapter : {"13_moe", "14_hybrid_3d"}) {
    expect_refused({chapter, "--data random --num-experts 1048576",
                    "out of memory: the ranks need "});
  }
}

}  // namespace
}  // namespace shardbook
