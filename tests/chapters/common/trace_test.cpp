// Traces as the programs write them: every event is there, and a viewer loses
// none.

#include "chapters/common/run/trace.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <map>
#include <thread>

#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/run/program.h"
#include "chapters/common/run/training.h"
#include "comm/device_mesh.h"
#include "sim/chrome_trace.h"
#include "tests/support/chrome_trace.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

OpEvent op(const char* name) {
  return {name, 0, 0, Phase::kBackward, Device::cpu(0), DType::kF32, {}, 0, {}};
}

// A worker's operation lies across the main thread's; the next worker's lies
// within both, and is a part of neither. A third one finds all free.
TEST(Trace, OperationsOfThreadsThatComputeAtOnceHaveLanes) {
  Trace trace(/*rank=*/1);
  const auto compute = [&trace](const char* name) {
    trace.on_op_begin(op(name));
    trace.on_op_end(op(name));
  };
  std::promise<void> has_begun, may_end;
  trace.on_op_begin(op("main"));
  trace.on_op_begin(op("inner"));
  std::thread across([&] {
    trace.on_op_begin(op("across"));
    has_begun.set_value();
    may_end.get_future().wait();
    trace.on_op_end(op("across"));
  });
  has_begun.get_future().wait();
  std::thread(compute, "main").join();
  trace.on_op_end(op("inner"));
  trace.on_op_end(op("main"));
  may_end.set_value();
  across.join();
  std::thread(compute, "later").join();
  const sim::RankTimeline timeline = trace.timeline();
  std::multimap<std::string, std::string> lanes;
  for (const sim::TimelineEvent& event : timeline.events) {
    lanes.emplace(event.name, event.queue);
  }
  EXPECT_EQ(lanes,
            (std::multimap<std::string, std::string>{{"across", "compute (2)"},
                                                     {"inner", "compute"},
                                                     {"later", "compute"},
                                                     {"main", "compute"},
                                                     {"main", "compute (3)"}}));
  // The worker's operation of the same name ends no other
  EXPECT_GT(timeline.events[0].end_s, timeline.events[1].end_s);
  const TempFolder folder;
  sim::write_chrome_trace(folder / "trace", {timeline});
  expect_chrome_trace(folder / "trace", {timeline});
}

Options small_options(int world_size) {
  Options options;
  options.world_size = world_size;
  options.model = R"({"model_type": "gpt2", "vocab_size": 64,
                      "n_positions": 16, "n_embd": 16, "n_layer": 4,
                      "n_head": 2})";
  options.data = "random";
  options.cluster = "none";
  options.steps = 2;
  options.batch = 8;
  options.seq = 8;
  return options;
}

/// What one rank does in step 3 to 6 of a chapter's main.
using RankBody =
    std::function<void(const Options& options, ProcessGroup& world, Run& run)>;

Report run_on(const Options& options, const RankBody& rank) {
  ChapterRun chapter;
  chapter.rank = rank;
  chapter.fold_class = each_rank;
  chapter.reference = [](const Options& options) {
    return train_one_device(options);
  };
  return run_and_compare(options, chapter);
}

/// Trains on threads with --trace, and reads the file.
ChromeTrace trace_of(Options options, const RankBody& rank) {
  const TempFolder folder;
  options.trace = folder / "trace.json";
  run_on(options, rank);
  const ChromeTrace trace = read_chrome_trace(options.trace);
  EXPECT_EQ(trace.faults, "");
  return trace;
}

/// The virtual timelines of a run on shapes, as --timeline writes them.
ChromeTrace timeline_of(Options options, const RankBody& rank) {
  options.backend = "sim";
  options.cluster = "dgx-a100";
  options.steps = 1;
  const Report report = run_on(options, rank);
  EXPECT_EQ(report.timelines.size(),
            static_cast<std::size_t>(options.world_size));
  const TempFolder folder;
  sim::write_chrome_trace(folder / "timeline", report.timelines);
  return expect_chrome_trace(folder / "timeline", report.timelines);
}

/// How often each name that begins with `prefix` is on a rank.
std::map<std::string, int> count(const ChromeTrace& trace, int rank,
                                 const std::string& prefix) {
  std::map<std::string, int> counts;
  for (const TraceSlice& slice : trace.slices) {
    if (slice.rank == rank && slice.name.starts_with(prefix)) {
      ++counts[slice.name];
    }
  }
  return counts;
}

RankBody ddp_of(const ddp::StrategyOptions& setup) {
  return [setup](const Options& options, ProcessGroup& world, Run& run) {
    ddp::DdpStrategy strategy(options, setup, world);
    run.train(options, strategy);
  };
}

// Buckets leave during backward and are waited for after it.
TEST(Trace, OfDdpHasEveryBucketOfEveryStep) {
  ddp::StrategyOptions setup;
  setup.ddp.bucket_cap_mb = 0.01;
  setup.ddp.first_bucket_mb = 0.001;
  const ChromeTrace trace = trace_of(small_options(2), ddp_of(setup));
  const auto first = count(trace, 0, "all_reduce bucket ");
  for (const int rank : {0, 1}) {
    const auto buckets = count(trace, rank, "all_reduce bucket ");
    EXPECT_GT(buckets.size(), 3u);
    EXPECT_EQ(buckets, first);
    EXPECT_EQ(buckets.at("all_reduce bucket 0"), 2);
    const std::vector<std::string>& lanes = trace.lanes.at(rank);
    ASSERT_GE(lanes.size(), 3u);
    EXPECT_EQ(lanes[0], "compute");
    EXPECT_EQ(lanes[1], "comm world");
    EXPECT_EQ(lanes[2], "comm world (2)");
  }
}

RankBody pipeline_of(const Options& options,
                     const pipeline::StrategyOptions& setup) {
  const pipeline::Plan plan = pipeline::make_plan(options, setup);
  return [=](const Options& options, ProcessGroup& world, Run& run) {
    pipeline::PipelineStrategy strategy(options, setup, plan, world);
    run.train(options, strategy);
  };
}

TEST(Trace, OfAPipelineHasEveryMessage) {
  const Options options = small_options(3);
  pipeline::StrategyOptions setup;
  setup.micro_batches = 4;
  const ChromeTrace trace = trace_of(options, pipeline_of(options, setup));
  // Activations and gradients of four micro-batches, in two steps
  const std::vector<int> expected = {8, 16, 8};
  for (int rank = 0; rank < 3; ++rank) {
    int sends = 0;
    for (const auto& [name, times] : count(trace, rank, "send")) sends += times;
    EXPECT_EQ(sends, expected[static_cast<std::size_t>(rank)]) << rank;
  }
}

TEST(Timeline, OfDdpLosesNothing) {
  ddp::StrategyOptions setup;
  setup.ddp.bucket_cap_mb = 0.01;
  timeline_of(small_options(2), ddp_of(setup));
}

TEST(Timeline, OfAPipelineLosesNothing) {
  const Options options = small_options(4);
  pipeline::StrategyOptions setup;
  setup.micro_batches = 4;
  timeline_of(options, pipeline_of(options, setup));
}

RankBody hybrid_of(const hybrid::HybridOptions& setup) {
  return [setup](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, hybrid::topology_of(setup));
    const auto strategy = hybrid::make_strategy(options, setup, mesh);
    run.train(options, *strategy);
  };
}

TEST(Timeline, OfAHybridLosesNothing) {
  hybrid::HybridOptions setup;
  setup.dp = setup.pp = 2;
  setup.overlap_grad_reduce = true;
  setup.bucket_bytes = 4096;
  timeline_of(small_options(4), hybrid_of(setup));
}

}  // namespace
}  // namespace shardbook
