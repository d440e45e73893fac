// The traps of the loop: for each, a script (or a library) that falls into it
// and gets other results.

#include "chapters/common/models/checkpoint.h"
#include "core/autograd.h"
#include "core/ops.h"
#include "core/optim.h"
#include "tests/chapters/15_engine/accelerator_support.h"

namespace shardbook::accelerate {
namespace {

/// Farther apart than rounding can bring two runs.
constexpr double kApart = 1e-6;

Script sgd_script(std::int64_t accumulation) {
  Script script;
  script.optimizer.type = "SGD";
  script.optimizer.params.lr = 0.5;
  script.options.gradient_accumulation_steps = accumulation;
  script.batch_size = 2;
  script.max_norm = 0;
  return script;
}

// --- Windows -----------------------------------------------------------------

/// By hand, on one device: windows of `g` batches of `rows` samples; each batch
/// is divided by `divisor(size of its window)`.
Weights by_hand(const Script& script, std::int64_t rows, std::int64_t g,
                const std::function<double(std::int64_t window)>& divisor) {
  return on_ranks(1, [&](ProcessGroup&) {
    const Options options = options_of(script);
    const LoadedModel loaded = build_model(options);
    const engine::TrainingData data = engine::training_data(
        Dataset::open(options, loaded.config), script.samples);
    const auto optimizer = make_optimizer("sgd", loaded.model->parameters(),
                                          script.optimizer.params);
    const std::int64_t batches = script.samples / rows;
    for (std::int64_t b = 0; b < batches; ++b) {
      std::vector<std::int64_t> samples;
      for (std::int64_t i = 0; i < rows; ++i) samples.push_back(b * rows + i);
      const Batch batch = data.batch(samples);
      const std::int64_t window = std::min(g, batches - b / g * g);
      const Tensor loss =
          language_loss((*loaded.model)(batch.inputs), batch.targets);
      autograd::backward({scale(loss, 1 / divisor(window))}, {});
      if ((b + 1) % g != 0 && b + 1 != batches) continue;
      optimizer->step();
      loaded.model->clear_grad();
    }
    return weights_of(state_of(*loaded.model));
  })[0];
}

TEST(AcceleratorTrap, ShortLastWindowIsDividedByTheFullNumber) {
  // 5 batches on each of 2 ranks: windows of 3 and 2
  Script script = sgd_script(3);
  script.samples = 20;
  const double g = 3;
  const Weights right = by_hand(script, 4, 3, [=](std::int64_t) { return g; });
  const Weights wrong =
      by_hand(script, 4, 3, [](std::int64_t window) { return double(window); });
  ASSERT_GT(apart(right, wrong), kApart);
  for (const Plugin& plugin : Plugins{Ddp{}, Fsdp{}, stage(2), Megatron{}}) {
    script.options.plugin = plugin;
    const Trace trace = run_on(2, script)[0];
    EXPECT_EQ(trace.losses.size(), 2u);
    EXPECT_LT(apart(trace.weights, right), kTolerance) << plugin.index();
    EXPECT_GT(apart(trace.weights, wrong), kApart) << plugin.index();
  }
}

/// Reductions in backward: the number in batches inside windows, and one by one
/// in batches that end a window.
struct Reductions {
  std::int64_t between = 0;
  std::vector<std::int64_t> at_ends;
};

Reductions reductions_of(const Script& given) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Reductions found;
    Script script = given;
    script.on_loss = [&](const Tensor& loss, std::int64_t) {
      world.clear_records();
      return loss;
    };
    script.clip = [&](Accelerator& acc, PreparedModel&) {
      std::int64_t count = 0;
      for (const CommRecord& each : world.records()) {
        count += each.op == CommOp::kAllReduce || each.op == CommOp::kReduce ||
                 each.op == CommOp::kReduceScatter;
      }
      if (acc.sync_gradients()) {
        found.at_ends.push_back(count);
      } else {
        found.between += count;
      }
    };
    run_script(script, world);
    return found;
  })[0];
}

