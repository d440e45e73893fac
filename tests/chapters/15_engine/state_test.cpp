// Checkpoints, the loader, and models that are already cut.

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "comm/device_mesh.h"
#include "tests/chapters/15_engine/engine_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::engine {
namespace {

TEST(EngineCheckpoint, GoesOnBitForBit) {
  for (const int stage : {0, 1, 2, 3}) {
    const TempFolder folder;
    const DeepSpeedConfig config = config_of(stage, 2, kWarmup);
    const Values whole = after(2, small_options(), config, [](Trained& t) {
      for (int k = 0; k < 6; ++k) t.step(k);
    });
    after(2, small_options(), config, [&](Trained& t) {
      for (int k = 0; k < 3; ++k) t.step(k);
      t.engine.save_checkpoint(folder.path(), "global_step3");
    });
    const Values resumed = after(2, small_options(), config, [&](Trained& t) {
      SB_CHECK(t.engine.load_checkpoint(folder.path()) == "global_step3",
               "the latest");
      SB_CHECK(t.engine.global_steps() == 3 &&
                   t.engine.global_samples() == 3 * kBatch,
               "counts");
      for (int k = 3; k < 6; ++k) t.step(k);
    });
    EXPECT_EQ(resumed, whole) << stage;
  }
}

TEST(EngineCheckpoint, GoesOnAtAnotherStageOnOtherRanks) {
  const TempFolder folder;
  const Values whole =
      after(4, small_options(), config_of(2, 1, kWarmup), [](Trained& t) {
        for (int k = 0; k < 4; ++k) t.step(k);
      });
  after(4, small_options(), config_of(2, 1, kWarmup), [&](Trained& t) {
    for (int k = 0; k < 2; ++k) t.step(k);
    t.engine.save_checkpoint(folder.path(), "a");
  });
  for (const auto& [stage, ranks] : {std::pair{0, 1}, {1, 2}, {3, 3}}) {
    const Values resumed = after(ranks, small_options(),
                                 config_of(stage, 2, kWarmup), [&](Trained& t) {
                                   t.engine.load_checkpoint(folder.path(), "a");
                                   for (int k = 2; k < 4; ++k) t.step(k);
                                 });
    EXPECT_LT(largest_gap(resumed, whole), 1e-11)
        << "stage " << stage << " on " << ranks;
  }
}

TEST(EngineCheckpoint, KeepsTheLossScale) {
  const TempFolder folder;
  const DeepSpeedConfig config =
      config_of(1, 1,
                R"(, "fp16": {"enabled": true, "initial_scale_power": 40,
          "hysteresis": 1})");
  const auto scale = on_ranks(2, [&](ProcessGroup& world) {
    Trained t(small_options(DType::kF32), config, world);
    three_steps(t);
    t.engine.save_checkpoint(folder.path(), "a");
    Trained again(small_options(DType::kF32), config, world);
    again.engine.load_checkpoint(folder.path());
    return std::pair(t.engine.loss_scale(), again.engine.loss_scale());
  })[0];
  EXPECT_EQ(scale.first, std::ldexp(1.0, 37));  // three overflows
  EXPECT_EQ(scale.second, scale.first);
}

TEST(EngineCheckpoint, RefusesOthersAndDamagedOnes) {
  const TempFolder folder;
  const auto error = [&](const Options& options, const std::string& from) {
    return error_on_ranks(2, [&](ProcessGroup& world) {
      Trained t(options, config_of(1, 1), world);
      t.engine.load_checkpoint(from);
    });
  };
  EXPECT_NE(error(small_options(), folder.path()).find("latest cannot be read"),
            std::string::npos);
  after(2, small_options(), config_of(1, 1),
        [&](Trained& t) { t.engine.save_checkpoint(folder.path(), "a"); });
  Options wider = small_options();
  wider.model =
      R"({"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 13,
          "n_positions": 8})";
  EXPECT_NE(error(wider, folder.path()), "");
  EXPECT_EQ(error(small_options(), folder.path()), "");
  const std::string middle = error_on_ranks(1, [&](ProcessGroup& world) {
    Trained t(small_options(), config_of(1, 2), world);
    t.engine.backward(t.loss(0, 0));
    t.engine.step();
    t.engine.save_checkpoint(folder.path(), "b");
  });
  EXPECT_NE(middle.find("between the micro-steps"), std::string::npos);
}

