// The Llama family against transformers: tests/golden has models, tokens, and what
// transformers 5.24 computed with them in f64.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/programs/programs.h"
#include "core/safetensors.h"
#include "core/xtensor.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using nlohmann::json;

std::string golden(const std::string& model, const std::string& file) {
  return std::string(SHARDBOOK_ROOT) + "/tests/golden/" + model + "/" + file;
}

json expected_of(const std::string& model) {
  return json::parse(std::ifstream(golden(model, "expected.json")));
}

/// The line that trains this model as transformers did.
std::string line_of(const std::string& model, const std::string& more,
                    const std::string& chapter = "00_single_device") {
  const json expected = expected_of(model);
  return chapter + " --model " + golden(model, "config.json") + " --load " +
         golden(model, "model.safetensors") + " --data " +
         golden(model, "tokens.u16") + " --batch " + expected["batch"].dump() +
         " --seq " + expected["seq"].dump() + " --dtype f64 --no-check " + more;
}

std::vector<double> values_of(const SafetensorsFile& file,
                              const std::string& name) {
  const SafetensorsEntry& entry = file.find(name);
  std::vector<double> values;
  std::int64_t count = 1;
  for (const std::int64_t size : entry.shape) count *= size;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    values.push_back(entry.dtype == DType::kF64
                         ? static_cast<const double*>(file.data(entry))[at]
                         : static_cast<const float*>(file.data(entry))[at]);
  }
  return values;
}

class Llama : public testing::TestWithParam<const char*> {};

TEST_P(Llama, LossesAndNormsOfFourStepsAreThoseOfTransformers) {
  const TempFolder folder;
  const json expected = expected_of(GetParam());
  run(line_of(GetParam(),
              "--steps 4 --optimizer adamw --lr 0.003 "
              "--weight-decay 0.1 --log " +
                  (folder / "log.jsonl")));
  // transformers averages the shares of the balancing loss in f32
  const bool is_balanced = std::string(GetParam()) == "mixtral_aux_loss";
  const double relative = is_balanced ? 1e-9 : 1e-10;
  std::ifstream log(folder / "log.jsonl");
  std::size_t step = 0;
  for (std::string line; std::getline(log, line); ++step) {
    const json entry = json::parse(line);
    const double loss = expected["losses"][step];
    const double norm = expected["grad_norms"][step];
    EXPECT_NEAR(entry["loss"], loss, relative * loss) << step;
    EXPECT_NEAR(entry["grad_norm"], norm, relative * norm) << step;
  }
  EXPECT_EQ(step, 4u);
}

TEST_P(Llama, LogitsAreThoseOfTransformers) {
  const TempFolder folder;
  run(line_of(GetParam(), "--steps 0 --logits " + (folder / "logits.npy")));
  const Tensor logits = load_npy(folder / "logits.npy");
  const std::vector<double> ours = logits.to_vector<double>();
  const std::vector<double> theirs = values_of(
      SafetensorsFile::open(golden(GetParam(), "expected.safetensors")),
      "logits_step0");
  ASSERT_EQ(ours.size(), theirs.size());
  double largest = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    largest = std::max(largest, std::abs(ours[i] - theirs[i]));
  }
  EXPECT_LT(largest, 2e-7);
}

// A step of SGD with rate 1 subtracts the gradient; files have their own names and
// layouts.
TEST_P(Llama, GradientsOfTheFirstStepAreThoseOfTransformers) {
  const TempFolder folder;
  run(line_of(GetParam(), "--steps 1 --optimizer sgd --lr 1 --save " +
                              (folder / "after.safetensors")));
  const auto before =
      SafetensorsFile::open(golden(GetParam(), "model.safetensors"));
  const auto after = SafetensorsFile::open(folder / "after.safetensors");
  const auto theirs =
      SafetensorsFile::open(golden(GetParam(), "expected.safetensors"));
  std::size_t compared = 0;
  for (const SafetensorsEntry& entry : before.entries()) {
    const auto w0 = values_of(before, entry.name);
    const auto w1 = values_of(after, entry.name);
    const auto gradient = values_of(theirs, "grad_step0." + entry.name);
    ASSERT_EQ(w1.size(), w0.size()) << entry.name;
    for (std::size_t i = 0; i < w0.size(); ++i) {
      ASSERT_NEAR(w0[i] - w1[i], gradient[i], 1e-6) << entry.name << " " << i;
    }
    ++compared;
  }
  EXPECT_GT(compared, 10u);
}

// Angles are kept for each length: a shorter sample has its own.
TEST(LlamaAngles, FollowTheLengthOfTheSample) {
  const ModelConfig config = ModelConfig::read("llama-nano");
  InitOptions init;
  init.dtype = DType::kF64;
  const auto model = make_model(config, init);
  const auto tokens = [](std::int64_t s) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < s; ++i) ids.push_back(i * i % 11);
    return Tensor::from_values(ids, {1, s});
  };
  const Tensor longer = (*model)(tokens(12));
  const auto shorter = (*model)(tokens(5)).to_vector<double>();
  const auto start = slice(longer, 1, 0, 5).to_vector<double>();
  for (std::size_t i = 0; i < start.size(); ++i) {
    ASSERT_NEAR(start[i], shorter[i], 1e-12);
  }
}

TEST(LlamaRefusals, NameWhatIsNotTrained) {
  expect_error([] { run("05_gpipe --model llama-nano --long-skips"); },
               {"--long-skips", "llama"});
  expect_error([] { run("00_single_device --model llama-nano --seq 300"); },
               {"300", "256"});
  expect_error([] { run("02_ddp --model llama-nano --dropout 0.1"); },
               {"--dropout 0.1"});
}

std::string name_of(const testing::TestParamInfo<const char*>& info) {
  return info.param;
}
INSTANTIATE_TEST_SUITE_P(Golden, Llama,
                         testing::Values("llama_gqa", "llama_tied_llama3_rope",
                                         "llama_biases", "llama_eight_blocks",
                                         "qwen2_bias_tied", "qwen3_qk_norm",
                                         "mixtral_top2", "mixtral_aux_loss"),
                         name_of);

}  // namespace
}  // namespace shardbook
