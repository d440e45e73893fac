// The contract of forward, backward and step, at every stage of ZeRO.

#include <fstream>

#include "tests/chapters/15_engine/engine_support.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook::engine {
namespace {

// --- One device --------------------------------------------------------------

TEST(EngineParity, EveryStageOnEveryWorldEqualsOneDevice) {
  const Values expected = one_device(small_options(), 3);
  for (const int world : world_sizes()) {
    for (const int stage : {0, 1, 2, 3}) {
      for (const std::int64_t g : sized<std::int64_t>({1, 2}, {2})) {
        const Values found =
            after(world, small_options(), config_of(stage, g), three_steps);
        EXPECT_LT(largest_gap(found, expected), 1e-11)
            << world << " ranks, stage " << stage << ", g " << g;
      }
    }
  }
}

TEST(EngineParity, TrainBatchIsTheSameStep) {
  const Values expected = one_device(small_options(), 3);
  for (const int stage : {0, 2}) {
    std::vector<double> losses;
    const Values found =
        after(2, small_options(), config_of(stage, 3), [&](Trained& t) {
          std::vector<double> mine;
          for (int k = 0; k < 3; ++k) {
            std::int64_t micro = 0;
            mine.push_back(
                t.engine.train_batch([&] { return t.batch(k, micro++); }));
          }
          if (t.rank == 1) losses = mine;  // every rank has the mean
        });
    EXPECT_LT(largest_gap(found, expected), 1e-11);
    Options options = small_options();
    options.optimizer_options.lr = 0.01;
    options.steps = 3;
    const auto reference = on_ranks(1, [&](ProcessGroup&) {
      return train_one_device(options, 1).losses;
    })[0];
    EXPECT_LT(largest_gap(losses, reference), 1e-11);
  }
}

// [TRAP] The engine divides by g: if user code divides as well, gradients are g
// times too small.
TEST(EngineBackward, DividesByTheAccumulationStepsOnce) {
  // SGD, since Adam ignores the scale of gradients
  const DeepSpeedConfig config = parse(
      R"({"train_batch_size": 48, "gradient_accumulation_steps": 4,
          "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})");
  const auto norm_with = [&](double share) {
    double norm = 0;
    after(2, small_options(), config, [&](Trained& t) {
      for (int i = 0; i < 4; ++i) {
        t.engine.backward(scale(t.loss(0, i), share));
        t.engine.step();
      }
      if (t.rank == 0) norm = t.engine.get_global_grad_norm();
    });
    return norm;
  };
  const double reference = on_ranks(1, [&](ProcessGroup&) {
    const LoadedModel loaded = build_model(small_options());
    const Dataset data = Dataset::open(small_options(), loaded.config);
    accumulate_gradients(small_options(), *loaded.model, data, 0, 1);
    return grad_norm(loaded.model->parameters());
  })[0];
  EXPECT_NEAR(norm_with(1), reference, 1e-12);
  EXPECT_NEAR(norm_with(0.25), reference / 4, 1e-12);
}

TEST(EngineBackward, RefusesALossThatIsNoNumber) {
  const std::string error = error_on_ranks(1, [&](ProcessGroup& world) {
    Trained t(small_options(), config_of(0, 1), world);
    t.engine.backward(t.engine(t.batch(0, 0).inputs));
  });
  expect_text(error, {"backward of a loss of shape [48, 4, 13]"});
}

// --- Boundaries --------------------------------------------------------------

TEST(EngineStep, ActsAtTheBoundaryOnly) {
  after(2, small_options(), config_of(1, 3), [](Trained& t) {
    Engine& engine = t.engine;
    const Values before = values_of(state_of(*t.loaded.model));
    for (int i = 0; i < 3; ++i) {
      SB_CHECK(engine.is_gradient_accumulation_boundary() == (i == 2), i);
      SB_CHECK(engine.global_steps() == 0 && engine.micro_steps() == i, i);
      SB_CHECK(values_of(state_of(*t.loaded.model)) == before, i);
      engine.backward(t.loss(0, i));
      engine.step();
      SB_CHECK(engine.was_step_applied() == (i == 2), i);
    }
    SB_CHECK(values_of(state_of(*t.loaded.model)) != before, "no update");
    SB_CHECK(engine.global_steps() == 1 && engine.micro_steps() == 3 &&
                 engine.global_samples() == kBatch &&
                 engine.skipped_steps() == 0,
             "counts");
  });
}

/// Elements sent in each micro-step, for gradients and parameters.
std::vector<std::int64_t> sent_elements(int stage) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Trained t(small_options(), config_of(stage, 3), world);
    t.step(0);  // the first step also sends DDP's bucket order
    std::vector<std::int64_t> sent;
    for (int i = 0; i < 3; ++i) {
      const Tensor loss = t.loss(1, i);
      world.clear_records();
      t.engine.backward(loss);
      std::int64_t numel = 0;
      for (const CommRecord& each : world.records()) {
        if (each.op == CommOp::kAllReduce ||
            each.op == CommOp::kReduceScatter) {
          numel += each.numel;
        }
      }
      sent.push_back(numel);
      t.engine.step();
    }
    return sent;
  })[0];
}