// --- The loader --------------------------------------------------------------

TrainingData numbers_up_to(std::int64_t n) {
  TrainingData data;
  data.num_samples = n;
  data.batch = [](const std::vector<std::int64_t>& samples) {
    Batch batch;
    batch.inputs = Tensor::from_values<std::int64_t>(
        samples, {static_cast<std::int64_t>(samples.size())});
    return batch;
  };
  return data;
}

using Numbers = std::vector<std::int64_t>;

std::vector<std::vector<Numbers>> epochs(int ranks, std::int64_t n,
                                         std::int64_t micro, int count) {
  const auto by_rank = on_ranks(ranks, [&](ProcessGroup& world) {
    LoaderOptions options;
    options.micro_batch_size = micro;
    options.seed = 7;
    Loader loader(numbers_up_to(n), options, world);
    std::vector<Numbers> all;
    for (int e = 0; e < count; ++e) {
      while (const auto batch = loader.next()) {
        all.push_back(batch->inputs.to_vector<std::int64_t>());
      }
    }
    return all;
  });
  return by_rank;
}

TEST(EngineLoader, DealsEverySampleOnceAndKeepsTheShortEnd) {
  const auto found = epochs(2, 10, 2, 1);
  Numbers all;
  for (const auto& rank : found) {
    ASSERT_EQ(rank.size(), 3u);  // 2 + 2 + 1
    EXPECT_EQ(rank[2].size(), 1u);
    for (const Numbers& batch : rank) {
      all.insert(all.end(), batch.begin(), batch.end());
    }
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, (Numbers{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(EngineLoader, RepeatsTheFirstSamplesWhereRanksDoNotDivideThem) {
  const auto found = epochs(4, 10, 5, 1);
  std::size_t count = 0;
  for (const auto& rank : found) count += rank.at(0).size();
  EXPECT_EQ(count, 12u);
}

TEST(EngineLoader, EpochsHaveOrdersOfTheirOwn) {
  const auto two = epochs(1, 10, 10, 2);
  EXPECT_NE(two[0][0], two[0][1]);
  EXPECT_EQ(two, epochs(1, 10, 10, 2));
}

TEST(EngineLoader, GivesTheSamplesOfADataset) {
  on_ranks(1, [](ProcessGroup& world) {
    const Options options = small_options();
    const LoadedModel loaded = build_model(options);
    const Dataset data = Dataset::open(options, loaded.config);
    LoaderOptions setup;
    setup.micro_batch_size = 3;
    setup.shuffle = false;
    Loader loader(training_data(data), setup, world);
    const Batch expected = data.batch(0, 3);
    const Batch found = loader.next_repeating();
    SB_CHECK(found.inputs.to_vector<std::int64_t>() ==
                     expected.inputs.to_vector<std::int64_t>() &&
                 found.targets.to_vector<std::int64_t>() ==
                     expected.targets.to_vector<std::int64_t>(),
             "samples 0, 1, 2");
    return 0;
  });
}

// Ranks with the same data-parallel index read the same samples.
TEST(EngineLoader, IsKeyedByTheDataParallelRank) {
  const auto samples = on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"dp", "tp"}, {2, 2}));
    LoaderOptions options;
    options.micro_batch_size = 5;
    return Loader(numbers_up_to(10), options, mesh.group("dp")).samples();
  });
  EXPECT_EQ(samples[0], samples[1]);
  EXPECT_EQ(samples[2], samples[3]);
  EXPECT_NE(samples[0], samples[2]);
}

