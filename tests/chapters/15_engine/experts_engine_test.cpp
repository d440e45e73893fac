// A module with layers of experts under the engine: the documents' net for
// CIFAR-10, on any ranks, against the same net on one device.

#include <limits>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/13_moe/moe_strategy.h"
#include "tests/chapters/15_engine/expert_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::engine {
namespace {

// --- Equality with one device ----------------------------------------------------

class ExpertsUnderEngine : public testing::TestWithParam<int> {};

TEST_P(ExpertsUnderEngine, EqualOneDeviceAtEveryStage) {
  const int ranks = GetParam();
  const moe::ConvNetOptions net = documents_net();
  for (const std::int64_t g : sized<std::int64_t>({1, 2}, {2})) {
    const Course one = on_one_device(net, static_cast<int>(ranks * g));
    for (const int ep : {1, 2, 4}) {
      if (ranks % ep != 0) continue;
      for (const int stage : {0, 1, 2}) {
        const Course found =
            under_engine(net, config_with(stage, g), ranks, ep);
        EXPECT_LT(distance(found, one), 1e-10)
            << "ep " << ep << ", stage " << stage << ", g " << g;
      }
    }
  }
}

// The norm counts experts of all ranks, and each once.
TEST_P(ExpertsUnderEngine, ClipByTheNormOfTheWholeGradient) {
  const int ranks = GetParam();
  const moe::ConvNetOptions net = documents_net();
  const Course one = on_one_device(net, ranks, 0.05);
  EXPECT_GT(one.norms[0], 0.1);
  for (const int stage : {0, 1, 2}) {
    const Course found = under_engine(
        net, config_with(stage, 1, R"(, "gradient_clipping": 0.05)"), ranks,
        ranks);
    EXPECT_LT(distance(found, one), 1e-10) << stage;
  }
}

// Random numbers belong to images, whatever rank they are on.
TEST_P(ExpertsUnderEngine, RouteAsOneDeviceWithEveryGate) {
  const int ranks = GetParam();
  struct Case {
    const char* name;
    std::function<void(moe::GateOptions&)> choose;
  };
  for (const Case& each : std::vector<Case>{
           {"RSample", [](auto& gate) { gate.noise = moe::Noise::kRSample; }},
           {"Jitter", [](auto& gate) { gate.noise = moe::Noise::kJitter; }},
           {"top-2 with Jitter",
            [](auto& gate) {
              gate.noise = moe::Noise::kJitter;
              gate.k = 2;
            }},
           {"nothing is dropped", [](auto& gate) { gate.drop_tokens = false; }},
           {"the first tokens stay", [](auto& gate) { gate.use_rts = false; }},
           {"no fewest slots", [](auto& gate) { gate.min_capacity = 0; }}}) {
    moe::ConvNetOptions net = documents_net();
    each.choose(net.moe.gate);
    const Course one = on_one_device(net, ranks);
    const int stage = each.name[0] == 'R' ? 2 : 0;
    const Course found = under_engine(net, config_with(stage, 1), ranks, ranks);
    EXPECT_LT(distance(found, one), 1e-10) << each.name;
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ExpertsUnderEngine,
                         testing::ValuesIn(sized<int>({1, 2, 4}, {2})));

// [TRAP] Experts divided by the ranks that sum them are ep times too large, and
// losses of gates that do not start where the loss starts are as many times too
// large as there are pieces.
TEST(ExpertsUnderEngineTraps, DifferFromTheRightResult) {
  const moe::ConvNetOptions net = documents_net();
  const Course one = on_one_device(net, 4);
  const Course larger_experts =
      on_one_device(net, 4, 0, [](const NamedTensor& each) {
        if (!moe::is_expert(each.name)) return;
        const NoGrad no_grad;
        each.tensor.set_grad(scale(each.tensor.grad(), 2));
      });
  EXPECT_GT(distance(larger_experts, one), 1e-4);
  moe::ConvNetOptions more = net;
  more.moe.aux_coefficient *= 2;
  EXPECT_GT(distance(on_one_device(more, 4), one), 1e-4);
  // One group of all tokens drops others
  EXPECT_GT(distance(on_one_device(net, 1), one), 1e-4);
}

TEST(ExpertsUnderEngine, SpreadEachLayerInItsOwnWay) {
  moe::ConvNetOptions options = documents_net();
  const Course one = on_one_device(options, 4);
  const Course found = on_ranks(4, [&](ProcessGroup& world) {
    // The second layer of a net whose ranks all share their experts
    DeviceMesh all(world, moe::expert_topology({.world = 4, .ep = 4}));
    moe::ConvNet other(options, {.ep = &all.group("ep")});
    Rank rank(options, config_with(2, 1), world, /*ep=*/2, {},
              [&](moe::ConvNet& net) {
                const AnyModule mlp = *net.moe_layers[0].mlp;
                net.moe_layers[1] = other.moe_layers[1];
                net.moe_layers[1].mlp = mlp;  // the one that layers share
              });
    return course_of(rank);
  })[0];
  EXPECT_LT(distance(found, one), 1e-10);
}

// Keys that ZeRO has for its sums hold for dense parameters and for experts.
TEST(ExpertsUnderEngine, DivideAndSendAsTheKeysSay) {
  const moe::ConvNetOptions net = documents_net();
  const Course one = on_one_device(net, 4);
  const std::string sums = R"(, "reduce_scatter": false)";
  for (const int stage : {1, 2}) {
    const auto found = [&](const std::string& more) {
      return under_engine(net, config_with(stage, 1, more, sums), 4, 2);
    };
    EXPECT_LT(distance(found(R"(, "gradient_predivide_factor": 3)"), one),
              1e-10);
    EXPECT_LT(distance(found(R"(, "prescale_gradients": true)"), one), 1e-10);
    const double narrow =
        distance(found(R"(, "communication_data_type": "fp32")"), one);
    EXPECT_TRUE(narrow > 1e-10 && narrow < 1e-6) << narrow;
  }
}

// Two tensor-parallel ranks, two that share experts: the experts' slots are cut,
// or the experts themselves.
TEST(ExpertsUnderEngine, TrainAGptCutOverTensorParallelRanks) {
  Options options = small_options();
  options.world_size = 4, options.steps = kSteps;
  options.optimizer = "sgd";
  options.optimizer_options = {.lr = 0.3, .momentum = 0.5};
  options.clip = 0.1;
  moe::StrategyOptions setup;
  setup.ep = setup.tp = 2;
  setup.moe.gate.num_experts = 4;
  setup.moe.num_experts = {4};
  setup.moe.aux_coefficient = 0.3;
  const ReferenceRun one = on_ranks(1, [&](ProcessGroup&) {
    return moe::train_reference(options, setup);
  })[0];
  const ModelConfig model = model_config(options);
  ModelConfig padded = model;
  padded.vocab_size = padded_vocabulary(model.vocab_size, 2);
  for (const bool cuts : {false, true}) {
    setup.moe.expert_tensor_parallel = cuts;
    for (const int stage : {0, 1, 2}) {
      SCOPED_TRACE(testing::Message()
                   << "stage " << stage << (cuts ? "c" : ""));
      const Course found = on_ranks(4, [&](ProcessGroup& world) {
        DeviceMesh mesh(world,
                        moe::expert_topology({.world = 4, .tp = 2, .ep = 2}));
        ProcessGroup &dp = mesh.group("edp-ep"), &tp = mesh.group("tp");
        LayerFactory layers = tensor_parallel::layers(model, tp);
        layers.mlp =
            moe::moe_mlp(setup.moe, {.ep = &mesh.group("ep"), .tp = &tp},
                         std::make_shared<moe::MoeRecord>());
        Gpt gpt(padded, {.seed = options.seed, .dtype = options.dtype}, layers);
        InitializeArgs args;
        args.mpu = {&dp, &tp, [&model](const std::string& name, int rank) {
                      return tensor_parallel::layout(model, name, rank, 2);
                    }};
        DeepSpeedConfig config =
            config_with(stage, 1, R"(, "gradient_clipping": 0.1)");
        config.batch.train = kBatch;
        const auto engine = initialize(gpt, config, world, args).engine;
        const Dataset data = Dataset::open(options, model);
        RandomState& random = RankContext::current().random;
        random.seed = options.seed;
        Course course;
        for (int k = 0; k < kSteps; ++k) {
          const Batch batch = data.batch(k, kBatch, {dp.rank(), 2}, kBatch / 2);
          random.step = static_cast<std::uint64_t>(k);
          random.batch = batch.slice;
          random.next_op = 0;
          const Tensor loss =
              layers.loss((*engine)(batch.inputs), batch.targets);
          engine->backward(loss);
          engine->step();
          course.losses.push_back(sum_over_ranks(dp, loss.item() / 2, "loss"));
          course.norms.push_back(engine->get_global_grad_norm());
        }
        course.weights = engine->full_state();
        return course;
      })[0];
      EXPECT_LT(largest_gap(found.losses, one.losses), 1e-10);
      EXPECT_LT(largest_gap(found.norms, one.grad_norms), 1e-10);
      ASSERT_EQ(found.weights.size(), one.parameters.size());
      for (std::size_t i = 0; i < one.parameters.size(); ++i) {
        const NamedTensor& expected = one.parameters[i];
        const Tensor rows =
            found.weights[i].tensor.rows_view(0, expected.tensor.size(0));
        EXPECT_LT(
            largest_gap(values_of({{"", rows.clone()}}), values_of({expected})),
            1e-10)
            << expected.name;
      }
    }
  }
}

// --- 16 bits -----------------------------------------------------------------------

/// The documents' config, whose rate is not 0 in the first steps.
std::string documents(const std::string& dtype) {
  const std::string keys = R"(, "gradient_clipping": 1.0,
      "prescale_gradients": false,
      "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8,
        0.999], "eps": 1e-8, "weight_decay": 3e-7}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0005,
        "warmup_max_lr": 0.001, "warmup_num_steps": 1000}})";
  if (dtype == "fp32") return keys;
  const std::string scale = R"(, "loss_scale": 0, "loss_scale_window": 500,
      "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15)";
  return keys + ", \"" + dtype + R"(": {"enabled": true)" +
         (dtype == "fp16" ? scale : "") + "}";
}