TEST(EngineBackward, StagesReduceAtTheBoundaryOrInEveryMicroStep) {
  const std::int64_t parameters = on_ranks(1, [](ProcessGroup&) {
    return build_model(small_options()).model->num_parameters();
  })[0];
  using Sent = std::vector<std::int64_t>;
  EXPECT_EQ(sent_elements(0), (Sent{0, 0, parameters}));
  const std::int64_t padded = (parameters + 3) / 4 * 4;  // alignment 2, 2 ranks
  EXPECT_EQ(sent_elements(1), (Sent{0, 0, padded}));
  EXPECT_EQ(sent_elements(2), (Sent{padded, padded, padded}));
  // Stage 3 pads each parameter to a multiple of the ranks; parameters below
  // the threshold stay gathered, but are reduced too
  const Sent stage3 = sent_elements(3);
  EXPECT_GE(stage3[0], parameters);
  EXPECT_EQ(stage3[0], stage3[1]);
  EXPECT_EQ(stage3[0], stage3[2]);
}

TEST(EngineBoundary, MayNotChangeBetweenForwardAndBackward) {
  const std::string error = error_on_ranks(2, [&](ProcessGroup& world) {
    Trained t(small_options(), config_of(0, 1), world);
    t.engine.set_gradient_accumulation_boundary(false);
    const Tensor loss = t.loss(0, 0);
    t.engine.set_gradient_accumulation_boundary(true);
    t.engine.backward(loss);
  });
  expect_text(error, {"boundary has changed between forward and backward"});
}

// --- no_sync -----------------------------------------------------------------

TEST(EngineNoSync, SumsHereAndDividesByTheStepsAllTheSame) {
  const Values expected = one_device(small_options(), 1);
  for (const int stage : {0, 1}) {
    const Values found =
        after(2, small_options(), config_of(stage, 2), [](Trained& t) {
          {
            // Each backward divides by 2, even without counting a step
            const NoSync no_sync = t.engine.no_sync();
            SB_CHECK(!t.engine.is_gradient_accumulation_boundary(), "inside");
            t.engine.backward(t.loss(0, 0));
          }
          t.engine.set_gradient_accumulation_boundary(true);
          t.engine.backward(t.loss(0, 1));
          t.engine.step();
          SB_CHECK(t.engine.global_steps() == 1, "one update");
        });
    EXPECT_LT(largest_gap(found, expected), 1e-11) << stage;
  }
}

TEST(EngineNoSync, StepIsIllegalInside) {
  const std::string error = error_on_ranks(1, [&](ProcessGroup& world) {
    Trained t(small_options(), config_of(0, 2), world);
    const NoSync no_sync = t.engine.no_sync();
    t.engine.backward(t.loss(0, 0));
    t.engine.step();
  });
  expect_text(error, {"engine: step inside no_sync"});
}

TEST(EngineNoSync, IsRefusedWhereGradientsAreSharded) {
  for (const int stage : {2, 3}) {
    const std::string error = error_on_ranks(1, [&](ProcessGroup& world) {
      Trained t(small_options(), config_of(stage, 2), world);
      const NoSync no_sync = t.engine.no_sync();
    });
    expect_text(error, {"no_sync with /zero_optimization/stage " +
                        std::to_string(stage)});
  }
}

