// A run that stops and goes on ends where one that never stopped does: bit for
// bit on the same ranks, up to the rounding of sums on others.

#include <signal.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/resume/resume_support.h"

namespace shardbook {
namespace {

struct Way {
  std::string chapter, options;
};

const std::vector<Way>& all_ways() {
  static const std::vector<Way> kWays = {
      {"00_single_device", "--dropout 0.1 --micro-batches 2"},
      // Steps overflow before and after the stop, and halve the loss's scale
      {"00_single_device", "--dtype f16 --master-weights --lr 1"},
      {"00_single_device",
       "--model resnet18 --data random --image-size 32 --batch 6 "
       "--optimizer sgd --momentum 0.9"},
      {"01_data_parallel", "--world-size 2 --dropout 0.1"},
      {"02_ddp", "--world-size 4 --optimizer sgd --momentum 0.9"},
      {"03_zero_fsdp", "--world-size 2 --strategy zero1 --dtype bf16"},
      {"03_zero_fsdp", "--world-size 4 --strategy zero2 --cpu-offload"},
      {"03_zero_fsdp", "--world-size 2 --strategy zero3"},
      {"03_zero_fsdp", "--world-size 2 --strategy fsdp --clip 0.5"},
      {"03_zero_fsdp",
       "--world-size 4 --sharding-strategy hybrid_shard --shard-size 2"},
      {"03_zero_fsdp", "--world-size 4 --strategy fsdp2"},
      {"04_model_parallel",
       "--model resnet18 --data random --image-size 32 --batch 6 "
       "--cluster none"},
      {"05_gpipe", "--world-size 3 --dropout 0.1"},
      {"06_1f1b", "--world-size 2 --schedule interleaved"},
      {"06_1f1b",
       "--world-size 2 --schedule zb-h1 --post-validation --clip 0.4"},
      {"06_1f1b", "--world-size 2 --schedule dualpipe --micro-batches 8"},
      {"07_tensor_parallel",
       "--world-size 2 --rng megatron --dropout 0.1 "
       "--vocabulary-divisible-by 100"},
      {"08_tensor_parallel_2d", "--world-size 4"},
      {"09_tensor_parallel_2p5d", "--world-size 8"},
      {"10_tensor_parallel_3d", "--world-size 8"},
      // Shards of uneven rows
      {"11_dtensor", "--world-size 6 --mesh 3x2 --batch 6"},
      {"12_sequence_parallel", "--world-size 2"},
      {"13_moe", "--world-size 4 --ep 2 --noise rsample --clip 0.5"},
      {"13_moe", "--world-size 4 --tp 2 --zero-stage 2 --cpu-offload"},
      {"14_hybrid_3d",
       "--world-size 8 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel "
       "--clip 0.5"},
      {"14_hybrid_3d", "--world-size 4 --tp 2 --zero-stage 3 --dtype f16"},
      {"14_hybrid_3d",
       "--world-size 8 --tp 2 --pp 2 --ep 2 --num-experts 4 --zero-stage 1 "
       "--noise rsample --dtype f64"},
      {"14_hybrid_3d",
       "--world-size 4 --cp 2 --ep 2 --num-experts 4 --zero-stage 2 "
       "--dtype f64"},
  };
  return kWays;
}

class EveryChapter : public ResumeTest,
                     public testing::WithParamInterface<Way> {};

// The rate rises through the stop. The second half also makes the claims of its
// page (bytes, memory, time), which checkpoints do not change.
TEST_P(EveryChapter, EndsWithTheBitsOfARunThatNeverStopped) {
  const std::string chapter = GetParam().chapter;
  const std::string options = GetParam().options + " --warmup 5";
  const Outcome whole =
      plain(chapter, options + " --steps 6 --no-check --cluster none --save " +
                         path("whole") + " --log " + path("whole.log"));
  ASSERT_EQ(whole.status, 0) << whole.text;
  const std::string log = " --log " + path("parts.log");
  expect_done(
      train(chapter, options + " --steps 3 --no-check --cluster none" + log));
  expect_done(train(
      chapter, options + " --steps 6 --checkpoint-every 2 --resume --save " +
                   path("parts") + log));
  EXPECT_TRUE(read(path("parts")) == read(path("whole"))) << "other weights";
  EXPECT_EQ(names(),
            (std::vector<std::string>{"step-00000004", "step-00000006"}));

  // Losses, rates and norms as well
  std::istringstream expected(read(path("whole.log")));
  std::istringstream found(read(path("parts.log")));
  int lines = 0;
  for (std::string a, b; std::getline(expected, a); ++lines) {
    ASSERT_TRUE(std::getline(found, b));
    const auto x = nlohmann::json::parse(a), y = nlohmann::json::parse(b);
    for (const char* key : {"step", "loss", "lr", "grad_norm"}) {
      EXPECT_EQ(x[key], y[key]) << key << " in line " << lines;
    }
  }
  EXPECT_EQ(lines, 6);
}

INSTANTIATE_TEST_SUITE_P(Ways, EveryChapter, testing::ValuesIn(all_ways()),
                         [](const auto& info) {
                           std::string name = info.param.chapter + "_" +
                                              std::to_string(info.index);
                           return "Ch" + name;
                         });

/// Each run goes on from the one before, in another chapter or on other ranks.
/// The last two compare their weights with one device that trained all steps.
class OtherMeshes : public ResumeTest {
 protected:
  void train_in_turn(const std::vector<Way>& ways) const {
    for (std::size_t i = 0; i < ways.size(); ++i) {
      SCOPED_TRACE(ways[i].chapter + " " + ways[i].options);
      expect_done(
          train(ways[i].chapter,
                ways[i].options + " --dtype f64 --cluster none --steps " +
                    std::to_string(2 * (i + 1)) + (i > 0 ? " --resume" : "") +
                    (i + 2 < ways.size() ? " --no-check" : "")));
    }
  }
};

TEST_F(OtherMeshes, AnotherMeshGoesOnWithTheSameNumbers) {
  const std::vector<Way> ways = {
      {"03_zero_fsdp", "--world-size 4 --strategy zero2"},
      {"03_zero_fsdp", "--world-size 2 --strategy fsdp2"},
      {"07_tensor_parallel", "--world-size 4 --vocabulary-divisible-by 100"},
      {"05_gpipe", "--world-size 3"},
      {"08_tensor_parallel_2d", "--world-size 4"},
      {"10_tensor_parallel_3d", "--world-size 8"},
      {"11_dtensor", "--world-size 4 --mesh 2x2"},
      {"14_hybrid_3d",
       "--world-size 8 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel"},
      {"06_1f1b", "--world-size 2 --schedule interleaved"},
      {"14_hybrid_3d", "--world-size 4 --cp 2 --zero-stage 3"},
      {"12_sequence_parallel", "--world-size 2"},
      {"03_zero_fsdp", "--world-size 2 --strategy zero3"},
      {"01_data_parallel", "--world-size 2"},
      {"00_single_device", ""},
      {"02_ddp", "--world-size 4"},
  };
  train_in_turn(ways);
}

// Other meshes with the same groups of tokens route them alike.
TEST_F(OtherMeshes, ExpertsMoveToAnotherMesh) {
  std::vector<Way> ways;
  for (const char* options :
       {"--world-size 8 --tp 2 --pp 2 --ep 2 --zero-stage 1 --micro-batches 2",
        "--world-size 4 --ep 4 --zero-stage 2 --micro-batches 1",
        "--world-size 2 --pp 2 --micro-batches 4",
        "--world-size 4 --ep 2 --tp 2 --expert-tp --zero-stage 2 "
        "--micro-batches 2",
        "--world-size 2 --ep 2 --zero-stage 1 --micro-batches 2"}) {
    ways.push_back({"14_hybrid_3d", options + std::string(" --num-experts 4")});
  }
  train_in_turn(ways);
}

TEST_F(ResumeTest, KeepsTheLastTwo) {
  expect_done(
      train("00_single_device", "--steps 7 --checkpoint-every 2 --no-check"));
  EXPECT_EQ(names(),
            (std::vector<std::string>{"step-00000006", "step-00000007"}));
}

TEST_F(ResumeTest, BeginsAnewWhereThereIsNoCheckpointYet) {
  expect_done(train("00_single_device", "--steps 2 --resume --no-check"));
  EXPECT_EQ(names(), std::vector<std::string>{"step-00000002"});
}

// As a job that is started again after it has ended. Its parameters are gathered
// all the same, through a buffer that the bill of memory knows.
TEST_F(ResumeTest, AFinishedRunHasItsWeights) {
  int i = 0;
  const std::string zero = "--strategy ";
  for (const auto& [chapter, strategy] :
       {std::pair{"03_zero_fsdp", zero + "zero1 --allgather-bucket-size 1000"},
        std::pair{"03_zero_fsdp", zero + "zero3 --dtype bf16"},
        std::pair{"14_hybrid_3d", std::string("--cp 2 --zero-stage 3")}}) {
    SCOPED_TRACE(strategy);
    const std::string options = kSmall +
                                (" --world-size 2 --steps 3 " + strategy) +
                                " --checkpoint " + path(std::to_string(++i));
    expect_done(run(chapter, options + " --save " + path("first")));
    expect_done(run(chapter, options + " --resume --save " + path("again")));
    EXPECT_TRUE(read(path("again")) == read(path("first"))) << "other weights";
  }
}

// What is loaded has passed when the step begins: the step takes its own time.
TEST_F(ResumeTest, LoadingIsNoPartOfTheFirstStep) {
  const std::string options = "--world-size 2 --strategy zero3";
  expect_done(train("03_zero_fsdp", options + " --steps 2"));
  const Outcome third = train("03_zero_fsdp", options + " --steps 3 --resume");
  EXPECT_EQ(third.status, 0) << third.text;
  const Outcome first = plain("03_zero_fsdp", options + " --steps 1");
  const auto virtual_ms = [](const std::string& text) {
    const std::size_t at = text.find("virtual  ");
    return at == std::string::npos ? 0 : std::stod(text.substr(at + 9));
  };
  EXPECT_GT(virtual_ms(third.text), 0);
  // The first of all steps makes the optimizer's state as well
  EXPECT_LE(virtual_ms(third.text), virtual_ms(first.text));
}

TEST_F(ResumeTest, NumbersThatAreNotFinitePushOutNoCheckpoint) {
  const Outcome outcome =
      train("00_single_device",
            "--steps 12 --checkpoint-every 1 --optimizer sgd --lr 1e9 "
            "--no-check");
  expect_text(outcome.text, {"losses are not finite"});
  const Outcome rest = train("00_single_device",
                             "--steps 12 --optimizer sgd --lr 1e9 --no-check "
                             "--resume");
  EXPECT_EQ(rest.text.find("cannot"), std::string::npos) << rest.text;
  EXPECT_LT(names().back(), "step-00000012");
}

// --- Stops -------------------------------------------------------------------

class Stops : public ResumeTest {
 protected:
  /// A long run that is sent a signal when it has logged `lines` steps.
  Outcome stop(const std::string& chapter, const std::string& options,
               int lines, int signal) const {
    const Outcome outcome =
        run_until(chapter,
                  kSmall + (" " + options) +
                      " --steps 4000 --cluster none --no-check --checkpoint " +
                      checkpoints(),
                  path("log"), lines, signal);
    EXPECT_GE(logged(), lines) << outcome.text;
    return outcome;
  }
  int logged() const {
    const std::string text = read(path("log"));
    return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  }
  int newest() const {
    const std::vector<std::string> all = names();
    return all.empty() ? 0 : std::stoi(all.back().substr(5));
  }
};

struct Stopped {
  std::string chapter, options;
  int signal;
};

class Signals : public Stops, public testing::WithParamInterface<Stopped> {};

// The rate depends on the step and on the number of all steps
TEST_P(Signals, TheStepsSoFarAreKept) {
  const auto& [chapter, more, signal] = GetParam();
  const std::string schedule = more + " --lr-schedule cosine --warmup 5";
  const Outcome stopped = stop(chapter, schedule, 8, signal);
  const int done = newest();
  EXPECT_EQ(done, logged()) << "all ranks stop after the same step";
  expect_end(stopped, 128 + signal,
             {"interrupted after " + std::to_string(done) +
              " of 4000 steps; --resume goes on from " + step(done)});
  EXPECT_EQ(names().size(), 1u);

  // The schedule of another number of steps is another run
  expect_refused(train(chapter, schedule + " --steps 5000 --resume"),
                 {"--steps 4000 there, 5000 here"});
}

std::vector<Stopped> stopped_ways() {
  std::vector<Stopped> ways = {
      {"00_single_device", "", SIGTERM},
      {"05_gpipe", "--world-size 3", SIGINT},
      {"03_zero_fsdp", "--world-size 2 --strategy zero2", SIGTERM}};
  if (SHARDBOOK_HAVE_GLOO) {
    ways.push_back({"02_ddp", "--world-size 2 --backend gloo", SIGTERM});
    ways.push_back({"06_1f1b", "--world-size 3 --backend gloo", SIGINT});
  }
  return ways;
}
INSTANTIATE_TEST_SUITE_P(Ways, Signals, testing::ValuesIn(stopped_ways()),
                         [](const auto& info) {
                           return "Ch" + info.param.chapter;
                         });

// Killed between or inside of checkpoints: the run goes on from one of the last
TEST_F(Stops, AKilledRunLosesTheStepsSinceTheLastCheckpoint) {
  const std::string options =
      std::string("--world-size 2 --checkpoint-every 5") +
      (SHARDBOOK_HAVE_GLOO ? " --backend gloo" : "");
  expect_end(stop("02_ddp", options, 23, -SIGKILL), 128 + SIGKILL);
  const int done = newest(), steps = logged();
  EXPECT_GE(done, steps - 5 - 1);
  EXPECT_EQ(done % 5, 0);

  const std::string rest = " --no-check --steps " + std::to_string(done + 3);
  expect_done(train("02_ddp", options + rest + " --resume --save " +
                                  path("parts") + " --log " + path("log")));
  EXPECT_EQ(logged(), done + 3) << "no step twice";
  expect_done(
      plain("02_ddp", "--world-size 2" + rest + " --save " + path("whole")));
  EXPECT_TRUE(read(path("parts")) == read(path("whole"))) << "other weights";
}

}  // namespace
}  // namespace shardbook