// A rounding may send an image elsewhere, so losses differ more than digits do.
TEST(ExpertsUnderEngine, TrainInSixteenBitsAsInF32) {
  moe::ConvNetOptions net = documents_net(DType::kF32);
  net.moe.gate.use_rts = false;
  const Course f32 =
      under_engine(net, config_with(0, 1, documents("fp32")), 2, 2);
  for (const std::string dtype : {"bf16", "fp16"}) {
    for (const int stage : {0, 1, 2}) {
      const std::string more = documents(dtype);
      const Course found = under_engine(net, config_with(stage, 1, more), 2, 2);
      EXPECT_LT(largest_gap(found.losses, f32.losses), 0.02)
          << dtype << " stage " << stage;
      EXPECT_EQ(found.weights[0].tensor.dtype(),
                dtype == "bf16" ? DType::kBF16 : DType::kF16);
    }
  }
}

/// Whether the weights of all ranks stayed, in each step; scales and rates after
/// it.
struct Skips {
  std::vector<int> stayed;
  Values scales, rates;
};

/// Five steps in f16. In the fourth the gradient of one expert on rank 1 alone
/// overflows.
Skips skips_at(int stage, const std::string& zero) {
  const std::string more =
      R"(, "fp16": {"enabled": true, "initial_scale_power": 8,
            "hysteresis": 1}, "scheduler": {"type": "WarmupLR", "params":
           {"warmup_max_lr": 0.04, "warmup_num_steps": 4, "warmup_type":
            "linear"}})";
  const auto all = on_ranks(4, [&](ProcessGroup& world) {
    bool overflows = false;
    Rank rank(documents_net(DType::kF16), config_with(stage, 1, more, zero),
              world, /*ep=*/2, {}, [&](moe::ConvNet& net) {
                if (world.rank() != 1) return;
                const Tensor& weight = net.moe_layers[1].experts.c_fc_weight;
                weight.add_accumulate_hook([&overflows](Tensor& expert) {
                  if (!overflows) return;
                  expert.grad().fill(std::numeric_limits<double>::infinity());
                });
              });
    Skips skips;
    for (int k = 0; k < 5; ++k) {
      overflows = k == 3;
      const Values before = values_of(rank.net.named_parameters());
      rank.step(k);
      const bool stayed = values_of(rank.net.named_parameters()) == before;
      SB_CHECK(rank.engine->was_step_applied() == (k != 3), k);
      skips.stayed.push_back(stayed);
      skips.scales.push_back(rank.engine->loss_scale());
      skips.rates.push_back(rank.engine->get_lr());
    }
    return skips;
  });
  Skips joint = all[0];
  for (const Skips& each : all) {
    EXPECT_EQ(each.stayed, joint.stayed);
    EXPECT_EQ(each.scales, joint.scales);
  }
  return joint;
}