// --- Optimizers --------------------------------------------------------------

TEST(EngineOptimizer, AdamIsAdamWUnlessToldOtherwise) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto trained_by = [&](const std::string& type,
                                const std::string& more) {
      return after(2, small_options(),
                   parse(R"({"train_batch_size": 48, "optimizer": {"type": ")" +
                         type + R"(", "params": {"lr": 0.01,
                           "weight_decay": 0.5)" +
                         more + R"(}}, "zero_optimization": {"stage": )" +
                         std::to_string(stage) + "}}"),
                   three_steps);
    };
    const Values adamw = trained_by("AdamW", "");
    EXPECT_EQ(trained_by("Adam", ""), adamw) << stage;
    const Values l2 = trained_by("Adam", R"(, "adam_w_mode": false)");
    EXPECT_GT(largest_gap(l2, adamw), 1e-4) << stage;
  }
}

// --- Clipping and the scheduler ----------------------------------------------

TEST(EngineClipping, LimitsTheNormOfTheWholeGradient) {
  const double clip = 0.05;
  const Values expected = one_device(small_options(), 3, clip);
  EXPECT_GT(largest_gap(expected, one_device(small_options(), 3)), 1e-4);
  for (const int stage : {0, 1, 2, 3}) {
    const Values found = after(
        3, small_options(),
        config_of(stage, 2, R"(, "gradient_clipping": 0.05)"), three_steps);
    EXPECT_LT(largest_gap(found, expected), 1e-11) << stage;
  }
}

// [TRAP] The scheduler moves after the optimizer: steps 1 and 2 have rate 0.
TEST(EngineScheduler, TheFirstTwoStepsChangeNothing) {
  for (const int stage : {0, 2}) {
    after(2, small_options(), config_of(stage, 1, kWarmup), [](Trained& t) {
      const Values begin = values_of(t.engine.full_state());
      std::vector<double> rates;
      for (int k = 0; k < 6; ++k) {
        rates.push_back(t.engine.get_lr());
        t.step(k);
        const Values now = values_of(t.engine.full_state());
        if (t.rank != 0) continue;  // rank 0 has the whole model
        SB_CHECK((now == begin) == (k < 2), "step ", k + 1);
      }
      const std::vector<double> golden = {0, 0, .005, .01, .015, .02};
      SB_CHECK(largest_gap(rates, golden) < 1e-15, "rates");
    });
  }
}

TEST(EngineScheduler, OverwritesTheOptimizersRate) {
  WarmupOptions warmup;
  warmup.max_lr = 0.02;
  warmup.num_steps = 4;
  warmup.is_log = false;
  const Values expected =
      one_device(small_options(), 4, 0, warmup_schedule(warmup));
  const auto four_steps = [](Trained& t) {
    for (int k = 0; k < 4; ++k) t.step(k);
  };
  EXPECT_LT(largest_gap(
                after(2, small_options(), config_of(1, 2, kWarmup), four_steps),
                expected),
            1e-11);
  // A scheduler that moves BEFORE the optimizer gives another result
  const LrSchedule early = [&](std::int64_t k) { return warmup_lr(warmup, k); };
  EXPECT_GT(largest_gap(one_device(small_options(), 4, 0, early), expected),
            1e-4);
}

TEST(EngineScheduler, TheUsersTakesThePlaceOfTheConfigs) {
  InitializeArgs args;
  args.lr_scheduler =
      std::make_shared<LrScheduler>([](std::int64_t k) { return 0.25 + k; });
  after(
      1, small_options(), config_of(0, 1, kWarmup),
      [](Trained& t) {
        SB_CHECK(t.engine.get_lr() == 0.25, "first");
        t.step(0);
        SB_CHECK(t.engine.get_lr() == 1.25, "second");
      },
      args);
}

// --- Initialize --------------------------------------------------------------

