// The common part of all backends: arguments, groups of one, observers.

#include "comm/process_group.h"

#include <gtest/gtest.h>

#include "comm/launch.h"
#include "core/check.h"
#include "tests/comm/mismatch_cases.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook {
namespace {

using test::Call;
using test::zeros;

struct Bad {
  const char* name;
  Call call;
  const char* message;  ///< a part of it
};

class BadArguments : public ::testing::TestWithParam<Bad> {};

TEST_P(BadArguments, AreASentence) {
  expect_text(error_on_ranks(4, GetParam().call), {GetParam().message});
}

INSTANTIATE_TEST_SUITE_P(
    Calls, BadArguments,
    ::testing::Values(
        Bad{"Undefined", [](ProcessGroup& g) { g.all_reduce(Tensor()).wait(); },
            "the tensor is an undefined tensor"},
        Bad{"Root", [](ProcessGroup& g) { g.broadcast(zeros(3), 4).wait(); },
            "root 4 is not a rank of the group; give 0 to 3"},
        Bad{"NegativeRoot",
            [](ProcessGroup& g) { g.reduce(zeros(3), -1).wait(); },
            "root -1 is not a rank of the group"},
        Bad{"Pieces",
            [](ProcessGroup& g) {
              g.reduce_scatter(zeros(3), zeros(10)).wait();
            },
            "the input has 10 elements and the output 3; the input must have 4 "
            "times as many (12)"},
        Bad{"GatheredPieces",
            [](ProcessGroup& g) { g.all_gather(zeros(10), zeros(3)).wait(); },
            "the output has 10 elements and the input 3"},
        Bad{"DTypes",
            [](ProcessGroup& g) {
              g.all_gather(Tensor::zeros({8}, {DType::kF64, Device()}),
                           zeros(2))
                  .wait();
            },
            "the output is f64, the input is f32"},
        Bad{"Overlap",
            [](ProcessGroup& g) {
              const Tensor all = zeros(8);
              g.all_gather(all, all.flat_view(2 * ((g.rank() + 1) % 4), {2}))
                  .wait();
            },
            "the buffers overlap"},
        Bad{"NeverInPlace",
            [](ProcessGroup& g) {
              const Tensor x = zeros(8);
              g.all_to_all(x, x).wait();
            },
            "this operation is never in place"},
        Bad{"Divisible",
            [](ProcessGroup& g) { g.all_to_all(zeros(6), zeros(6)).wait(); },
            "6 elements do not divide over 4 ranks"},
        Bad{"Counts",
            [](ProcessGroup& g) {
              g.all_to_all_v(zeros(4), zeros(4), {1, 1, 1}, {1, 1, 1, 1})
                  .wait();
            },
            "3 send counts; give one per rank (4)"},
        Bad{"CountSum",
            [](ProcessGroup& g) {
              g.all_to_all_v(zeros(4), zeros(4), {1, 1, 1, 1}, {1, 1, 1, 2})
                  .wait();
            },
            "the receive counts add up to 5 and the buffer has 4 elements"},
        Bad{"NegativeCount",
            [](ProcessGroup& g) {
              g.all_to_all_v(zeros(4), zeros(4), {-1, 1, 1, 3}, {1, 1, 1, 1})
                  .wait();
            },
            "a send count is -1"},
        Bad{"ToItself",
            [](ProcessGroup& g) { g.send(zeros(4), g.rank()).wait(); },
            "a rank does not exchange messages with itself"},
        Bad{"Peer", [](ProcessGroup& g) { g.recv(zeros(4), 7).wait(); },
            "sender 7 is not a rank of the group"},
        Bad{"Devices",
            [](ProcessGroup& g) {
              g.all_gather(Tensor::empty({8}, {DType::kF32, Device::meta()}),
                           zeros(2))
                  .wait();
            },
            "both are on meta devices or neither is"},
        Bad{"Members",
            [](ProcessGroup& g) {
              g.subgroup({0, 4}, "x");
            },
            "names a rank outside of 0 to 3"},
        Bad{"Twice",
            [](ProcessGroup& g) {
              g.subgroup({1, 1}, "x");
            },
            "a rank is named twice in [1, 1]"},
        Bad{"Color", [](ProcessGroup& g) { g.split(-2, 0, "x"); },
            "color -2; give -1 for no group"}),
    [](const ::testing::TestParamInfo<Bad>& info) {
      return std::string(info.param.name);
    });

TEST(GroupOfOne, IsFreeAndCopiesWhereItMust) {
  run_ranks(1, [](ProcessGroup& world) {
    const Tensor x = Tensor::arange(6);
    const Tensor y = Tensor::zeros({2, 3});
    world.all_reduce(x).wait();
    world.broadcast(x, 0).wait();
    world.all_gather(y, x).wait();
    SB_CHECK(y.to_vector<double>()[5] == 5, "all_gather copies");
    y.zero();
    world.all_to_all(y, x).wait();
    SB_CHECK(y.to_vector<double>()[5] == 5, "all_to_all copies");
    world.barrier();
    SB_CHECK(world.exchange("me") == std::vector<std::string>{"me"},
             "exchange");
    SB_CHECK(world.split(0, 0, "self")->size() == 1, "split");
    SB_CHECK(world.records().empty(), "nothing is recorded");
  });
}

// Counts the events it observes.
struct Counter : CommObserver {
  void on_issue(const CommRecord& record) override {
    issued.push_back(record.label);
  }
  void on_complete(const CommRecord& record) override {
    completed.push_back(record.label);
  }
  std::vector<std::string> issued, completed;
};

TEST(CommObserver, SeesIssueAndCompletionAlsoOfSubgroups) {
  const auto counters = {std::make_shared<Counter>(),
                         std::make_shared<Counter>()};
  run_ranks(2, [&](ProcessGroup& world) {
    world.set_observer(counters.begin()[world.rank()]);
    const auto pair = world.split(0, world.rank(), "pair");
    const Tensor x = zeros(4), y = zeros(4);
    Work first = world.all_reduce(x, ReduceOp::kSum, "first");
    Work second = pair->all_reduce(y, ReduceOp::kSum, "second");
    second.wait();
    first.wait();
  });
  for (const auto& counter : counters) {
    EXPECT_EQ(counter->issued, (std::vector<std::string>{"first", "second"}));
    EXPECT_EQ(counter->completed,
              (std::vector<std::string>{"second", "first"}));
  }
}

TEST(CommRecords, CarryThePhase) {
  run_ranks(2, [](ProcessGroup& world) {
    const PhaseScope phase(Phase::kBackward);
    world.all_reduce(zeros(4)).wait();
    SB_CHECK(world.records()[0].phase == Phase::kBackward, "phase");
    world.clear_records();
    SB_CHECK(world.records().empty(), "cleared");
  });
}

TEST(CallText, NamesOperationTypeCountAndRoot) {
  CommCall call;
  call.op = CommOp::kReduce;
  call.numel = 7;
  call.root_or_peer = 2;
  call.reduce_op = ReduceOp::kMax;
  call.label = "norm";
  EXPECT_EQ(call_text(call), "reduce f32[7] (max, root 2) 'norm'");
}

}  // namespace
}  // namespace shardbook