TEST(ExpertsUnderEngine, AnOverflowOfOneExpertOnOneRankSkipsTheStepOnAll) {
  for (const int stage : {0, 1, 2}) {
    SCOPED_TRACE(stage);
    const Skips skips = skips_at(stage, "");
    // The first two rates are 0
    EXPECT_EQ(skips.stayed, (std::vector<int>{1, 1, 0, 1, 0}));
    EXPECT_EQ(skips.scales, (Values{256, 256, 256, 128, 128}));
    EXPECT_LT(largest_gap(skips.rates, {0, .01, .02, .02, .03}), 1e-15);
  }
  const Skips offloaded = skips_at(2, R"(, "cpu_offload": true)");
  EXPECT_EQ(offloaded.stayed, (std::vector<int>{1, 1, 0, 1, 0}));
}

// --- Offload, and the state --------------------------------------------------------

TEST(ExpertsUnderEngine, OffloadChangesNothingButRounding) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const moe::ConvNetOptions net = documents_net(dtype);
    const Course here = under_engine(net, config_with(2, 2), 4, 2);
    const Course host = under_engine(
        net, config_with(2, 2, "", R"(, "cpu_offload": true)"), 4, 2);
    EXPECT_LT(distance(host, here), dtype == DType::kF64 ? 1e-14 : 1e-6);
  }
}