TEST(EngineInitialize, EveryRankBeginsWithTheFirstOnesWeights) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto all = on_ranks(2, [&](ProcessGroup& world) {
      Options options = small_options();
      options.seed += static_cast<std::uint64_t>(world.rank());
      Trained t(options, config_of(stage, 1), world);
      return values_of(t.engine.full_state());
    });
    Options options = small_options();
    const Values first = on_ranks(1, [&](ProcessGroup&) {
      return values_of(state_of(*build_model(options).model));
    })[0];
    EXPECT_EQ(all[0], first) << stage;
  }
}

TEST(EngineInitialize, TrainsTheParametersThatItIsGiven) {
  on_ranks(2, [&](ProcessGroup& world) {
    const Options options = small_options();
    const LoadedModel loaded = build_model(options);
    const Dataset data = Dataset::open(options, loaded.config);
    InitializeArgs args;
    args.model_parameters = {loaded.model->parameters()[2]};
    const auto before = state_of(*loaded.model);
    std::vector<Values> old;
    for (const NamedTensor& each : before) old.push_back(values_of({each}));
    const Initialized all =
        initialize(*loaded.model, config_of(0, 1), world, args);
    const Batch batch = data.batch(0, kBatch, {world.rank(), 2}, kBatch / 2);
    all.engine->backward(
        language_loss((*all.engine)(batch.inputs), batch.targets));
    all.engine->step();
    const auto now = state_of(*loaded.model);
    for (std::size_t i = 0; i < now.size(); ++i) {
      SB_CHECK((values_of({now[i]}) == old[i]) == (i != 2), now[i].name);
    }
    return 0;
  });
}

TEST(EngineInitialize, RefusesWhatItCannotDo) {
  const auto error = [](const std::string& text, InitializeArgs args = {}) {
    return error_on_ranks(1, [&](ProcessGroup& world) {
      const LoadedModel loaded = build_model(small_options());
      initialize(*loaded.model, parse(text), world, args);
    });
  };
  expect_text(error(R"({"train_batch_size": 4})"), {"/optimizer is missing"});
  const std::string adamw = R"("optimizer": {"type": "AdamW"}, )";
  expect_text(error("{" + adamw + R"("gradient_accumulation_steps": 2})"),
              {"alone does not say how large a batch is"});
  expect_text(error("{" + adamw +
                    R"("train_batch_size": 4, "pipeline": {"stages": 2}})"),
              {"/pipeline/stages needs a model of the book"});
  expect_text(error("{" + adamw +
                    R"("train_batch_size": 4, "shardbook":
                     {"recompute": "attention"}})"),
              {"/shardbook/recompute \"attention\" needs a model"});
  InitializeArgs both;
  both.deepspeed_config = "other.json";
  expect_text(error("{" + adamw + R"("train_batch_size": 4})", both),
              {"other.json in args.deepspeed_config as well"});
}

TEST(EngineInitialize, TheConfigMayBeAFile) {
  const TempFolder folder;
  std::ofstream(folder / "ds.json") << config_of(1, 2).to_json();
  const auto sizes = on_ranks(2, [&](ProcessGroup& world) {
    const LoadedModel loaded = build_model(small_options());
    InitializeArgs args;
    args.deepspeed_config = folder / "ds.json";
    const Initialized all = initialize(*loaded.model, world, args);
    SB_CHECK(all.optimizer == &all.engine->optimizer(), "the engine's");
    SB_CHECK(all.engine->config().zero.stage == 1, "stage");
    return all.engine->train_micro_batch_size_per_gpu();
  });
  EXPECT_EQ(sizes[0], kBatch / 4);
  const std::string error = error_on_ranks(1, [&](ProcessGroup& world) {
    const LoadedModel loaded = build_model(small_options());
    initialize(*loaded.model, world, {});
  });
  expect_text(error, {"initialize: there is no config"});
}

TEST(EngineInitialize, RefusesParametersOfAnotherModel) {
  const std::string error = error_on_ranks(1, [&](ProcessGroup& world) {
    const LoadedModel loaded = build_model(small_options());
    const LoadedModel other = build_model(small_options());
    InitializeArgs args;
    args.model_parameters = other.model->parameters();
    initialize(*loaded.model, config_of(0, 1), world, args);
  });
  expect_text(error, {"model_parameters: number 0 is no parameter"});
}

}  // namespace
}  // namespace shardbook::engine
