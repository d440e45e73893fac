// One program, four worlds: counts of runs with data equal the charges of the
// world `sim` on shapes.

#include "chapters/common/run/worlds.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/training.h"
#include "chapters/programs/programs.h"
#include "core/context.h"
#include "sim/device_clock.h"
#include "tests/support/sanitized.h"

namespace shardbook {
namespace {

/// A chapter's line: three steps of a small GPT.
std::string small(const std::string& chapter, int ranks,
                  const std::string& options = "") {
  return fmt::format(
      "{} --world-size {} --model gpt-nano --data random --steps 3 --batch 24 "
      "--seq 16 --no-check {}",
      chapter, ranks, options);
}

/// The messages of rank 0's steps, in order.
std::vector<std::string> messages_of(const Report& report) {
  const sim::RankTimeline& rank = report.timelines.at(0);
  std::vector<std::string> messages;
  for (const sim::TimelineEvent& event : rank.events) {
    if (event.category != "comm" || event.begin_s >= rank.steps.back())
      continue;
    messages.push_back(fmt::format("{} {} {} on {}", event.name, event.label,
                                   event.bytes, event.queue));
  }
  return messages;
}

void expect_same(const Report& a, const Report& b) {
  EXPECT_EQ(messages_of(a), messages_of(b));
  ASSERT_EQ(a.ranks.size(), b.ranks.size());
  for (std::size_t r = 0; r < a.ranks.size(); ++r) {
    EXPECT_EQ(a.ranks[r].bytes.counted, b.ranks[r].bytes.counted);
    for (int k = 0; k < kNumMemoryKinds; ++k) {
      // Kernels need scratch memory if there are data.
      if (static_cast<MemoryKind>(k) == MemoryKind::kWorkspace) continue;
      const auto kind = static_cast<std::size_t>(k);
      EXPECT_EQ(a.ranks[r].peak[kind].counted, b.ranks[r].peak[kind].counted)
          << memory_kind_name(static_cast<MemoryKind>(k));
    }
  }
  // Repeated micro-batches that are multiplied round differently.
  const double rounding = 1e-9 * a.time.step_s;
  EXPECT_NEAR(a.time.step_s, b.time.step_s, rounding);
  EXPECT_NEAR(a.time.exposed_comm_s, b.time.exposed_comm_s, rounding);
  ASSERT_EQ(a.time.links.size(), b.time.links.size());
  for (std::size_t i = 0; i < a.time.links.size(); ++i) {
    EXPECT_EQ(a.time.links[i].link, b.time.links[i].link);
    EXPECT_DOUBLE_EQ(a.time.links[i].bytes, b.time.links[i].bytes);
  }
}

/// The run on shapes predicts the time that this run counts.
void expect_as_predicted(const Report& report) {
  EXPECT_GT(report.time.step_s, 0);
  EXPECT_NEAR(report.time.simulated_step_s, report.time.step_s,
              1e-9 * report.time.step_s);
}

/// On threads; on shapes; and on shapes where ranks that do the same run once.
void expect_same_everywhere(const std::string& line) {
  SCOPED_TRACE(line);
  const Report threads = run(line);
  const Report unfolded = run(line + " --backend sim --no-fold");
  expect_same(threads, unfolded);
  expect_same(unfolded, run(line + " --backend sim"));
  expect_as_predicted(threads);
}

class Worlds : public ::testing::TestWithParam<int> {};

TEST_P(Worlds, DdpCountsOnThreadsWhatSimCharges) {
  const int n = GetParam();
  for (const std::string& options :
       {std::string(), std::string("--gradient-as-bucket-view"),
        std::string("--find-unused-parameters"),
        std::string("--comm-hook bf16"),
        fmt::format("--bucket-mb 0.2 --micro-batches {}",
                    std::max(1, 12 / n))}) {
    expect_same_everywhere(
        small("02_ddp", n, "--clip 0.5 --cluster dgx-v100 " + options));
  }
}

TEST_P(Worlds, ZeroAndFsdpCountOnThreadsWhatSimCharges) {
  const int n = GetParam();
  for (const std::string& strategy :
       {std::string("zero1 --reduce-bucket-size 50000"), std::string("zero2"),
        std::string("zero3 --recompute"),
        std::string("zero3 --persistence-threshold 0"),
        std::string("fsdp --recompute"),
        std::string("fsdp --sharding-strategy shard_grad_op --cpu-offload"),
        std::string("fsdp2"), std::string("fsdp --param-dtype bf16"),
        // Less than some gradients
        std::string("zero2 --reduce-bucket-size 7000 "
                    "--allgather-bucket-size 1000"),
        std::string("zero2 --cpu-offload"),
        fmt::format("fsdp2 --sharding-strategy hybrid_shard --shard-size {}",
                    n % 2 == 0 ? 2 : 1)}) {
    expect_same_everywhere(
        small("03_zero_fsdp", n, "--clip 0.5 --strategy " + strategy));
  }
}

// One step of a thousand devices may take minutes.
TEST(WorldsDeathTest, ASignalIsNoticedInsideASimulatedStep) {
  const auto run = [] {
    setenv("GOMP_SPINCOUNT", "10000", 0);  // else the program starts once more
    Options options;
    options.world_size = 2;
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
  const int micro_batches = GetParam();
  const std::string line =
      small("00_single_device", 1,
            fmt::format("--micro-batches {}{}", micro_batches,
                        micro_batches % 2 == 0 ? " --recompute" : ""));
  const Report threads = run(line), shapes = run(line + " --backend sim");
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
  const std::string line = small("02_ddp", 4, "--backend sim --steps ");
  const Report five = run(line + "5"), four = run(line + "4");
  double in_links = 0, in_ledger = 0;
  for (const sim::LinkBytes& link : five.time.links) in_links += link.bytes;
  for (std::size_t r = 0; r < 4; ++r) {
    in_ledger += five.ranks[r].bytes.counted - four.ranks[r].bytes.counted;
  }
  EXPECT_DOUBLE_EQ(in_links, in_ledger);
}

// Sums over the images of a batch depend on the number of cores.
TEST(WorldsTest, OneDeviceHasTheCoresOfARank) {
  Options options;
  options.model = "mlp";
  options.data = "random";
  options.steps = 1;
  options.batch = 24;
  options.seq = 16;
  options.cluster = "none";
  int cores_of_a_rank = 0;
  run_chapter(options, [&](const Options&, ProcessGroup&, Report&) {
    cores_of_a_rank = num_threads();
  });
  EXPECT_GT(cores_of_a_rank, 0);
  EXPECT_EQ(run(small("02_ddp", 1, "--model mlp --steps 1 --cluster none"))
                .rank_threads,
            cores_of_a_rank);

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
  const std::string images =
      R"(--model '{"model_type": "resnet", "depths": [1, 1],
                   "embedding_size": 4, "num_labels": 5}'
         --image-size 16 --batch 4 --dtype bf16 --micro-batches 2)";
  expect_as_predicted(run(small("00_single_device", 1, images)));
  expect_as_predicted(run(small("05_gpipe", 2, images)));
}

// On shapes, equal micro-batches are run once and multiplied; threads run all.
TEST(WorldsTest, ThousandsOfMicroBatchesCostTheTimeOfAll) {
  const auto with = [](int micro_batches, const char* backend) {
    return run(small("02_ddp", 2,
                     fmt::format("--model mlp --batch {} --micro-batches {} "
                                 "--backend {}",
                                 2 * micro_batches, micro_batches, backend)));
  };
  const Report all = with(40, "threads"), few = with(40, "sim");
  EXPECT_EQ(messages_of(all), messages_of(few));
  EXPECT_NEAR(few.time.step_s / all.time.step_s, 1, 1e-9);
  EXPECT_NEAR(few.time.idle_share, all.time.idle_share, 1e-9);
  EXPECT_GT(with(10000, "sim").time.step_s, 200 * few.time.step_s);
}

// Events, samples and steps: stored data does not grow with the run, and sums
// cover all of it.
TEST(WorldsTest, LongRunsKeepAsMuchAsShorterOnes) {
  const auto with = [](int steps) {
    return run(small("02_ddp", 2,
                     R"(--model '{"model_type": "mlp", "n_embd": 8,
                        "vocab_size": 32, "n_positions": 16}'
                        --batch 4 --backend sim --steps )" +
                         std::to_string(steps)));
  };
  const Report whole = with(20);
  const std::size_t events = whole.timelines[0].events.size() / 20 + 1;
  for (const int steps : sized<int>({1000, 10000}, {1000})) {
    SCOPED_TRACE(std::to_string(steps) + " steps");
    const Report report = with(steps);
    for (const sim::RankTimeline& each : report.timelines) {
      EXPECT_LE(each.events.size(),
                2 * sim::DeviceClock::kLastEvents + 3 * events);
      EXPECT_LE(each.memory.size(), 4 * each.events.size());
      EXPECT_LE(each.steps.size(), 2 * sim::DeviceClock::kMostSteps + 6);
      EXPECT_GT(each.num_left_out, 0);
    }
    for (const RankReport& rank : report.ranks) {
      EXPECT_EQ(rank.bytes.counted, rank.bytes.predicted);
    }
    EXPECT_NEAR(report.time.step_s, whole.time.step_s,
                1e-9 * whole.time.step_s);
  }
}

TEST(WorldsTest, ALargeModelOnAThousandDevices) {
  const Report report =
      run(small("02_ddp", 1024,
                "--model gpt-175b --backend sim --dtype bf16 --batch 1024 "
                "--seq 2048 --cluster selene"));
  ASSERT_EQ(report.ranks.size(), 1024u);
  EXPECT_EQ(report.ranks[1023].bytes.counted,
            report.ranks[1023].bytes.predicted);
  // Forward and backward alone: 6 flops for each weight and token.
  EXPECT_GT(report.time.step_s, 6 * 175e9 * 2048 / 312e12);
}

// Communication that hides is not exposed: one bucket for everything cannot
// hide, many can.
TEST(WorldsTest, SmallerBucketsHideBehindBackward) {
  const auto exposed = [](const char* buckets) {
    return run(small("02_ddp", 8,
                     std::string("--model gpt2 --backend sim --batch 64 "
                                 "--seq 512 ") +
                         buckets))
        .time.exposed_comm_s;
  };
  EXPECT_LT(exposed(""),
            exposed("--first-bucket-mb 100000 --bucket-mb 100000") / 2);
}

}  // namespace
}  // namespace shardbook