TEST(ExpertsUnderEngine, StatesAreShardedOverTheirOwnRanks) {
  // 2 ranks hold each expert, 4 ranks the rest
  on_ranks(4, [&](ProcessGroup& world) {
    Rank rank(documents_net(), config_with(1, 1), world, /*ep=*/2);
    std::map<std::string, std::int64_t> here;
    for (const StatePart& part : rank.engine->state().parts) {
      here[moe::is_expert(part.name) ? "experts" : "dense"] +=
          part.values.numel();
    }
    const std::int64_t experts = 2 * (84 * 84 + 84) + 4 * (84 * 84 + 84);
    std::int64_t dense = -experts;
    for (const Tensor& each : rank.net.parameters()) dense += each.numel();
    SB_CHECK(std::abs(here["experts"] - experts / 2) < 4, here["experts"]);
    SB_CHECK(std::abs(here["dense"] - dense / 4) < 8, here["dense"]);
  });
}

// Experts are saved as parts of the whole, so other groups can load them.
TEST(ExpertsUnderEngine, GoOnFromACheckpointOnOtherGroups) {
  const TempFolder folder;
  const moe::ConvNetOptions net = documents_net();
  const Course whole = under_engine(net, config_with(2, 1), 4, 2);
  on_ranks(4, [&](ProcessGroup& world) {
    Rank rank(net, config_with(1, 1), world, /*ep=*/4);
    for (int k = 0; k < kSteps - 1; ++k) rank.step(k);
    rank.engine->save_checkpoint(folder.path(), "two");
  });
  for (const auto& [stage, ep] : {std::pair{0, 1}, {2, 2}}) {
    const auto weights =
        on_ranks(4, [&, stage = stage, ep = ep](ProcessGroup& world) {
          moe::ConvNetOptions other = net;
          other.seed = 9;
          Rank rank(other, config_with(stage, 1), world, ep);
          rank.engine->load_checkpoint(folder.path());
          rank.step(kSteps - 1);
          return values_of(rank.engine->full_state());
        })[0];
    EXPECT_LT(largest_gap(weights, values_of(whole.weights)), 1e-10) << stage;
  }
}

