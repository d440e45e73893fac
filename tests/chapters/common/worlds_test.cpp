// One program, four worlds: counts of runs with data equal the charges of the
// world `sim` on shapes.

#include "chapters/common/run/worlds.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "chapters/00_single_device/single_device.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/common/run/exit_status.h"
#include "comm/ledger.h"
#include "sim/device_clock.h"
#include "tests/support/sanitized.h"

namespace shardbook {
namespace {

struct Outcome {
  Report report;
  std::vector<std::string> ledger;  // of rank 0
};

Options small_options(int world_size) {
  Options options;
  options.world_size = world_size;
  options.model = "gpt-nano";
  options.data = "random";
  options.steps = 3;
  options.batch = 24;
  options.seq = 16;
  return options;
}

/// Trains by a strategy on every rank.
template <typename Make>
Outcome run_strategy(const Options& options, const Make& make,
                     const FoldClass& fold_class = one_class) {
  Outcome outcome;
  outcome.report = run_chapter(
      options,
      [&](const Options& options, ProcessGroup& world, Report& report) {
        auto strategy = make(options, world);
        const TrainingLog log =
            train(options, strategy.optimizer(), false,
                  [&](std::int64_t step) { return strategy.step(step); });
        finish_rank(options, world, log, strategy.bills()[0], report);
        if (world.rank() != 0) return;
        outcome.ledger.clear();
        for (const CommRecord& record : world.records()) {
          outcome.ledger.push_back(record_text(record));
        }
      },
      fold_class);
  return outcome;
}

template <typename StrategyType, typename Setup>
Outcome run_strategy(const Options& options, const Setup& setup,
                     const FoldClass& fold_class = one_class) {
  return run_strategy(
      options,
      [&](const Options& options, ProcessGroup& world) {
        return StrategyType(options, setup, world);
      },
      fold_class);
}

Report run_alone(const Options& options,
                 const single_device::SingleDeviceOptions& setup) {
  const auto make = [&](const Options& options, ProcessGroup&) {
    return single_device::SingleDevice(options, setup);
  };
  return run_strategy(options, make).report;
}

Outcome run_ddp(const Options& options, const ddp::StrategyOptions& setup) {
  return run_strategy<ddp::DdpStrategy>(options, setup);
}

void expect_same(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.ledger, b.ledger);
  ASSERT_EQ(a.report.ranks.size(), b.report.ranks.size());
  for (std::size_t r = 0; r < a.report.ranks.size(); ++r) {
    EXPECT_EQ(a.report.ranks[r].bytes.counted, b.report.ranks[r].bytes.counted);
    for (int k = 0; k < kNumMemoryKinds; ++k) {
      // Kernels need scratch memory if there are data.
      if (static_cast<MemoryKind>(k) == MemoryKind::kWorkspace) continue;
      const auto kind = static_cast<std::size_t>(k);
      EXPECT_EQ(a.report.ranks[r].peak[kind].counted,
                b.report.ranks[r].peak[kind].counted)
          << memory_kind_name(static_cast<MemoryKind>(k));
    }
  }
  // Repeated micro-batches that are multiplied round differently.
  const double rounding = 1e-9 * a.report.time.step_s;
  EXPECT_NEAR(a.report.time.step_s, b.report.time.step_s, rounding);
  EXPECT_NEAR(a.report.time.exposed_comm_s, b.report.time.exposed_comm_s,
              rounding);
  ASSERT_EQ(a.report.time.links.size(), b.report.time.links.size());
  for (std::size_t i = 0; i < a.report.time.links.size(); ++i) {
    EXPECT_EQ(a.report.time.links[i].link, b.report.time.links[i].link);
    EXPECT_DOUBLE_EQ(a.report.time.links[i].bytes,
                     b.report.time.links[i].bytes);
  }
}

class Worlds : public ::testing::TestWithParam<int> {};

TEST_P(Worlds, DdpCountsOnThreadsWhatSimCharges) {
  std::vector<ddp::StrategyOptions> variants(5);
  variants[1].ddp.gradient_as_bucket_view = true;
  variants[2].ddp.find_unused_parameters = true;
  variants[3].comm_hook = "bf16";
  variants[4].micro_batches = 24 / GetParam() > 1 ? 24 / GetParam() / 2 : 1;
  variants[4].ddp.bucket_cap_mb = 0.2;
  for (const ddp::StrategyOptions& setup : variants) {
    Options options = small_options(GetParam());
    options.clip = 0.5;
    options.cluster = "dgx-v100";
    options.backend = "threads";
    const Outcome threads = run_ddp(options, setup);
    options.backend = "sim";
    options.fold = false;
    const Outcome unfolded = run_ddp(options, setup);
    options.fold = true;
    const Outcome folded = run_ddp(options, setup);
    expect_same(threads, unfolded);
    expect_same(unfolded, folded);
    EXPECT_NEAR(threads.report.time.simulated_step_s,
                threads.report.time.step_s, 1e-9 * threads.report.time.step_s);
  }
}

TEST_P(Worlds, ZeroAndFsdpCountOnThreadsWhatSimCharges) {
  std::vector<zero_fsdp::StrategyOptions> variants(11);
  const char* strategies[] = {"zero1", "zero2", "zero3", "zero3",
                              "fsdp",  "fsdp",  "fsdp2", "fsdp",
                              "zero2", "zero2", "fsdp2"};
  for (std::size_t i = 0; i < variants.size(); ++i) {
    variants[i].strategy = strategies[i];
  }
  variants[0].zero.reduce_bucket_size = 50000;
  variants[2].recompute = true;
  variants[3].zero.persistence_threshold = 0;
  variants[4].recompute = true;
  variants[5].sharding_strategy = "shard_grad_op";
  variants[5].cpu_offload = true;
  variants[7].param_dtype = "bf16";
  variants[8].zero.reduce_bucket_size = 7000;  // less than some gradients
  variants[8].zero.allgather_bucket_size = 1000;
  variants[9].cpu_offload = true;
  variants[10].sharding_strategy = "hybrid_shard";
  variants[10].fsdp.shard_size = GetParam() % 2 == 0 ? 2 : 1;
  for (const zero_fsdp::StrategyOptions& setup : variants) {
    SCOPED_TRACE(setup.strategy);
    Options options = small_options(GetParam());
    options.clip = 0.5;
    options.fold = false;
    const Outcome threads =
        run_strategy<zero_fsdp::ZeroFsdpStrategy>(options, setup);
    options.backend = "sim";
    const Outcome unfolded =
        run_strategy<zero_fsdp::ZeroFsdpStrategy>(options, setup);
    expect_same(threads, unfolded);
    options.fold = true;
    expect_same(unfolded,
                run_strategy<zero_fsdp::ZeroFsdpStrategy>(
                    options, setup, zero_fsdp::fold_class(options, setup)));
  }
}

// One step of a thousand devices may take minutes.
TEST(WorldsDeathTest, ASignalIsNoticedInsideASimulatedStep) {
  const auto run = [] {
    Options options = small_options(2);
    options.backend = "sim";
    return chapter_main([&] {
      run_chapter(options, [](const Options& options, ProcessGroup&, Report&) {
        const auto none = make_optimizer("sgd", {}, {});
        train(options, *none, false, [](std::int64_t) {
          kill(getpid(), SIGTERM);
          while (true) Tensor::zeros({4}).fill(1);
          return StepResult();
        });
      });
      return 0;
    });
  };
  EXPECT_EXIT(std::exit(run()), testing::ExitedWithCode(143), "");
}

TEST_P(Worlds, AllClaimsHoldOnOneDeviceInBothWorlds) {
  // The rank count is also the number of micro-batches.
  Options options = small_options(1);
  single_device::SingleDeviceOptions setup;
  setup.num_micro_batches = GetParam();
  setup.recompute = GetParam() % 2 == 0;
  const Report threads = run_alone(options, setup);
  options.backend = "sim";
  const Report shapes = run_alone(options, setup);
  EXPECT_NEAR(threads.time.step_s, shapes.time.step_s,
              1e-9 * shapes.time.step_s);
  const auto activations = static_cast<std::size_t>(MemoryKind::kActivation);
  EXPECT_EQ(threads.ranks[0].peak[activations].counted,
            shapes.ranks[0].peak[activations].counted);
  EXPECT_EQ(threads.ranks[0].peak[activations].simulated,
            shapes.ranks[0].peak[activations].counted);
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, Worlds,
                         ::testing::ValuesIn(world_sizes({4})));

// A step's messages have the same bytes on the links and in the ledger.
TEST(WorldsTest, LinksCarryWhatTheLedgerCounts) {
  Options options = small_options(4);
  options.backend = "sim";
  options.steps = 5;
  const Outcome five = run_ddp(options, {});
  options.steps = 4;
  const Outcome four = run_ddp(options, {});
  double in_links = 0, in_ledger = 0;
  for (const sim::LinkBytes& link : five.report.time.links) {
    in_links += link.bytes;
  }
  for (std::size_t r = 0; r < 4; ++r) {
    in_ledger +=
        five.report.ranks[r].bytes.counted - four.report.ranks[r].bytes.counted;
  }
  EXPECT_DOUBLE_EQ(in_links, in_ledger);
}

// Sums over the images of a batch depend on the number of cores.
TEST(WorldsTest, OneDeviceHasTheCoresOfARank) {
  Options options = small_options(1);
  options.model = "mlp";
  options.steps = 1;
  options.cluster = "none";
  int cores_of_a_rank = 0;
  run_chapter(options, [&](const Options&, ProcessGroup&, Report&) {
    cores_of_a_rank = num_threads();
  });
  EXPECT_GT(cores_of_a_rank, 0);
  EXPECT_EQ(run_ddp(options, {}).report.rank_threads, cores_of_a_rank);

  const ReferenceRun one = train_one_device(options);
  Report report;
  report.losses = one.losses;
  report.grad_norms = one.grad_norms;
  report.rank_threads = 3;
  int cores = 0;
  const auto compare = [&] {
    compare_with_reference(
        options, one.parameters,
        [&](const Options& options) {
          cores = num_threads();
          return train_one_device(options);
        },
        report);
  };
  compare();
  // Without OpenMP, as under the thread sanitizer, every operation has one core
  RankContext with_three(Device::cpu(0), 0, 3);
  {
    const RankContext::Scope scope(with_three);
    EXPECT_EQ(cores, num_threads());
  }
  EXPECT_TRUE(report.parity.passed);

  options.dtype = DType::kF64;
  compare();
  EXPECT_EQ(cores, num_threads());
}

// Conversions, and the loss in f32, take the same time with data and on shapes.
TEST(WorldsTest, ImagesInSixteenBitsTakeThePredictedTime) {
  Options options = small_options(1);
  options.model = R"({"model_type": "resnet", "depths": [1, 1],
                      "embedding_size": 4, "num_labels": 5})";
  options.image_size = 16;
  options.batch = 4;
  options.dtype = DType::kBF16;
  const auto expect_as_predicted = [](const Report& report) {
    EXPECT_GT(report.time.step_s, 0);
    EXPECT_NEAR(report.time.simulated_step_s, report.time.step_s,
                1e-9 * report.time.step_s);
  };
  single_device::SingleDeviceOptions pieces;
  pieces.num_micro_batches = 2;
  expect_as_predicted(run_alone(options, pieces));
  options.world_size = 2;
  gpipe::StrategyOptions setup;
  setup.micro_batches = 2;
  // Each rank has a stage of its own: no rank represents another
  const auto each = [](int rank) { return rank; };
  expect_as_predicted(
      run_strategy<gpipe::GpipeStrategy>(options, setup, each).report);
}

