// Clocks that travel with messages, in threads, in fibers, and folded.

#include "sim/timed_group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "comm/device_mesh.h"
#include "core/check.h"
#include "core/ops.h"
#include "core/stream.h"
#include "tests/sim/sim_support.h"
#include "tests/support/errors.h"

namespace shardbook::test {
namespace {

using sim::RankTimeline;

double step_us(const RankTimeline& timeline) {
  return (timeline.steps[1] - timeline.steps[0]) * 1e6;
}

std::string text_of(const std::map<int, RankTimeline>& ranks) {
  std::ostringstream text;
  text.precision(17);
  for (const auto& [rank, timeline] : ranks) {
    for (const sim::TimelineEvent& event : timeline.events) {
      text << rank << " " << event.name << " " << event.label << " "
           << event.queue << " " << event.begin_s << " " << event.end_s << " "
           << event.bytes << " " << event.peer << " " << event.message << "\n";
    }
  }
  return text.str();
}

// Ranks compute for different times, all-reduce twice, and pass a message on.
void mixed_body(ProcessGroup& world) {
  const int r = world.rank();
  const int size = world.size();
  const Tensor a = Tensor::full({1000}, r);
  const Tensor b = Tensor::full({2000}, r);
  compute_for(10 + 5 * r);
  Work first = world.all_reduce(a, ReduceOp::kSum, "first");
  compute_for(20 - 2 * r);
  Work second = world.all_reduce(b, ReduceOp::kSum, "second");
  first.wait();
  compute_for(3);
  second.wait();
  if (size > 1) {
    const Tensor out = Tensor::full({500}, r), in = Tensor::empty({500});
    Work received = world.recv(in, (r + size - 1) % size);
    world.send(out, (r + 1) % size).wait();
    received.wait();
  }
  world.barrier();
}

TEST(TimedGroup, ACollectiveBeginsWithTheLastAndEndsForAll) {
  for (const std::string backend : {"threads", "sim"}) {
    const auto options = plain_world(backend, plain_cluster());
    const auto ranks = timelines(4, options, [](ProcessGroup& world) {
      compute_for(10 * (world.rank() + 1));
      world.all_reduce(Tensor::zeros({1})).wait();
    });
    const double cost =
        options.cost->collective(CommOp::kAllReduce, 4, {0, 1, 2, 3}).seconds;
    ASSERT_EQ(ranks.size(), 4u);
    for (const auto& [rank, timeline] : ranks) {
      // 40 us of work on the last rank, and the fill of one element
      EXPECT_NEAR(step_us(timeline), 41 + cost * 1e6, 1e-6) << backend;
    }
  }
}

TEST(TimedGroup, ComputationHidesCommunication) {
  const auto options = plain_world("sim", plain_cluster());
  const Shape large{250000};  // 1 MB
  const double cost_us =
      1e6 * options.cost->collective(CommOp::kAllReduce, 1e6, {0, 1}).seconds;
  const auto run = [&](bool overlaps) {
    const auto ranks = timelines(2, options, [&](ProcessGroup& world) {
      const Tensor x = Tensor::empty(large);
      Work reduced = world.all_reduce(x);
      if (!overlaps) reduced.wait();
      compute_for(500);
      reduced.wait();
    });
    return step_us(ranks.at(0));
  };
  EXPECT_NEAR(run(true), std::max(cost_us, 500.0), 1e-6);
  EXPECT_NEAR(run(false), cost_us + 500, 1e-6);
}

TEST(TimedGroup, CollectivesOfAGroupQueue) {
  const auto options = plain_world("sim", plain_cluster());
  const double one =
      options.cost->collective(CommOp::kAllReduce, 4000, {0, 1}).seconds;
  const auto ranks = timelines(2, options, [&](ProcessGroup& world) {
    const Tensor a = Tensor::empty({1000}), b = Tensor::empty({1000});
    Work first = world.all_reduce(a), second = world.all_reduce(b);
    second.wait();
    first.wait();
  });
  EXPECT_NEAR(step_us(ranks.at(0)), 2 * one * 1e6, 1e-6);
}

TEST(TimedGroup, AMessageArrivesAfterItsTime) {
  const auto options = plain_world("sim", plain_cluster());
  const double cost = options.cost->message(4000, 0, 1).seconds;
  const auto ranks = timelines(2, options, [&](ProcessGroup& world) {
    const Tensor x = Tensor::empty({1000});
    if (world.rank() == 0) {
      compute_for(50);
      world.send(x, 1).wait();
    } else {
      world.recv(x, 0).wait();
      compute_for(5);
    }
  });
  EXPECT_NEAR(step_us(ranks.at(1)), 50 + cost * 1e6 + 5, 1e-6);
  // Both ends know which message it is, and when it is on the wire.
  const sim::TimelineEvent send = find_event(ranks.at(0), "send");
  const sim::TimelineEvent recv = find_event(ranks.at(1), "recv");
  EXPECT_EQ(send.peer, 1);
  EXPECT_EQ(send.message, 0);
  EXPECT_EQ(recv.begin_s, send.begin_s);
  EXPECT_EQ(recv.end_s, send.end_s);
}

// A message that its receiver does not need yet is on the wire no longer than
// one whose receiver waits for it.
TEST(TimedGroup, AMessageThatWaitsForItsReceiverIsNoCommunication) {
  const auto options = plain_world("sim", plain_cluster());
  const double cost = options.cost->message(4000, 0, 1).seconds;
  const auto ranks = timelines(2, options, [&](ProcessGroup& world) {
    const Tensor x = Tensor::empty({1000});
    if (world.rank() == 0) {
      world.send(x, 1).wait();
    } else {
      compute_for(500);
      world.recv(x, 0).wait();
    }
  });
  EXPECT_NEAR(duration_s(find_event(ranks.at(1), "recv")), cost, 1e-12);
}

TEST(TimedGroup, ThreadsAndFibersCountTheSameTime) {
  for (const int size : {1, 2, 3, 4, 8}) {
    const auto threads =
        timelines(size, plain_world("threads", plain_cluster()), mixed_body);
    sim::WorldOptions options = plain_world("sim", plain_cluster());
    options.shares_links = false;  // like clocks that travel with data
    const auto fibers = timelines(size, options, mixed_body);
    EXPECT_EQ(text_of(threads), text_of(fibers)) << size << " ranks";
  }
}

TEST(TimedGroup, LoadAndSchedulingDoNotChangeATrace) {
  const auto options = plain_world("threads", plain_cluster());
  const std::string expected = text_of(timelines(4, options, mixed_body));
  // Load on the cores, and ranks delayed in wall time.
  std::atomic<bool> stops{false};
  std::vector<std::thread> load;
  for (int i = 0; i < 4; ++i) {
    load.emplace_back([&stops] {
      while (!stops) std::this_thread::yield();
    });
  }
  for (int run = 0; run < 20; ++run) {
    const auto ranks = timelines(4, options, [&](ProcessGroup& world) {
      if ((world.rank() + run) % 3 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(run % 4));
      }
      mixed_body(world);
    });
    EXPECT_EQ(text_of(ranks), expected) << "run " << run;
  }
  stops = true;
  for (std::thread& thread : load) thread.join();
}

TEST(TimedGroup, FoldedRanksTakeTheTimeOfAll) {
  const auto body = [](ProcessGroup& world) {
    const Tensor x = Tensor::empty({100000});
    compute_for(10);
    world.all_reduce(x).wait();
    DeviceMesh mesh(world, Topology({"node", "local"}, {2, 4}));
    mesh.group("local").all_gather(x, Tensor::empty({25000})).wait();
    mesh.group("node").all_reduce(x).wait();
    SB_CHECK(world.size() == 8 && mesh.group("local").size() == 4,
             "a folded group has its true size");
  };
  sim::WorldOptions options = plain_world("sim", plain_cluster());
  const auto all = timelines(8, options, body);
  options.fold_class = [](int) { return 0; };
  const auto folded = timelines(8, options, body);
  ASSERT_EQ(all.size(), 8u);
  ASSERT_EQ(folded.size(), 1u);
  EXPECT_EQ(text_of({{0, all.at(0)}}), text_of(folded));
}

// Ranks of a ring send to their neighbours, so the one that runs gets what it
// sends. The class names the last: it computes longest, and the others keep its
// pace.
TEST(TimedGroup, AFoldedRingTakesTheTimeOfItsLastRank) {
  const auto body = [](ProcessGroup& world) {
    const int r = world.rank(), n = world.size();
    const Tensor leaving = Tensor::empty({50000}), arriving = leaving;
    for (int hop = 0; hop < 3; ++hop) {
      Work sent = world.send(leaving, (r + 1) % n);
      Work got = world.recv(arriving, (r + n - 1) % n);
      compute_for(r == n - 1 ? 30 : 20);
      got.wait();
      sent.wait();
    }
    world.barrier();
    SB_CHECK(world.is_first() != world.collect("").empty(),
             "the first collects, or the rank that runs in its place");
  };
  sim::WorldOptions options = plain_world("sim", plain_cluster());
  const auto all =
      timelines(4, options, [&](ProcessGroup& world) { body(world); });
  options.fold_class = [](int) { return 3; };
  const auto folded = timelines(4, options, body);
  ASSERT_EQ(folded.size(), 1u);
  EXPECT_EQ(folded.begin()->first, 3);
  EXPECT_EQ(step_us(folded.at(3)), step_us(all.at(3)));
  expect_text(error_of([&] {
                timelines(4, options, [](ProcessGroup& world) {
                  world.recv(Tensor::empty({1}), 2).wait();
                });
              }),
              {"folded ranks wait for a message that none of them sends"});
}

TEST(TimedGroup, ARankWithAFaultIsNotFolded) {
  sim::Cluster cluster = plain_cluster();
  cluster.faults.push_back({/*rank=*/5, /*compute_slowdown=*/10, 1});
  sim::WorldOptions options = plain_world("sim", cluster);
  options.fold_class = [](int) { return 0; };
  const auto ranks = timelines(8, options, [](ProcessGroup& world) {
    compute_for(10);
    world.barrier();
  });
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_GT(step_us(ranks.at(0)), 100);  // it waits for the straggler
}

TEST(TimedGroup, FailuresOnShapesAreToldAsOnData) {
  const auto error = [](const std::function<void(ProcessGroup&)>& body) {
    return error_of(
        [&] { timelines(3, plain_world("sim", plain_cluster()), body); });
  };
  expect_text(error([](ProcessGroup& world) {
                world.all_reduce(Tensor::empty({world.rank() + 1})).wait();
              }),
              {"other ranks issued another call in its place"});
  expect_text(error([](ProcessGroup& world) {
                world.recv(Tensor::empty({1}), (world.rank() + 1) % 3).wait();
              }),
              {"deadlock"});
  expect_text(error([](ProcessGroup& world) {
                SB_CHECK(world.rank() != 1, "no more coffee");
                world.barrier();
              }),
              {"no more coffee"});
}

TEST(TimedGroup, TheLedgerCountsEachCallOnce) {
  sim::run_world(
      4,
      [](ProcessGroup& world) {
        const Tensor x = Tensor::zeros({8});
        world.all_reduce(x).wait();
        SB_CHECK(world.records().size() == 1, world.records().size(),
                 " records of one call");
        SB_CHECK(wire_bytes(world.records()) == 48, "bytes");
      },
      plain_world("threads", plain_cluster()));
}

TEST(TimedGroup, AClusterThatIsTooSmallIsNamed) {
  const std::string error = error_of([&] {
    sim::run_world(
        9, [](ProcessGroup&) {}, plain_world("sim", plain_cluster()));
  });
  EXPECT_EQ(error, "world size 9: cluster 'plain' has 8 devices");
}

}  // namespace
}  // namespace shardbook::test