// Ranks 0 and 1 are the first ones that have their experts.
TEST(ExpertsUnderEngine, EveryRankBeginsWithTheFirstOnesWeights) {
  for (const int stage : {0, 2}) {
    const auto first_of_expert = on_ranks(4, [&](ProcessGroup& world) {
      Rank rank(documents_net(), config_with(stage, 1), world, /*ep=*/2, {},
                [&](moe::ConvNet& net) {
                  for (const Tensor& each : net.parameters()) {
                    each.detach().fill(world.rank() + 1);
                  }
                });
      for (const NamedTensor& each : rank.net.named_parameters()) {
        const double expected =
            moe::is_expert(each.name) ? world.rank() % 2 + 1 : 1;
        for (const double value : values_of({each})) {
          SB_CHECK(value == expected, each.name);
        }
      }
      Values found;
      for (const NamedTensor& each : rank.engine->full_state()) {
        if (each.name != "moe_layer_list.0.experts.c_fc.bias") continue;
        const Values all = values_of({each});
        for (std::size_t i = 0; i < all.size(); i += 84) {
          found.push_back(all[i]);
        }
      }
      return found;
    })[0];
    EXPECT_EQ(first_of_expert, (Values{1, 1, 2, 2})) << stage;
  }
}

// --- What is refused -----------------------------------------------------------------

TEST(ExpertsUnderEngine, SayWhyTheyRefuse) {
  struct Refused {
    int stage;
    std::string more, sentence;
  };
  for (const Refused& each : std::vector<Refused>{
           {3, "", "/zero_optimization/stage 3 with moe_layer_list.0"},
           {0, R"(, "gradient_predivide_factor": 2)",
            "/gradient_predivide_factor with moe_layer_list.0"},
           {0, R"(, "communication_data_type": "fp32")",
            "/communication_data_type with moe_layer_list.0"}}) {
    const std::string error = error_on_ranks(2, [&](ProcessGroup& world) {
      Rank rank(documents_net(), config_with(each.stage, 1, each.more), world,
                2);
    });
    expect_text(error, {each.sentence});
  }
  const std::string cut = error_on_ranks(2, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, moe::expert_topology({.world = 2, .tp = 2}));
    moe::ConvNet net(documents_net(), {.tp = &mesh.group("tp")});
    initialize(net, config_with(0, 1), world);
  });
  expect_text(cut, {"moe_layer_list.0", "give mpu the same ranks"});
  moe::ConvNetOptions net = documents_net();
  net.moe.gate.noise = moe::Noise::kRSample;
  net.moe.gate.k = 2;
  expect_text(error_of([&] { moe::ConvNet{net}; }), {"rsample"});
}

}  // namespace
}  // namespace shardbook::engine