// On shapes, equal micro-batches are run once and multiplied; threads run all.
TEST(WorldsTest, ThousandsOfMicroBatchesCostTheTimeOfAll) {
  Options options = small_options(2);
  options.model = "mlp";
  options.batch = 80;
  ddp::StrategyOptions setup;
  setup.micro_batches = 40;
  const Outcome all = run_ddp(options, setup);
  options.backend = "sim";
  const Outcome few = run_ddp(options, setup);
  EXPECT_EQ(all.ledger, few.ledger);
  EXPECT_NEAR(few.report.time.step_s / all.report.time.step_s, 1, 1e-9);
  EXPECT_NEAR(few.report.time.idle_share, all.report.time.idle_share, 1e-9);
  options.batch = 20000;
  setup.micro_batches = 10000;
  const Outcome many = run_ddp(options, setup);
  EXPECT_GT(many.report.time.step_s, 200 * few.report.time.step_s);
}

// Events, samples, steps and records: stored data does not grow with the run,
// and sums cover all of it.
TEST(WorldsTest, LongRunsKeepAsMuchAsShorterOnes) {
  Options options = small_options(2);
  options.model = R"({"model_type": "mlp", "n_embd": 8, "vocab_size": 32,
                      "n_positions": 16})";
  options.batch = 4;
  options.backend = "sim";
  options.steps = 20;
  const Outcome whole = run_ddp(options, {});
  const std::size_t events = whole.report.timelines[0].events.size() / 20 + 1;
  for (const int steps : sized<int>({1000, 13000}, {1000})) {
    SCOPED_TRACE(std::to_string(steps) + " steps");
    options.steps = steps;
    const Outcome run = run_ddp(options, {});
    for (const sim::RankTimeline& each : run.report.timelines) {
      EXPECT_LE(each.events.size(),
                2 * sim::DeviceClock::kLastEvents + 3 * events);
      EXPECT_LE(each.memory.size(), 4 * each.events.size());
      EXPECT_LE(each.steps.size(), 2 * sim::DeviceClock::kMostSteps + 6);
      EXPECT_GT(each.num_left_out, 0);
    }
    EXPECT_LE(run.ledger.size(), 3 * CommLog::kKept);
    for (const RankReport& rank : run.report.ranks) {
      EXPECT_EQ(rank.bytes.counted, rank.bytes.predicted);
    }
    EXPECT_NEAR(run.report.time.step_s, whole.report.time.step_s,
                1e-9 * whole.report.time.step_s);
  }
}