TEST(AcceleratorTrap, NothingIsSentBetweenWindows) {
  // 5 batches on each of 2 ranks: windows of 3 and 2
  Script script = sgd_script(3);
  script.samples = 20;
  for (const Plugin& plugin : Plugins{Ddp{}, Fsdp{}, stage(0), stage(1)}) {
    script.options.plugin = plugin;
    const Reductions found = reductions_of(script);
    EXPECT_EQ(found.between, 0) << plugin.index();
    ASSERT_EQ(found.at_ends.size(), 2u);
    for (const std::int64_t count : found.at_ends) EXPECT_GT(count, 0);
  }
  // Shards of gradients hold only one micro-step
  script.options.plugin = stage(2);
  EXPECT_GT(reductions_of(script).between, 0);
}

TEST(AcceleratorTrap, UserWhoDividesAsWellTrainsTooSlowly) {
  Script script = sgd_script(2);
  for (const Plugin& plugin : Plugins{Ddp{}, stage(1)}) {
    script.options.plugin = plugin;
    script.on_loss = {};
    const Weights right = run_on(2, script)[0].weights;
    script.on_loss = [](const Tensor& loss, std::int64_t) {
      return scale(loss, 0.5);
    };
    EXPECT_GT(apart(run_on(2, script)[0].weights, right), kApart);
  }
}

TEST(AcceleratorTrap, ClippingBetweenMicroStepsChangesTheResult) {
  Script script = sgd_script(2);
  script.max_norm = 0.2;
  const Weights right = run_on(2, script)[0].weights;
  // A library whose clip_grad_norm_ acted after every batch
  script.clip = [](Accelerator& acc, PreparedModel& model) {
    if (acc.sync_gradients()) {
      acc.clip_grad_norm_(model.parameters(), 0.2);
    } else {
      clip_grad_norm(model.parameters(), 0.2);
    }
  };
  EXPECT_GT(apart(run_on(2, script)[0].weights, right), kApart);
}

TEST(AcceleratorTrap, UnderTheEngineTheConfigClips) {
  Script script = sgd_script(2);
  script.options.plugin = stage(1);
  const Trace unclipped = run_on(2, script)[0];
  // The call returns the norm and does not change the gradient
  script.max_norm = 0.01;
  const Trace called = run_on(2, script)[0];
  EXPECT_EQ(called.weights, unclipped.weights);
  EXPECT_GT(called.norms[0], 0.01);
  // The key clips, whatever the argument of the call
  script.options.plugin = DeepSpeed{.zero_stage = 1, .gradient_clipping = 0.2};
  const Trace clipped = run_on(2, script)[0];
  EXPECT_GT(apart(clipped.weights, unclipped.weights), kApart);
  script.options.plugin = Ddp{};
  script.max_norm = 0.2;
  EXPECT_LT(apart(run_on(2, script)[0].weights, clipped.weights), kTolerance);
}

TEST(AcceleratorTrap, EvaluatingInsideAWindowChangesNothing) {
  Script script = sgd_script(2);
  for (const Plugin& plugin :
       Plugins{Ddp{}, Fsdp{}, stage(1), stage(3), Megatron{.tp_degree = 2},
               Megatron{.pp_degree = 2}}) {
    script.options.plugin = plugin;
    script.clip = [](Accelerator&, PreparedModel&) {};
    const Trace trained = run_on(2, script)[0];
    script.clip = [&](Accelerator&, PreparedModel& model) {
      const Options options = options_of(script);
      const engine::TrainingData data = engine::training_data(
          Dataset::open(options, model_config(options)), script.samples);
      const NoGrad no_grad;
      EXPECT_GT(model.loss(data.batch({5, 6})).item(), 0);
    };
    EXPECT_EQ(run_on(2, script)[0].weights, trained.weights) << plugin.index();
  }
}

// --- The scheduler -----------------------------------------------------------

std::vector<double> rates_after(const std::vector<std::int64_t>& calls) {
  std::vector<double> rates;
  for (const std::int64_t k : calls) rates.push_back(0.1 / double(k + 1));
  return rates;
}

