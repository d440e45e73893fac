// Messages, calls in flight, groups and the ledger, on every backend of this
// program.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "comm/process_group.h"
#include "tests/comm/conformance_support.h"

namespace shardbook::conformance {
namespace {

std::string check_messages(ProcessGroup& group) {
  if (group.size() == 1) return std::string();
  const int right = (group.rank() + 1) % group.size();
  const int left = (group.rank() + group.size() - 1) % group.size();
  return for_each_size([&](Findings& findings, DType dtype, std::int64_t n) {
    // Two messages of one tag keep their order; another tag may overtake.
    const Tensor first = mine(group, dtype, n);
    const Tensor second = make(dtype, n, constant(3));
    const Tensor tagged = make(dtype, n, constant(5));
    const Tensor a = first.zeros_like();
    const Tensor b = first.zeros_like();
    const Tensor c = first.zeros_like();
    std::vector<Work> works = {
        group.send(first, right),     group.send(second, right),
        group.send(tagged, right, 9), group.recv(c, left, 9),
        group.recv(a, left),          group.recv(b, left)};
    for (Work& work : works) work.wait();
    findings.add(compare(a, values_of(left), "first message"));
    findings.add(compare(b, constant(3), "second message"));
    findings.add(compare(c, constant(5), "message of tag 9"));
  });
}

// A small message is buffered: both ranks may send before they receive.
std::string check_small_messages(ProcessGroup& group) {
  if (group.size() == 1) return std::string();
  Findings findings;
  const int right = (group.rank() + 1) % group.size();
  const int left = (group.rank() + group.size() - 1) % group.size();
  Tensor x = mine(group, DType::kF32, 100);
  const Tensor y = x.zeros_like();
  group.send(x, right).wait();
  x.fill(77);
  group.recv(y, left).wait();
  findings.add(compare(y, values_of(left), "small message"));
  return findings.text();
}

// Many calls in flight, waited for in an order other than that of issue.
std::string check_asynchronous_calls(ProcessGroup& group) {
  Findings findings;
  for (int round = 0; round < 2; ++round) {
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (std::int64_t n : {100000, 5, 0, 30000, 1, 150001}) {
      tensors.push_back(mine(group, DType::kF32, n));
      works.push_back(group.all_reduce(tensors.back()));
    }
    // One more on the first buffer: it runs after the first, on its sums.
    works.push_back(group.broadcast(tensors[0], group.size() - 1));
    works.push_back(group.all_reduce(tensors[0], ReduceOp::kMax));
    for (std::size_t i = works.size(); i-- > 0;) works[i].wait();
    for (const Tensor& tensor : tensors) {
      findings.add(
          compare(tensor, reduced_by(group), "asynchronous all_reduce"));
    }
  }
  return findings.text();
}

std::string check_polling(ProcessGroup& group) {
  Findings findings;
  Tensor x = mine(group, DType::kF32, 150000);
  Work work = group.all_reduce(x);
  // It advances even when no rank waits for it.
  while (!work.done()) {
  }
  findings.add(compare(x, reduced_by(group), "polled all_reduce"));
  work.wait();
  work.wait();  // waiting twice is harmless
  return findings.text();
}

std::string check_exchange(ProcessGroup& group) {
  Findings findings;
  for (int round = 0; round < 3; ++round) {
    const std::string text(static_cast<std::size_t>(group.rank() * 100 + round),
                           'x');
    const std::vector<std::string> all = group.exchange(text);
    findings.require(static_cast<int>(all.size()) == group.size(),
                     "exchange returns one text per rank");
    for (std::size_t r = 0; r < all.size(); ++r) {
      findings.require(
          all[r].size() == r * 100 + static_cast<std::size_t>(round),
          "exchange: a text has the wrong length");
    }
  }
  findings.require(group.records().empty(), "exchange is not in the ledger");
  return findings.text();
}

// Even and odd ranks, in reverse; then every rank except rank 0.
std::string check_subgroups(ProcessGroup& group) {
  Findings findings;
  const int parity = group.rank() % 2;
  const auto half = group.split(parity, -group.rank(), "half");
  findings.require(half != nullptr, "split gives a group");
  findings.require(half->name() == "half", "split names its group");
  const int last = (group.size() - 1 - parity) / 2 * 2 + parity;
  findings.require(half->rank() == (last - group.rank()) / 2,
                   "split orders by key");
  findings.require(half->world_rank(half->rank()) == group.rank(),
                   "a subgroup knows its world ranks");
  Tensor x = Tensor::full({1000}, group.rank());
  half->all_reduce(x).wait();
  double expected = 0;
  for (int r = parity; r < group.size(); r += 2) expected += r;
  findings.add(compare(x, constant(expected), "all_reduce of a half"));

  const auto none =
      group.split(group.rank() == 0 ? -1 : 0, group.rank(), "rest");
  findings.require((none == nullptr) == (group.rank() == 0),
                   "color -1 is no group");

  std::vector<int> members;
  for (int r = group.size() - 1; r > 0; --r) members.push_back(r);
  if (members.empty()) return findings.text();
  const auto rest = group.subgroup(members, "reversed");
  findings.require((rest == nullptr) == (group.rank() == 0),
                   "a rank outside gets no group");
  if (rest != nullptr) {
    findings.require(rest->rank() == group.size() - 1 - group.rank(),
                     "a subgroup keeps the order of its members");
    const Tensor all = Tensor::zeros({rest->size()});
    rest->all_gather(all, Tensor::full({1}, group.rank())).wait();
    findings.add(compare(
        all,
        [&](std::int64_t i) {
          return static_cast<double>(members[static_cast<std::size_t>(i)]);
        },
        "all_gather of a subgroup"));
    // The last member, by its rank in the group, sends to the first.
    if (rest->size() > 1 && rest->rank() == rest->size() - 1) {
      rest->send(Tensor::full({3}, 42), 0).wait();
    } else if (rest->size() > 1 && rest->rank() == 0) {
      const Tensor y = Tensor::zeros({3});
      rest->recv(y, rest->size() - 1).wait();
      findings.add(compare(y, constant(42), "message in a subgroup"));
    }
  }
  return findings.text();
}

// Groups of the same members are independent: calls interleave freely.
std::string check_several_groups(ProcessGroup& group) {
  Findings findings;
  std::vector<int> everybody(group.ranks().size());
  std::iota(everybody.begin(), everybody.end(), 0);
  const auto other = group.subgroup(everybody, "other");
  const Tensor x = mine(group, DType::kF32, 150000);
  const Tensor y = mine(group, DType::kF32, 3);
  const Tensor z = mine(group, DType::kF32, 150000);
  // Even ranks issue on `group` first, odd ones on `other`.
  Work a;
  Work b;
  if (group.rank() % 2 == 0) {
    a = group.all_reduce(x);
    b = other->all_reduce(y);
  } else {
    b = other->all_reduce(y);
    a = group.all_reduce(x);
  }
  Work c = other->all_reduce(z);
  c.wait();
  a.wait();
  b.wait();
  for (const Tensor& tensor : {x, y, z}) {
    findings.add(
        compare(tensor, reduced_by(group), "all_reduce on two groups"));
  }
  return findings.text();
}

std::string check_ledger(ProcessGroup& group) {
  Findings findings;
  const int p = group.size();
  const Tensor one = Tensor::zeros({4});
  const Tensor all = Tensor::zeros({4 * p});
  const Tensor other = Tensor::zeros({4 * p});
  group.all_reduce(all, ReduceOp::kSum, "sum").wait();
  group.reduce_scatter(one, all).wait();
  group.all_gather(all, one).wait();
  group.broadcast(one, 0).wait();
  group.reduce(one, p - 1).wait();
  group.scatter(one, all, 0).wait();
  group.gather(all, one, 0).wait();
  group.all_to_all(other, all).wait();
  group.barrier();
  const std::vector<CommRecord>& records = group.records();
  if (p == 1) {
    findings.require(records.empty(), "a group of one records nothing");
    return findings.text();
  }
  struct Expected {
    CommOp op;
    std::int64_t numel;
    int root;
    double wire;
  };
  const double rest = 4 * (p - 1);
  const double at_root = group.rank() == 0 ? rest : 0;
  const std::vector<Expected> expected = {
      {CommOp::kAllReduce, 4 * p, -1, 2 * rest},
      {CommOp::kReduceScatter, 4 * p, -1, rest},
      {CommOp::kAllGather, 4 * p, -1, rest},
      {CommOp::kBroadcast, 4, 0, rest / p},
      {CommOp::kReduce, 4, p - 1, rest / p},
      {CommOp::kScatter, 4 * p, 0, at_root},
      {CommOp::kGather, 4 * p, 0, at_root},
      {CommOp::kAllToAll, 4 * p, -1, rest},
      {CommOp::kBarrier, 0, -1, 0}};
  findings.require(records.size() == expected.size(),
                   "the ledger has one record per call");
  for (std::size_t i = 0; i < std::min(records.size(), expected.size()); ++i) {
    const CommRecord& record = records[i];
    findings.require(record.op == expected[i].op &&
                         record.numel == expected[i].numel &&
                         record.root_or_peer == expected[i].root &&
                         record.group == "world" && record.group_size == p &&
                         record.group_rank == group.rank() &&
                         wire_elements(record) == expected[i].wire,
                     "wrong record: " + record_text(record));
  }
  if (!records.empty()) {
    findings.require(records[0].label == "sum", "a record carries its label");
  }
  // Subgroups write into their parent group's ledger.
  group.clear_records();
  const auto twin = group.split(0, group.rank(), "twin");
  twin->all_reduce(one).wait();
  findings.require(records.size() == 1 && records[0].group == "twin",
                   "a subgroup's call is in the parent's ledger");
  return findings.text();
}

std::string check_meta(ProcessGroup& group) {
  Findings findings;
  const TensorOptions meta{DType::kBF16, Device::meta(group.rank())};
  const Tensor x = Tensor::empty({8 * group.size()}, meta);
  const Tensor piece = Tensor::empty({8}, meta);
  group.all_reduce(x).wait();
  group.reduce_scatter(piece, x).wait();
  group.send(piece, (group.rank() + 1) % group.size()).wait();
  findings.require(group.records().size() == 3, "meta calls are recorded");
  findings.require(
      wire_bytes(group.records()) == 2.0 * (3 * 8 * (group.size() - 1) + 8),
      "meta calls have bytes");
  return findings.text();
}

// Counts in variables that outlive it.
struct Counter : CommObserver {
  Counter(int& issued, int& completed)
      : num_issued(issued), num_completed(completed) {}
  void on_issue(const CommRecord&) override { ++num_issued; }
  void on_complete(const CommRecord&) override { ++num_completed; }
  int &num_issued, &num_completed;
};

// A group made before the observer came, one made after, and a call that is in
// flight when the observer goes.
std::string check_observer(ProcessGroup& group) {
  Findings findings;
  int issued = 0, completed = 0;
  const auto early = group.split(0, group.rank(), "early");
  auto counter = std::make_shared<Counter>(issued, completed);
  const std::weak_ptr<Counter> left = counter;
  group.set_observer(counter);
  const auto late = early->split(0, group.rank(), "late");
  const Tensor x = mine(group, DType::kF32, 7), y = x.zeros_like();
  early->all_reduce(x).wait();
  Work in_flight = late->all_reduce(y);
  const int calls = group.size() > 1 ? 2 : 0;
  findings.require(issued == calls, "both groups are observed");

  group.set_observer(nullptr);
  counter.reset();
  early->all_reduce(x).wait();
  late->split(0, group.rank(), "new")->all_reduce(x).wait();
  findings.require(issued == calls, "a removed observer sees no call");
  in_flight.wait();
  in_flight = Work();
  findings.require(completed == calls, "a call in flight owns its observer");
  findings.require(left.expired(), "nothing keeps the observer");
  return findings.text();
}

TEST_P(Conformance, MessagesKeepTheirOrderPerTag) { expect(check_messages); }
TEST_P(Conformance, SmallMessagesLeaveTheirBufferAtOnce) {
  if (!GetParam().world.buffers_small_messages)
    GTEST_SKIP() << "each send waits for its receiver";
  expect(check_small_messages);
}
TEST_P(Conformance, CallsOfAGroupRunInOrder) {
  expect(check_asynchronous_calls);
}
TEST_P(Conformance, CallsAdvanceWithoutBeingWaitedFor) {
  expect(check_polling);
}
TEST_P(Conformance, ExchangeCollectsTexts) { expect(check_exchange); }
TEST_P(Conformance, SubgroupsHaveTheirOwnRanks) { expect(check_subgroups); }
TEST_P(Conformance, GroupsAreIndependent) { expect(check_several_groups); }
TEST_P(Conformance, TheLedgerHasEveryCall) { expect(check_ledger); }
TEST_P(Conformance, ARemovedObserverIsForgottenByAllGroups) {
  expect(check_observer);
}
TEST_P(Conformance, MetaTensorsAreRecordedAndNotMoved) {
  if (GetParam().world_size == 1)
    GTEST_SKIP() << "a group of one sends nothing";
  expect(check_meta);
}

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const World& world : test::conformance_worlds()) {
    for (const int world_size : world.sizes) {
      result.push_back({world, world_size});
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Conformance, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return info.param.world.name +
                                  std::to_string(info.param.world_size);
                         });

}  // namespace
}  // namespace shardbook::conformance
