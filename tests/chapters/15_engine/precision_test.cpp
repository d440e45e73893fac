// f16, bf16, loss scales, and what travels.

#include <set>

#include "tests/chapters/15_engine/engine_support.h"

namespace shardbook::engine {
namespace {

std::string fp16(const std::string& keys) {
  return R"(, "fp16": {"enabled": true)" + keys + "}";
}

TEST(EnginePrecision, InitializeCastsTheModel) {
  for (const auto& [key, dtype] :
       {std::pair{"fp16", DType::kF16}, std::pair{"bf16", DType::kBF16}}) {
    for (const int stage : {0, 2}) {
      const std::string more =
          ", \"" + std::string(key) + R"(": {"enabled": true})";
      on_ranks(2, [&](ProcessGroup& world) {
        Trained t(small_options(DType::kF32), config_of(stage, 1, more), world);
        for (const Tensor& each : t.loaded.model->parameters()) {
          SB_CHECK(each.dtype() == dtype && each.requires_grad(), "cast");
        }
        SB_CHECK(t.loss(0, 0).requires_grad(), "a graph");
        return 0;
      });
    }
  }
}

// An update below half of a weight's last place would be lost in bf16: f32
// masters keep it.
TEST(EnginePrecision, MastersKeepWhatSixteenBitsWouldLose) {
  for (const int stage : {0, 1}) {
    const auto [master, weights] = on_ranks(2, [&](ProcessGroup& world) {
      DeepSpeedConfig config =
          config_of(stage, 1, R"(, "bf16": {"enabled": true})");
      config.optimizer.params.lr = 1e-8;
      Trained t(small_options(DType::kF32), config, world);
      const OptimizerSlot& slot = t.engine.optimizer().slots().at(0);
      const auto embedding = [&] {
        const auto all = t.engine.full_state();
        return all.empty() ? Values() : values_of({all[0]});
      };
      const auto master_before = slot.master.to_vector<float>();
      const Values before = embedding();
      three_steps(t);
      return std::pair(slot.master.to_vector<float>() != master_before,
                       embedding() != before);
    })[0];
    EXPECT_TRUE(master) << stage;
    EXPECT_FALSE(weights) << stage;
  }
}

/// Skips, scales and rates of five steps; the second overflows on rank 1 alone.
struct Course {
  std::vector<double> scales, rates, norms;
  std::vector<std::int64_t> skipped, steps, samples;
  bool held = true;
};

Course course_of(int stage, const std::string& keys) {
  return on_ranks(2, [&](ProcessGroup& world) {
    const std::string warmup =
        R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr":
            0.04, "warmup_num_steps": 4, "warmup_type": "linear"}})";
    Trained t(small_options(DType::kF32),
              config_of(stage, 1, fp16(keys) + warmup), world);
    Course course;
    for (int k = 0; k < 5; ++k) {
      const bool overflows = k == 3;
      const Values before = values_of(t.engine.full_state());
      Tensor loss = t.loss(k, 0);
      if (overflows && t.rank == 1) loss = scale(loss, 1e9);
      t.engine.backward(loss);
      t.engine.step();
      if (overflows) {
        course.held = values_of(t.engine.full_state()) == before &&
                      !t.engine.was_step_applied();
      } else {
        (void)t.engine.full_state();
      }
      course.scales.push_back(t.engine.loss_scale());
      course.rates.push_back(t.engine.get_lr());
      course.norms.push_back(t.engine.get_global_grad_norm());
      course.skipped.push_back(t.engine.skipped_steps());
      course.steps.push_back(t.engine.global_steps());
      course.samples.push_back(t.engine.global_samples());
    }
    return course;
  })[0];  // whose own gradient was finite
}

TEST(EngineLossScale, AnOverflowOnOneRankSkipsTheStepOnAll) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    const Course course =
        course_of(stage, R"(, "initial_scale_power": 8, "hysteresis": 1)");
    using Counts = std::vector<std::int64_t>;
    EXPECT_TRUE(course.held);
    EXPECT_EQ(course.skipped, (Counts{0, 0, 0, 1, 1}));
    // Steps and samples advance nevertheless
    EXPECT_EQ(course.steps, (Counts{1, 2, 3, 4, 5}));
    EXPECT_EQ(course.samples, (Counts{48, 96, 144, 192, 240}));
    EXPECT_EQ(course.scales, (Values{256, 256, 256, 128, 128}));
    // The scheduler waits: 0, .01, .02, (still) .02, .03
    EXPECT_LT(largest_gap(course.rates, {0, .01, .02, .02, .03}), 1e-15);
    EXPECT_FALSE(std::isfinite(course.norms[3]));
    // The norm is that of the gradient without the scale
    EXPECT_LT(course.norms[2], 10);
  }
}

