// Every strategy has the losses and norms that transformers computed on one
// device: tests/golden/strategies.txt lists models and lines.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/programs/programs.h"
#include "tests/cli/programs.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using nlohmann::json;

const std::string kGolden = std::string(SHARDBOOK_ROOT) + "/tests/golden/";

struct Case {
  std::string model, line;
  std::string refusal;  ///< empty: it trains
};

std::vector<Case> cases() {
  const std::vector<std::string> dense = {
      "llama_gqa",          "llama_tied_llama3_rope", "llama_biases",
      "llama_eight_blocks", "qwen2_bias_tied",        "qwen3_qk_norm"};
  std::vector<Case> all;
  std::ifstream file(kGolden + "strategies.txt");
  for (std::string text; std::getline(file, text);) {
    if (text.empty() || text[0] == '#') continue;
    const std::size_t colon = text.find(": "), arrow = text.find(" => ");
    Case each;
    each.line = text.substr(colon + 2, arrow - colon - 2);
    if (arrow != std::string::npos) each.refusal = text.substr(arrow + 4);
    std::istringstream names(text.substr(0, colon));
    for (std::string name; names >> name;) {
      const auto models =
          name == "dense" ? dense : std::vector<std::string>{name};
      for (const std::string& model : models) {
        each.model = model;
        all.push_back(each);
      }
    }
  }
  return all;
}

void PrintTo(const Case& each, std::ostream* out) {
  *out << each.model << ": " << each.line;
}

class GoldenStrategies : public testing::TestWithParam<Case> {};

TEST_P(GoldenStrategies, HaveTheLossesOfTransformers) {
  const auto& [model, line, refusal] = GetParam();
  const TempFolder folder;
  const json expected =
      json::parse(std::ifstream(kGolden + model + "/expected.json"));
  const std::size_t space = line.find(' ');
  const std::string chapter = line.substr(0, space);
  const std::string options =
      " --model " + kGolden + model + "/config.json --load " + kGolden + model +
      "/model.safetensors --data " + kGolden + model + "/tokens.u16 --batch " +
      expected["batch"].dump() + " --seq " + expected["seq"].dump() +
      " --steps 4 --optimizer adamw --lr 0.003 --weight-decay 0.1 --dtype f64 "
      "--no-check --log " +
      (folder / "log.jsonl") +
      (space == std::string::npos ? "" : line.substr(space));
  if (!refusal.empty()) {
    return expect_error([&] { run(chapter + options); }, {refusal});
  }
  if (options.find("--backend gloo") == std::string::npos) {
    run(chapter + options);
  } else {
    ASSERT_EQ(run(chapter, options).status, 0);
  }
  // transformers averages the shares of the balancing loss in f32
  const double relative = model == "mixtral_aux_loss" ? 1e-9 : 1e-10;
  std::ifstream log(folder / "log.jsonl");
  std::size_t step = 0;
  for (std::string text; std::getline(log, text); ++step) {
    const json entry = json::parse(text);
    const double loss = expected["losses"][step];
    const double norm = expected["grad_norms"][step];
    EXPECT_NEAR(entry["loss"], loss, relative * loss) << step;
    EXPECT_NEAR(entry["grad_norm"], norm, relative * norm) << step;
  }
  EXPECT_EQ(step, 4u);
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  std::string name = info.param.line + " " + info.param.model;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}
INSTANTIATE_TEST_SUITE_P(All, GoldenStrategies, testing::ValuesIn(cases()),
                         name_of);

}  // namespace
}  // namespace shardbook
