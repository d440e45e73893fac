// All forms of expert parallelism against one device: losses, norms, weights,
// bytes, memory.

#include <initializer_list>
#include <map>

#include "tests/chapters/13_moe/moe_run_support.h"

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/program.h"
#include "core/safetensors.h"
#include "tests/chapters/common/claims_support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/core/support.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"
#include "tests/support/temp_folder.h"

namespace shardbook::moe {
namespace {

Options small_options(int world_size) { return tiny_gpt("13_moe", world_size); }

StrategyOptions how_of(const Form& form) {
  StrategyOptions setup = setup_of(form);
  setup.moe.gate.num_experts = form.world % 3 == 0 ? 6 : 8;
  setup.moe.gate.capacity_factor = 1;
  setup.moe.aux_coefficient = 0.3;  // large, so that its scale shows
  return setup;
}

class MoeForms : public testing::TestWithParam<Form> {};

TEST_P(MoeForms, EveryClaimHolds) {
  const Form& form = GetParam();
  Options options = small_options(form.world);
  options.cluster = "textbook";
  const StrategyOptions setup = how_of(form);
  const Report report = train_on(options, setup);
  expect_claims(report);
  textbook::expect_closed_form(report);
  // Every element counts once in the norm
  const ReferenceRun one = train_reference(options, setup);
  for (std::size_t k = 0; k < one.grad_norms.size(); ++k) {
    EXPECT_NEAR(report.grad_norms[k], one.grad_norms[k],
                1e-9 * one.grad_norms[k]);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, MoeForms,
    testing::Values(Form{"One", 1}, Form{"E2", 2}, Form{"E3", 3}, Form{"E4", 4},
                    Form{"E8", 8}, Form{"EMicro", 4, 0, 1, 0, 2, 2},
                    Form{"Replicated", 4, 1}, Form{"ED", 4, 2},
                    Form{"ED8", 8, 2},
                    Form{"EDSwapped", 8, 2, 1, 0, 1, 1, true},
                    Form{"ED6", 6, 3}, Form{"EZ1", 4, 4, 1, 1},
                    Form{"EZ2", 4, 4, 1, 2, 2}, Form{"EDZ1", 4, 2, 1, 1, 3, 2},
                    Form{"EDZ2", 8, 2, 1, 2},
                    Form{"EDZ2Swapped", 8, 4, 1, 2, 1, 3, true},
                    Form{"EDM", 8, 2, 2}, Form{"EM", 4, 2, 2, 0, 3},
                    Form{"EMExpertTp", 4, 2, 2, 0, 1, 1, false, true},
                    Form{"EDMExpertTp", 8, 2, 2, 0, 1, 2, false, true},
                    Form{"EZM", 4, 2, 2, 2}, Form{"EDZM", 8, 2, 2, 1},
                    Form{"EZMExpertTp", 4, 2, 2, 2, 1, 1, false, true},
                    Form{"EZOffM", 4, 2, 2, 2, 1, 1, false, false, true},
                    Form{"EDZOffM", 8, 2, 2, 2, 2, 1, false, false, true}),
    [](const auto& each) { return each.param.name; });

TEST(MoeTraining, ClipsByTheGlobalNorm) {
  Options options = small_options(4);
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.5;
  options.clip = 0.05;
  for (int zero : {0, 1, 2}) {
    for (int tp : {1, 2}) {
      Form form{"", 4, 2, tp, zero};
      expect_claims(train_on(options, how_of(form)));
    }
  }
}

// A saved model has one copy of each parameter, so the copies are compared
// here. Ranks 0 and 2 share experts, as do 1 and 3; all share the rest.
TEST(MoeTraining, CopiesStayEqualBitForBit) {
  for (const int zero : {0, 1, 2}) {
    const Options options = small_options(4);
    const StrategyOptions setup = how_of({"", 4, 2, 1, zero});
    const auto found = on_ranks(4, [&](ProcessGroup& world) {
      DeviceMesh mesh(world, expert_topology(group_sizes(options, setup)));
      MoeStrategy strategy(options, setup, mesh);
      for (std::int64_t k = 0; k < 3; ++k) strategy.step(k);
      std::map<std::string, std::vector<double>> state;
      for (const NamedTensor& each : strategy.model().named_parameters()) {
        state[each.name] = each.tensor.to_vector<double>();
      }
      return state;
    });
    for (const auto& [name, value] : found[0]) {
      SCOPED_TRACE(testing::Message() << name << " zero " << zero);
      EXPECT_TRUE(value == found[2].at(name));
      EXPECT_TRUE(found[1].at(name) == found[3].at(name));
      EXPECT_EQ(value == found[1].at(name), !is_expert(name));
    }
  }
}

TEST(MoeTraining, TenStepsEqualOneDevice) {
  for (const std::string optimizer : {"sgd", "adamw"}) {
    Options options = small_options(4);
    options.steps = 10;
    options.optimizer = optimizer;
    if (optimizer == "sgd") {
      options.optimizer_options.lr = 0.1;
      options.optimizer_options.momentum = 0.9;
    }
    const StrategyOptions setup = how_of({"", 4, 2, 1, 1, 2});
    const ReferenceRun one = train_reference(options, setup);
    const Report report =
        train_on(options, setup, [&](const Options&) { return one; });
    expect_claims(report);
    ASSERT_EQ(report.losses.size(), 10U);
    for (std::size_t k = 0; k < one.losses.size(); ++k) {
      EXPECT_NEAR(report.losses[k], one.losses[k], 1e-9 * one.losses[k]) << k;
    }
  }
}

TEST(MoeTraining, EveryGateHasItsRun) {
  using Change = void (*)(MoeOptions & m);
  for (const Change change : std::initializer_list<Change>{
           [](MoeOptions& m) { m.gate.noise = Noise::kJitter; },
           [](MoeOptions& m) { m.gate.noise = Noise::kRSample; },
           [](MoeOptions& m) { m.gate.noise = Noise::kNoisyTopK; },
           [](MoeOptions& m) { m.gate.use_rts = false; },
           [](MoeOptions& m) { m.use_residual = true; },
           [](MoeOptions& m) { m.shared_expert = m.gate_shared_expert = true; },
           [](MoeOptions& m) { m.are_copies = true; },
           [](MoeOptions& m) {
             m.num_experts.assign({1, 4});
           },
           [](MoeOptions& m) {
             m.num_experts.assign({2, 8});
           },
           [](MoeOptions& m) { m.is_naive = true; },
           [](MoeOptions& m) { m.is_dropless = true; },
           [](MoeOptions& m) { m.gate.drop_tokens = false; },
           [](MoeOptions& m) { m.z_coefficient = 0.1; }}) {
    StrategyOptions setup = how_of({"", 4, 2});
    change(setup.moe);
    expect_claims(train_on(small_options(4), setup));
  }
}

TEST(MoeTraining, WithTensorParallelismEveryGateHasItsRun) {
  for (const bool expert_tp : {false, true}) {
    for (const bool residual : {false, true}) {
      StrategyOptions setup = how_of({"", 4, 2, 2});
      setup.moe.expert_tensor_parallel = expert_tp;
      setup.moe.use_residual = residual;
      setup.moe.gate.noise = Noise::kJitter;
      setup.moe.gate.drop_tokens = residual;
      expect_claims(train_on(small_options(4), setup));
    }
  }
}

// The update of experts does not depend on ep: the same run for all divisors,
// by SGD, which shows the scale of gradients.
TEST(MoeTraps, ExpertUpdatesDoNotDependOnEp) {
  Options options = small_options(4);
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.3;
  StrategyOptions setup = how_of({"", 4, 1});
  const ReferenceRun one = train_reference(options, setup);
  for (int zero : {0, 1, 2}) {
    for (int ep : {1, 2, 4}) {
      setup.ep = ep, setup.zero_stage = zero;
      EXPECT_TRUE(train_on(options, setup, [&](const Options&) { return one; })
                      .parity.passed)
          << "ep " << ep << " zero " << zero;
    }
  }
}

TEST(MoeTraining, RefusesWhatDoesNotWork) {
  const auto expect_refused = [](StrategyOptions setup, const std::string& part,
                                 void (*change)(StrategyOptions & setup)) {
    change(setup);
    expect_error([&] { train_on(small_options(4), setup); }, {part});
  };
  expect_refused(how_of({"", 4, 2}), "--zero-stage 3",
                 [](StrategyOptions& setup) { setup.zero_stage = 3; });
  expect_refused(how_of({"", 4, 4}), "--ep 4", [](StrategyOptions& setup) {
    setup.moe.gate.num_experts = 6;
  });
  // An odd number of slots
  expect_refused(how_of({"", 4, 2, 2}), "--tp 2", [](StrategyOptions& setup) {
    setup.moe.gate.capacity_factor = 1.03;
  });
  expect_refused(how_of({"", 4, 2}), "--cpu-offload",
                 [](StrategyOptions& setup) { setup.cpu_offload = true; });
}

// Each rank counts another piece of its shard, so no rank represents another.
TEST(MoeTraining, VirtualTimeIsPredictedUnderZeroAndTensorParallelism) {
  Options options = small_options(8);
  options.cluster = "dgx-a100";
  options.steps = 2;
  for (int zero : {0, 1, 2}) {
    const Report report = train_on(options, how_of({"", 8, 2, 2, zero}));
    EXPECT_NEAR(report.time.step_s, report.time.simulated_step_s,
                1e-9 * report.time.step_s)
        << zero;
  }
}

// A run on shapes draws the routing at random; messages and slots still fit.
TEST(MoeTraining, RunsOnShapes) {
  Options options = small_options(4);
  options.backend = "sim";
  options.cluster = "dgx-a100";
  for (bool dropless : {false, true}) {
    for (bool drop_tokens : {true, false}) {
      StrategyOptions setup = how_of({"", 4, 2, 1, 0, 2, 2});
      setup.moe.is_dropless = dropless;
      setup.moe.gate.drop_tokens = drop_tokens;
      EXPECT_GT(train_on(options, setup).time.step_s, 0);
    }
  }
}

TEST(MoeTraining, SavesTheWholeModelAndLoadsItsParts) {
  const TempFolder folder;
  Options options = small_options(4);
  options.steps = 2;
  options.save = folder / "experts.safetensors";
  train_on(options, how_of({"", 4, 2}));
  // transformers must not load it as a GPT-2 with random MLPs
  const std::string config =
      CheckpointReader::open(options.save).metadata().at("config");
  EXPECT_EQ(config.find("GPT2LMHeadModel"), std::string::npos) << config;
  EXPECT_EQ(config.find("\"gpt2\""), std::string::npos) << config;
  options.load = options.save;
  options.save.clear();
  for (int ep : {1, 2, 4}) {
    for (int tp : {1, 2}) {
      if (ep * tp > 4) continue;
      expect_claims(train_on(options, how_of({"", 4, ep, tp})));
    }
  }
}

TEST(MoeTraining, ExactGeluEqualsOneDevice) {
  Options options = small_options(4);
  options.model.replace(0, 1, R"({"activation_function": "gelu", )");
  expect_claims(train_on(options, how_of({"", 4, 2, 2, 2, 1, 1, false, true})));
}

TEST(MoeTraining, F32EqualsOneDevice) {
  Options options = small_options(8);
  options.dtype = DType::kF32;
  options.steps = 10;
  expect_claims(train_on(options, how_of({"", 8, 2, 2})));
  expect_claims(train_on(options, how_of({"", 8, 4, 1, 2})));
}

}  // namespace
}  // namespace shardbook::moe