// Of ZeRO: DeepSpeed 0.19.8 forgives none without it.
TEST(EngineLossScale, HysteresisForgivesTheFirstOverflow) {
  const Course course = course_of(1, R"(, "initial_scale_power": 8)");
  EXPECT_EQ(course.skipped.back(), 1);
  EXPECT_EQ(course.scales, (Values{256, 256, 256, 256, 256}));
  EXPECT_EQ(course_of(0, R"(, "initial_scale_power": 8)").scales,
            (Values{256, 256, 256, 128, 128}));
}

TEST(EngineLossScale, AStaticScaleStays) {
  const Course course = course_of(0, R"(, "loss_scale": 64)");
  EXPECT_EQ(course.skipped.back(), 1);
  EXPECT_EQ(course.scales, (Values{64, 64, 64, 64, 64}));
}

TEST(EngineLossScale, DoublesAfterAWindow) {
  const Course course =
      course_of(1, R"(, "initial_scale_power": 8, "loss_scale_window": 2)");
  // Good steps 0, 1, 2 (DeepSpeed 0.19.8: iter - last_overflow - 1 = 0, 1, 2):
  // doubled after the third; the overflow's hysteresis is restored
  EXPECT_EQ(course.scales, (Values{256, 256, 512, 512, 512}));
}

// --- Division and the wire ---------------------------------------------------

/// The gradient's norm with f16 gradients near the largest number, 65504.
double norm_near_overflow(const std::string& keys) {
  const DeepSpeedConfig config = parse(
      R"({"train_batch_size": 4, "optimizer": {"type": "SGD"},
          "zero_allow_untested_optimizer": true, "fp16": {"enabled": true, "loss_scale": 1})" +
      keys + "}");
  return on_ranks(4, [&](ProcessGroup& world) {
    InitOptions init;
    init.dtype = DType::kF16;
    Linear layer("layer", 1, 1, init);
    const auto engine = initialize(layer, config, world).engine;
    const Tensor x = Tensor::full({1, 1}, 30000, {DType::kF16, Device()});
    engine->backward(sum((*engine)(x)));
    engine->step();
    return engine->get_global_grad_norm();
  })[0];
}

// [TRAP] The sum over ranks precedes the division, so four gradients of 30000
// overflow although their mean does not.
TEST(EngineReduction, PrescalingKeepsTheSumFinite) {
  EXPECT_FALSE(std::isfinite(norm_near_overflow("")));
  EXPECT_NEAR(norm_near_overflow(R"(, "prescale_gradients": true)"), 30000, 50);
  EXPECT_NEAR(norm_near_overflow(R"(, "gradient_predivide_factor": 4)"), 30000,
              50);
  // A plain all-reduce of stages 1 and 2 follows the same keys
  for (const std::string stage : {"1", "2"}) {
    const std::string zero = R"(, "zero_optimization": {"stage": )" + stage +
                             R"(, "reduce_scatter": false})";
    EXPECT_FALSE(std::isfinite(norm_near_overflow(zero)));
    EXPECT_NEAR(norm_near_overflow(zero + R"(, "prescale_gradients": true)"),
                30000, 50);
    EXPECT_NEAR(
        norm_near_overflow(zero + R"(, "gradient_predivide_factor": 4)"), 30000,
        50);
  }
  // Stages that reduce to parts divide first in any case
  for (const std::string stage : {"1", "2", "3"}) {
    EXPECT_NEAR(norm_near_overflow(R"(, "zero_optimization": {"stage": )" +
                                   stage + "}"),
                30000, 50);
  }
}

TEST(EngineReduction, DividesOnceWhereverTheDivisionStands) {
  const Values expected = one_device(small_options(), 3);
  for (const int stage : {0, 1, 2}) {
    for (const std::string more : {"", R"(, "prescale_gradients": true)",
                                   R"(, "gradient_predivide_factor": 3)"}) {
      // Only for plain sums: reduce_scatter offers no choice
      DeepSpeedConfig config = config_of(0, 2, more);
      config.zero.stage = stage;
      config.zero.reduce_scatter = false;
      const Values found = after(4, small_options(), config, three_steps);
      EXPECT_LT(largest_gap(found, expected), 1e-11) << stage << more;
    }
  }
}