TEST(EngineLoader, TheSeedIsTheOrder) {
  on_ranks(1, [](ProcessGroup& world) {
    const auto order = [&](std::uint64_t seed) {
      return Loader(numbers_up_to(10), {10, seed}, world).samples();
    };
    SB_CHECK(order(7) == order(7), "alike");
    SB_CHECK(order(7) != order(8), "another seed");
    return 0;
  });
}

// With a model over pairs of ranks: micro-batches of 12 / (2 x 2).
TEST(EngineLoader, OfInitializeHasTheConfigsMicroBatches) {
  on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"dp", "tp"}, {2, 2}));
    Linear layer("layer", 1, 1, InitOptions{});
    InitializeArgs args;
    args.mpu.data = &mesh.group("dp");
    args.mpu.model = &mesh.group("tp");
    args.training_data = numbers_up_to(10);
    args.seed = 9;
    const Initialized all = initialize(
        layer,
        parse(R"({"train_batch_size": 12, "gradient_accumulation_steps": 2,
                  "optimizer": {"type": "SGD"}})"),
        world, args);
    const Loader expected(numbers_up_to(10), {3, 9}, mesh.group("dp"));
    SB_CHECK(all.loader != nullptr, "a loader");
    SB_CHECK(all.loader->samples() == expected.samples(), "dealt by dp");
    SB_CHECK(all.loader->next_repeating().inputs.numel() == 3, "micro");
    SB_CHECK(all.lr_scheduler == nullptr, "no section");
    return 0;
  });
}

// --- Models that are cut already (mpu) ---------------------------------------

struct Cut {
  double norm = 0;
  double loss = 0;
};

/// Two steps of DP x TP; the norm may be given a wrong layout.
Cut train_cut(int stage, int d, int t, bool tells_the_layout) {
  return on_ranks(d * t, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"dp", "tp"}, {d, t}));
    ProcessGroup& tp = mesh.group("tp");
    const Options options = small_options();
    ModelConfig config = model_config(options);
    config.vocab_size = padded_vocabulary(config.vocab_size, t);
    InitOptions init;
    init.seed = options.seed;
    init.dtype = options.dtype;
    const LayerFactory layers =
        tensor_parallel::layers(model_config(options), tp);
    Gpt model(config, init, layers);
    InitializeArgs args;
    args.mpu.data = &mesh.group("dp");
    args.mpu.model = &tp;
    args.mpu.layout = [=](const std::string& name, int rank) {
      // [TRAP] As if every parameter were cut: replicated ones count t times
      return tells_the_layout ? tensor_parallel::layout(config, name, rank, t)
                              : Shards{{0, rank, t}};
    };
    const Initialized all =
        initialize(model, config_of(stage, 2, R"(, "gradient_clipping": 0.05)"),
                   world, args);
    const Dataset data = Dataset::open(options, model_config(options));
    Cut cut;
    for (int k = 0; k < 2; ++k) {
      std::int64_t micro = 0;
      const std::int64_t n = all.engine->train_micro_batch_size_per_gpu();
      cut.loss = all.engine->train_batch(
          [&] {
            const BatchSlice slice{mesh.coordinate("dp") + d * micro++, d * 2};
            return data.batch(k, kBatch, slice, n);
          },
          layers.loss);
      cut.norm = all.engine->get_global_grad_norm();
    }
    return cut;
  })[0];
}

TEST(EngineMpu, TheNormCountsEveryElementOnce) {
  const Cut one = train_cut(0, 1, 1, true);
  for (const int stage : {0, 1, 2, 3}) {
    for (const auto& [d, t] : {std::pair{2, 2}, {1, 2}}) {
      const Cut found = train_cut(stage, d, t, true);
      EXPECT_NEAR(found.norm, one.norm, 1e-10) << stage << " " << d << " " << t;
      EXPECT_NEAR(found.loss, one.loss, 1e-10) << stage << " " << d << " " << t;
    }
  }
  EXPECT_GT(std::abs(train_cut(0, 1, 2, false).norm - one.norm), 1e-3);
}

}  // namespace
}  // namespace shardbook::engine