TEST(WorldsTest, ALargeModelOnAThousandDevices) {
  Options options = small_options(1024);
  options.model = "gpt-175b";
  options.backend = "sim";
  options.dtype = DType::kBF16;
  options.batch = 1024;
  options.seq = 2048;
  options.cluster = "selene";
  const Outcome run = run_ddp(options, {});
  ASSERT_EQ(run.report.ranks.size(), 1024u);
  EXPECT_EQ(run.report.ranks[1023].bytes.counted,
            run.report.ranks[1023].bytes.predicted);
  // Forward and backward alone: 6 flops for each weight and token.
  EXPECT_GT(run.report.time.step_s, 6 * 175e9 * 2048 / 312e12);
}

// Communication that hides is not exposed: one bucket for everything cannot
// hide, many can.
TEST(WorldsTest, SmallerBucketsHideBehindBackward) {
  Options options = small_options(8);
  options.model = "gpt2";
  options.backend = "sim";
  options.batch = 64;
  options.seq = 512;
  ddp::StrategyOptions one, many;
  one.ddp.bucket_cap_mb = one.ddp.first_bucket_mb = 1e5;
  const double exposed_one = run_ddp(options, one).report.time.exposed_comm_s;
  const double exposed_many = run_ddp(options, many).report.time.exposed_comm_s;
  EXPECT_LT(exposed_many, exposed_one / 2);
}

}  // namespace
}  // namespace shardbook