TEST(EngineReduction, TheWireHasADtypeOfItsOwn) {
  const auto dtypes_on_wire = [](int stage, const std::string& more) {
    return on_ranks(2, [&](ProcessGroup& world) {
      Trained t(small_options(DType::kF32), config_of(stage, 1, more), world);
      const Tensor loss = t.loss(0, 0);
      world.clear_records();
      t.engine.backward(loss);
      std::set<DType> dtypes;
      for (const CommRecord& each : world.records()) {
        // Parameters are gathered in their own dtype
        if (each.op != CommOp::kAllGather) dtypes.insert(each.dtype);
      }
      return dtypes;
    })[0];
  };
  for (const int stage : {0, 1, 2, 3}) {
    for (const auto& [keys, dtype] :
         {std::pair{"", DType::kF32},
          std::pair{R"(, "communication_data_type": "bf16")", DType::kBF16},
          std::pair{R"(, "communication_data_type": "fp16")", DType::kF16},
          // Without that key, the dtype of the training
          std::pair{R"(, "fp16": {"enabled": true})", DType::kF16},
          std::pair{R"(, "bf16": {"enabled": true})", DType::kBF16}}) {
      EXPECT_EQ(dtypes_on_wire(stage, keys), std::set<DType>{dtype})
          << stage << keys;
    }
  }
}

TEST(EngineZero, OwnersMayBroadcastTheirParameters) {
  const Values expected = one_device(small_options(), 3);
  for (const int stage : {1, 2}) {
    DeepSpeedConfig config = config_of(stage, 1);
    config.zero.allgather_partitions = false;
    const auto sent = [&](const DeepSpeedConfig& setup) {
      return on_ranks(3, [&](ProcessGroup& world) {
        Trained t(small_options(), setup, world);
        three_steps(t);
        std::int64_t broadcasts = 0;
        for (const CommRecord& each : world.records()) {
          broadcasts += each.op == CommOp::kBroadcast &&
                        each.label == "parameters" && each.numel > 1;
        }
        return std::pair(world.sent_bytes(), broadcasts);
      })[0];
    };
    const auto [bytes, broadcasts] = sent(config);
    const auto [gathered_bytes, others] = sent(config_of(stage, 1));
    EXPECT_EQ(broadcasts - others, 3 * 3) << "one per owner and step";
    EXPECT_NEAR(bytes, gathered_bytes, 1e-9 * gathered_bytes);
    EXPECT_LT(
        largest_gap(after(3, small_options(), config, three_steps), expected),
        1e-11);
  }
}

/// Messages of these operations in a step on two ranks, by elements.
std::vector<std::int64_t> messages(const DeepSpeedConfig& config,
                                   const std::set<CommOp>& ops) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Trained t(small_options(), config, world);
    world.clear_records();
    t.step(0);
    std::vector<std::int64_t> numels;
    for (const CommRecord& each : world.records()) {
      if (ops.count(each.op) > 0) numels.push_back(each.numel);
    }
    return numels;
  })[0];
}

TEST(EngineZero, BucketsCountElements) {
  for (const int stage : {1, 2}) {
    DeepSpeedConfig config = config_of(stage, 1);
    const std::set<CommOp> reductions = {CommOp::kReduce,
                                         CommOp::kReduceScatter};
    EXPECT_EQ(messages(config, reductions).size(), 1u);
    EXPECT_EQ(messages(config, {CommOp::kAllGather}).size(), 1u);
    config.zero.reduce_bucket_size = 300;
    config.zero.allgather_bucket_size = 100;
    // The largest parameter, c_fc of 8 x 32 elements, fits
    const auto reduced = messages(config, reductions);
    EXPECT_GT(reduced.size(), 1u);
    // With up to an aligned pair of padding for each rank
    for (const std::int64_t numel : reduced) EXPECT_LE(numel, 300 + 4);
    const auto gathered = messages(config, {CommOp::kAllGather});
    EXPECT_GT(gathered.size(), 1u);
    for (const std::int64_t numel : gathered) EXPECT_LE(numel, 100);
  }
}

TEST(EngineZero, RoundRobinGivesOtherShards) {
  for (const int stage : {1, 2}) {
    const auto shard = [&](bool is_round_robin) {
      return on_ranks(2, [&](ProcessGroup& world) {
        DeepSpeedConfig config = config_of(stage, 1);
        config.zero.round_robin_gradients = is_round_robin;
        Trained t(small_options(), config, world);
        return t.engine.optimizer().parameters().at(0).to_vector<double>();
      })[0];
    };
    EXPECT_NE(shard(true), shard(false)) << stage;
    DeepSpeedConfig config = config_of(stage, 2);
    config.zero.round_robin_gradients = true;
    EXPECT_LT(largest_gap(after(2, small_options(), config, three_steps),
                          one_device(small_options(), 3)),
              1e-11);
  }
}