TEST(AcceleratorScheduler, AdvancesOncePerProcessAndWindow) {
  Script script = sgd_script(2);
  script.rate = [](std::int64_t k) { return 0.1 / double(k + 1); };
  script.batch_size = 1;
  for (const Plugin& plugin : Plugins{Ddp{}, Fsdp{}, stage(2)}) {
    script.options.plugin = plugin;
    // 24 samples, 4 processes, windows of 2: three updates
    const Trace trace = run_on(4, script)[0];
    EXPECT_EQ(trace.rates, rates_after({0, 4, 8}));
    EXPECT_EQ(trace.scheduler_steps, 12);
  }
  // Data-parallel ranks count, not all of them
  script.options.plugin = Megatron{2, 1, 1};
  const Trace trace = run_on(4, script)[0];
  EXPECT_EQ(trace.rates, rates_after({0, 2, 4, 6, 8, 10}));
}

TEST(AcceleratorScheduler, WithSplitBatchesOncePerWindow) {
  Script script = sgd_script(1);
  script.rate = [](std::int64_t k) { return 0.1 / double(k + 1); };
  script.options.split_batches = true;
  script.batch_size = 8;
  const Trace trace = run_on(4, script)[0];
  EXPECT_EQ(trace.rates, rates_after({0, 1, 2}));
  const ReferenceRun one = on_one_device(script, 8, 3);
  EXPECT_LT(largest_gap(trace.losses, one.losses), kTolerance);
}

TEST(AcceleratorScheduler, OfTheConfigMovesInTheEngine) {
  Script script = sgd_script(1);
  script.options.plugin =
      DeepSpeed{.hf_ds_config =
                    R"({"zero_optimization": {"stage": 1}, "scheduler": {"type":
              "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type":
              "linear", "warmup_max_lr": "auto", "warmup_min_lr": "auto"}}})"};
  const Trace trace = run_on(2, script)[0];
  EXPECT_EQ(trace.rates, (std::vector<double>{0, 0, 0.125, 0.25, 0.375, 0.5}));
  EXPECT_EQ(trace.scheduler_steps, 0);
}

TEST(AcceleratorScheduler, StaysWhereAnOverflowSkippedTheStep) {
  Script script = sgd_script(1);
  script.dtype = DType::kF32;
  script.options.mixed_precision = "fp16";
  script.optimizer.params.lr = 1e-3;
  script.samples = 40;
  script.rate = [](std::int64_t k) { return 1e-3 / double(k + 1); };
  script.on_loss = [](const Tensor& loss, std::int64_t batch) {
    return batch == 7 ? scale(loss, 1e6) : loss;
  };
  for (const Plugin& plugin : Plugins{Ddp{}, Fsdp{}, stage(1)}) {
    script.options.plugin = plugin;
    const Trace trace = run_on(2, script)[0];
    ASSERT_EQ(trace.skipped.size(), 10u);
    EXPECT_TRUE(trace.skipped[7]) << plugin.index();
    std::int64_t updates = 0;
    for (std::size_t i = 0; i < trace.skipped.size(); ++i) {
      EXPECT_EQ(trace.rates[i], 1e-3 / double(2 * updates + 1)) << i;
      if (!trace.skipped[i]) updates += 1;
    }
    EXPECT_GE(updates, 1) << plugin.index();
    EXPECT_EQ(trace.scheduler_steps, 2 * updates);
  }
}

TEST(AcceleratorPrecision, Bf16StaysNearF32UnderEveryPlugin) {
  Script script = sgd_script(1);
  script.dtype = DType::kF32;
  script.samples = 16;
  for (const Plugin& plugin :
       Plugins{Ddp{}, Fsdp{}, stage(2), Megatron{2, 1, 1}}) {
    script.options.plugin = plugin;
    script.options.mixed_precision = "no";
    const std::vector<double> exact = run_on(2, script)[0].losses;
    script.options.mixed_precision = "bf16";
    const std::vector<double> rounded = run_on(2, script)[0].losses;
    // bf16 rounds to eight bits, and training carries the differences on
    EXPECT_LT(largest_gap(exact, rounded), 0.1) << plugin.index();
    EXPECT_GT(largest_gap(exact, rounded), 0) << plugin.index();
  }
}

}  // namespace
}  // namespace shardbook::accelerate
