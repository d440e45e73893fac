// What --resume compares: every option of every program, unless its declaration
// has a reason.

#include "chapters/common/run/run_identity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>

#include "chapters/00_single_device/single_device.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "chapters/11_dtensor/dtensor_strategy.h"
#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/13_moe/moe_strategy.h"
#include "chapters/14_hybrid_3d/degrees.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

using Words = std::vector<std::string>;

/// A program's command line, and the variables of its options.
struct Program {
  explicit Program(const std::string& name)
      : line(std::make_unique<CommandLine>(name, "")) {
    add_shared_options(*line, options);
  }

  /// Reads words as a user types them.
  void parse(Words words) {
    words.insert(words.begin(), line->program());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    line->parse(static_cast<int>(pointers.size()), pointers.data());
  }
  std::string value_of(const std::string& flag) const {
    for (const auto& [name, value] : line->values()) {
      if (name == flag) return value;
    }
    return "";
  }
  Manifest manifest() const {
    Manifest kept;
    put_identity(line->compared(), kept);
    return kept;
  }

  Options options;
  std::unique_ptr<CommandLine> line;
  std::shared_ptr<void> setup;
};

using MakeProgram = std::function<std::unique_ptr<Program>()>;

template <typename Setup>
MakeProgram with(const std::string& name, void (*add)(CommandLine&, Setup&)) {
  return [=] {
    auto program = std::make_unique<Program>(name);
    const auto setup = std::make_shared<Setup>();
    add(*program->line, *setup);
    program->setup = setup;
    return program;
  };
}

struct ModelParallel {
  model_parallel::Settings settings;
  model_parallel::Extras extras;
};
void add_model_parallel(CommandLine& line, ModelParallel& setup) {
  add_options(line, setup.settings, setup.extras);
}

std::vector<MakeProgram> programs() {
  return {[] { return std::make_unique<Program>("shared"); },
          with("ch00", single_device::add_options),
          with("ch02", ddp::add_options),
          with("ch03", zero_fsdp::add_options),
          with("ch04", add_model_parallel),
          with("ch05", gpipe::add_options),
          with("ch06", pipeline::add_options),
          with("ch07", tensor_parallel::add_options),
          with("ch09", add_passes),
          with("ch10", cube::add_options),
          with("ch11", dtensor::add_options),
          with("ch12", sequence_parallel::add_options),
          with("ch13", moe::add_options),
          with("ch14", hybrid::add_options)};
}

/// A program whose option has another value than it has by default; null where
/// none of the values that most options understand is one.
std::unique_ptr<Program> changed(const MakeProgram& make,
                                 const std::string& flag, const Words& before) {
  const std::string usual = make()->value_of(flag);
  std::vector<Words> ways;
  if (usual == "true" || usual == "false") {
    ways = {{usual == "true" ? "--no-" + flag.substr(2) : flag}};
  } else {
    for (const char* value : {"2", "1", "0.5", "bf16", "walk", "sgd", "linear",
                              "mse", "rsample", "position", "megatron"}) {
      ways.push_back({flag, value});
    }
  }
  for (Words words : ways) {
    words.insert(words.begin(), before.begin(), before.end());
    auto program = make();
    if (!error_of([&] { program->parse(words); }).empty()) continue;
    if (program->value_of(flag) != usual) return program;
  }
  return nullptr;
}

TEST(RunIdentity, HasEveryOptionOrAReasonWhyNot) {
  for (const MakeProgram& make : programs()) {
    const auto program = make();
    program->parse({"--lr-schedule", "cosine"});
    std::set<std::string> seen = {"the program"};
    for (const ComparedOption& each : program->line->compared()) {
      seen.insert(each.name);
    }
    for (const auto& [flag, why] : program->line->not_compared()) {
      EXPECT_GT(why.size(), 10u) << flag;
      EXPECT_TRUE(seen.insert(flag).second) << flag;
    }
    for (const auto& [flag, value] : program->line->values()) {
      EXPECT_EQ(seen.count(flag), 1u)
          << flag << " of " << program->line->program();
    }
  }
}

TEST(RunIdentity, IsAnotherOneWithAnotherValue) {
  const Words cosine = {"--lr-schedule", "cosine"};
  std::set<std::string> seen;  // the shared options, once
  for (const MakeProgram& make : programs()) {
    const auto usual = make();
    usual->parse(cosine);
    const Manifest there = usual->manifest();
    EXPECT_EQ(differences(there, usual->line->compared()), "");
    for (const ComparedOption& each : usual->line->compared()) {
      if (seen.count(each.name) > 0) continue;
      const bool is_schedule = each.name == "--lr-schedule";
      const auto other =
          changed(make, each.name, is_schedule ? Words() : cosine);
      ASSERT_NE(other, nullptr) << "no other value of " << each.name;
      const std::string text = differences(there, other->line->compared());
      EXPECT_TRUE(has_text(text, each.name + " ")) << each.name << ": " << text;
    }
    if (!seen.empty()) continue;
    for (const auto& each : usual->line->compared()) seen.insert(each.name);
  }
}

std::string text_of(const MakeProgram& there, const Words& before,
                    const MakeProgram& here, const Words& after) {
  const auto first = there(), second = here();
  first->parse(before);
  second->parse(after);
  return differences(first->manifest(), second->line->compared());
}

TEST(RunIdentity, AProgramWithoutAnOptionHasItsDefault) {
  const auto ddp = with("ch02", ddp::add_options);
  const auto experts = with("ch13", moe::add_options);
  const auto hybrid = with("ch14", hybrid::add_options);
  EXPECT_EQ(text_of(ddp, {}, hybrid, {}), "");
  EXPECT_EQ(text_of(hybrid, {}, ddp, {}), "");
  EXPECT_EQ(text_of(hybrid, {"--top-k", "2"}, ddp, {}),
            "--top-k 2 there, 1 here");
  EXPECT_EQ(text_of(ddp, {}, hybrid, {"--top-k", "2", "--noise", "jitter"}),
            "--noise none there, jitter here; --top-k 1 there, 2 here");
  // Chapter 13 has eight experts by default, and other chapters have none
  EXPECT_EQ(text_of(experts, {}, ddp, {}), "--num-experts 8 there, 1 here");
  EXPECT_EQ(text_of(hybrid, {"--num-experts", "8"}, experts, {}), "");
  EXPECT_EQ(
      text_of(hybrid, {"--num-experts", "8"}, experts, {"--min-capacity", "8"}),
      "--min-capacity 4 there, 8 here");
  EXPECT_EQ(
      text_of(with("ch04", add_model_parallel), {"--loss", "mse"}, ddp, {}),
      "--loss mse there, cross_entropy here");
}

// As the checkpoint of an older version of the program.
TEST(RunIdentity, AnOptionThatACheckpointLacksHasItsDefault) {
  const auto make = with("ch14", hybrid::add_options);
  Manifest older = make()->manifest();
  older.otherwise.clear();
  older.run.erase("--top-k");
  const auto same = make(), other = make();
  EXPECT_EQ(differences(older, same->line->compared()), "");
  other->parse({"--top-k", "2"});
  EXPECT_EQ(differences(older, other->line->compared()),
            "--top-k 1 there, 2 here");
}

}  // namespace
}  // namespace shardbook