// Units that must not stay whole are gathered again in backward.
TEST(EngineZero, LiveParametersAreLimited) {
  const auto sent = [](std::int64_t most) {
    return on_ranks(2, [&](ProcessGroup& world) {
      DeepSpeedConfig config = config_of(3, 1);
      config.zero.persistence_threshold = 0;
      config.zero.max_live_parameters = most;
      Trained t(small_options(), config, world);
      three_steps(t);
      return world.sent_bytes();
    })[0];
  };
  EXPECT_GT(sent(1), sent(1'000'000'000));
}

TEST(EngineZero, KeepsF16MastersOnTheHostWhereTold) {
  const auto has_masters = [](bool f16_masters) -> bool {
    const std::string key =
        std::string(R"(, "fp16_master_weights_and_grads": )") +
        (f16_masters ? "true" : "false");
    const DeepSpeedConfig config = parse(
        R"({"train_batch_size": 48, "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device":
            "cpu"}})" +
        fp16(key) + "}");
    return on_ranks(2, [&](ProcessGroup& world) {
      Trained t(small_options(DType::kF32), config, world);
      t.step(0);
      return int{t.engine.optimizer().slots()[0].master.defined()};
    })[0];
  };
  EXPECT_TRUE(has_masters(false));
  EXPECT_FALSE(has_masters(true));
}

TEST(EnginePrecision, AutoCastTakesInputsOfF32) {
  const auto error = [](const std::string& keys) {
    return error_on_ranks(1, [&](ProcessGroup& world) {
      InitOptions init;
      Linear layer("layer", 2, 2, init);
      const auto engine =
          initialize(
              layer,
              parse(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"})" +
                    fp16(keys) + "}"),
              world)
              .engine;
      (*engine)(Tensor::full({1, 2}, 1, {DType::kF32, Device()}));
    });
  };
  EXPECT_EQ(error(R"(, "auto_cast": true)"), "");
  EXPECT_NE(error(""), "");
}

// --- Lines of the log --------------------------------------------------------

using Lines = std::vector<std::string>;

/// Each rank's lines of the log in the first `steps` steps.
std::vector<Lines> logs(int ranks, int steps, const DeepSpeedConfig& config,
                        DType dtype = DType::kF64,
                        const InitializeArgs& args = {}) {
  return on_ranks(ranks, [&](ProcessGroup& world) {
    Trained t(small_options(dtype), config, world, args);
    Lines lines;
    t.engine.set_log([&](const std::string& line) { lines.push_back(line); });
    for (int k = 0; k < steps; ++k) t.step(k);
    return lines;
  });
}

TEST(EngineLog, WritesEveryNthStepAndTheTimesOfTheCalls) {
  DeepSpeedConfig config = config_of(0, 2);
  config.steps_per_print = 2;
  const auto plain = logs(2, 4, config);
  EXPECT_EQ(plain[0], (Lines{"step=2, skipped=0, lr=0.01, mom=(0.9, 0.999)",
                             "step=4, skipped=0, lr=0.01, mom=(0.9, 0.999)"}));
  EXPECT_TRUE(plain[1].empty());
  config.wall_clock_breakdown = true;
  const Lines timed = logs(2, 4, config)[0];
  ASSERT_EQ(timed.size(), 6u);
  expect_text(timed[0], {" | bwd: ", " | bwd-inner: ", " | bwd-reduce: ",
                         " | fwd: ", " | step: "});
}

TEST(EngineLog, CountsSkippedStepsAndKnowsTheOptimizersMomentum) {
  DeepSpeedConfig config =
      config_of(1, 1, fp16(R"(, "initial_scale_power": 40, "hysteresis": 1)"));
  config.steps_per_print = 1;
  EXPECT_EQ(logs(1, 2, config, DType::kF32)[0],
            (Lines{"step=1, skipped=1, lr=0.01, mom=(0.9, 0.999)",
                   "step=2, skipped=2, lr=0.01, mom=(0.9, 0.999)"}));
  const Lines of_sgd = {"step=1, skipped=0, lr=0.5, mom=0.875",
                        "step=2, skipped=0, lr=0.5, mom=0.875"};
  const std::string sgd = R"(, "optimizer": {"type": "SGD",
                             "params": {"lr": 0.5, "momentum": 0.875}})";
  const auto parse_with = [](const std::string& keys) {
    return parse(R"({"train_batch_size": 48, "steps_per_print": 1)" + keys +
                 "}");
  };
  EXPECT_EQ(logs(1, 2, parse_with(sgd))[0], of_sgd);
  // The user's optimizer in place of the config's
  InitializeArgs args;
  args.optimizer = parse_with(sgd).optimizer;
  EXPECT_EQ(logs(1, 2, parse_with(""), DType::kF64, args)[0], of_sgd);
}

}  // namespace
}  // namespace shardbook::engine
