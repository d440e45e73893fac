// DeepSpeed's script on CIFAR-10 as a program: every option of it, and mistakes.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cli/programs.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

using nlohmann::json;

const std::string kMoe = "--format json --steps 3 --moe --num-experts 2,4 ";

json trained(const std::string& options) {
  const json report = json_of(run("cifar_moe", options));
  expect_claims(report);
  return report;
}

TEST(CifarMoe, EveryOptionOfTheScriptTrainsOnOneTwoAndFourRanks) {
  for (const char* ranks : {"1", "2", "4"}) {
    for (const char* options :
         {"--mlp-type residual --min-capacity 4 --dtype fp32 --stage 1 "
          "--moe-param-group",
          "--mlp-type residual --no-share-mlp --top-k 2 --ep-world-size 1 "
          "--dtype bf16 --stage 2",
          "--noisy-gate-policy RSample --dtype fp16 --stage 2 --cpu-offload",
          "--noisy-gate-policy Jitter --dtype fp64 --aux-coefficient 0.01"}) {
      SCOPED_TRACE(std::string(ranks) + " ranks, " + options);
      trained(kMoe + options + " --world-size " + ranks);
    }
  }
}

TEST(CifarMoe, WithoutExpertsTheConfigTrainsAsWell) {
  for (const char* options :
       {"--stage 0", "--stage 1 --dtype bf16", "--stage 2 --dtype fp32"}) {
    SCOPED_TRACE(options);
    trained(std::string("--format json --steps 3 --world-size 2 ") + options);
  }
}

// More ranks than experts: as many ranks as possible share a set.
TEST(CifarMoe, RanksAndExpertsNeedNotBeEquallyMany) {
  const Outcome outcome =
      run("cifar_moe",
          "--world-size 4 --moe --num-experts 2,4 --mlp-type residual "
          "--steps 2");
  EXPECT_EQ(outcome.status, 0) << outcome.text;
  expect_text(outcome.text, {"   3  2-3        2 3              1 3",
                             "accuracy ", "16 images", "equal"});
  trained("--format json --steps 2 --world-size 4 --moe --num-experts 1");
}

TEST(CifarMoe, LearnsTheColoursOfMadeUpImages) {
  const json report = json_of(
      run("cifar_moe",
          "--format json --steps 120 --world-size 2 --moe --num-experts 2,4 "
          "--mlp-type residual --dtype fp32 --no-check"));
  EXPECT_GT(report["accuracy"]["training"], 0.5);
  EXPECT_GT(report["accuracy"]["test"], 0.5);
  // Loads count the images of training alone
  const auto counts =
      report["expert_loads"]["moe_layer_list.0"].get<std::vector<int>>();
  EXPECT_EQ(counts[0] + counts[1], 120 * 16);
}

TEST(CifarMoe, ProcessesTrainAsThreadsDo) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  const std::string options = kMoe + "--dtype fp64 --stage 2 --world-size 2 ";
  const json threads = trained(options);
  const json processes = trained(options + "--backend gloo");
  EXPECT_NEAR(processes["loss"]["last"].get<double>(),
              threads["loss"]["last"].get<double>(), 1e-12);
  EXPECT_EQ(processes["accuracy"], threads["accuracy"]);
}

TEST(CifarMoe, MistakesAreSentences) {
  for (const auto& [options, sentence] :
       std::vector<std::pair<std::string, const char*>>{
           {"--moe --stage 3", "--stage 3: it gathers every parameter"},
           {"--stage 4", "--stage 4: out of range"},
           {"--moe --stage 1 --cpu-offload", "give --stage 2"},
           {"--moe --num-experts 4 --top-k 2 --noisy-gate-policy RSample",
            "--noisy-gate-policy RSample: samples the one choice of --top-k 1"},
           {"--moe --num-experts 4 --noisy-gate-policy Gumbel",
            "give one of none, RSample, Jitter"},
           {"--moe --num-experts 2 --top-k 3", "--top-k 3: a token chooses"},
           {"--moe --num-experts 2,x", "--num-experts 2,x: give numbers"},
           {"--num-experts 2,4",
            "--num-experts: the net has no experts; give "
            "--moe"},
           {"--world-size 3", "give 1, 2, 4, 8 or 16"},
           {"--world-size 4 --moe --num-experts 2,4 --ep-world-size 3",
            "--ep-world-size 3: the 4 ranks do not divide by it"},
           {"--world-size 4 --moe --num-experts 2,4 --ep-world-size 4",
            "--ep-world-size 4: 2 experts do not divide by it"},
           {"--mlp-type shared", "give one of standard, residual"},
           {"--dtype f16", "give one of fp16, bf16, fp32, fp64"},
           {"--residual", "--mlp-type residual"},
           {"--ep 2", "--ep-world-size"},
           {"--data /no/such/folder", "give cifar-10-batches-bin"}}) {
    expect_refused({"cifar_moe", options, sentence});
  }
}

}  // namespace
}  // namespace shardbook
