// Traces as the programs write them: every event is there, and a viewer loses
// none.

#include "chapters/common/run/trace.h"

#include <gtest/gtest.h>

#include <future>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "chapters/programs/programs.h"
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

/// A chapter's line: two steps of a small GPT.
std::string small(const std::string& options) {
  return options +
         R"( --model '{"vocab_size": 64, "n_positions": 16, "n_embd": 16,
                       "n_layer": 4, "n_head": 2}'
             --data random --batch 8 --seq 8 --no-check --steps 2)";
}

/// Trains on threads with --trace, and reads the file.
ChromeTrace trace_of(const std::string& options) {
  const TempFolder folder;
  const std::string file = folder / "trace.json";
  run(small(options) + " --cluster none --trace " + file);
  const ChromeTrace trace = read_chrome_trace(file);
  EXPECT_EQ(trace.faults, "");
  return trace;
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

// Buckets leave during backward and are waited for after it.
TEST(Trace, OfDdpHasEveryBucketOfEveryStep) {
  const ChromeTrace trace = trace_of(
      "02_ddp --world-size 2 --bucket-mb 0.01 --first-bucket-mb 0.001");
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

TEST(Trace, OfAPipelineHasEveryMessage) {
  const ChromeTrace trace =
      trace_of("06_1f1b --world-size 3 --micro-batches 4");
  // Activations and gradients of four micro-batches, in two steps
  const std::vector<int> expected = {8, 16, 8};
  for (int rank = 0; rank < 3; ++rank) {
    int sends = 0;
    for (const auto& [name, times] : count(trace, rank, "send")) sends += times;
    EXPECT_EQ(sends, expected[static_cast<std::size_t>(rank)]) << rank;
  }
}

// The virtual timelines of a run on shapes, as --timeline writes them.
TEST(Timeline, LosesNothing) {
  for (const std::string line :
       {"02_ddp --world-size 4 --bucket-mb 0.01",
        "06_1f1b --world-size 4 --micro-batches 4",
        "14_hybrid_3d --world-size 4 --pp 2 --overlap-grad-reduce "
        "--bucket-bytes 4096"}) {
    SCOPED_TRACE(line);
    const Report report =
        run(small(line) + " --steps 1 --backend sim --no-fold");
    EXPECT_EQ(report.timelines.size(), 4u);
    const TempFolder folder;
    sim::write_chrome_trace(folder / "timeline", report.timelines);
    expect_chrome_trace(folder / "timeline", report.timelines);
  }
}

}  // namespace
}  // namespace shardbook
