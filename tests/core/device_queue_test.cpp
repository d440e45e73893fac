// Queues of devices: order, events, errors, and what goes wrong without events.

#include "core/device_queue.h"

#include <atomic>
#include <future>
#include <thread>

#include "core/autograd.h"
#include "core/ops.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

/// A queue that does nothing until `open`: it delays all work that waits for
/// its event as long as a test likes.
class Gate {
 public:
  Gate() : queue_(Device::cpu(9)) {
    queue_.enqueue(
        [wait = std::shared_future<void>(open_.get_future())] { wait.wait(); });
    closed_.record(queue_);
  }
  const QueueEvent& closed() const { return closed_; }
  void open() { open_.set_value(); }

 private:
  std::promise<void> open_;
  DeviceQueue queue_;
  QueueEvent closed_;
};

TEST(DeviceQueue, RunsInOrderOnItsDeviceWhileTheHostGoesOn) {
  Gate gate;
  const Device device = Device::cpu(3);
  DeviceQueue queue(device);
  gate.closed().wait(queue);
  std::vector<int> order;
  Device seen;
  for (int i = 0; i < 50; ++i) {
    queue.enqueue([&order, i] { order.push_back(i); });
  }
  queue.enqueue([&] { seen = Tensor::zeros({2}).device(); });
  EXPECT_FALSE(seen.defined());
  gate.open();
  queue.synchronize();
  ASSERT_EQ(order.size(), 50u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  EXPECT_EQ(seen, device);
}

TEST(DeviceQueue, WorkInFlightOwnsItsObserver) {
  struct Counter : Observer {
    explicit Counter(int& ops) : num_ops(ops) {}
    void on_op_begin(const OpEvent&) override { ++num_ops; }
    int& num_ops;
  };
  RankContext context(Device::cpu(0));
  const RankContext::Scope scope(context);
  DeviceQueue queue(Device::cpu(1));
  Gate gate;
  gate.closed().wait(queue);
  int ops = 0;
  auto counter = std::make_shared<Counter>(ops);
  const std::weak_ptr<Counter> left = counter;
  context.add_observer(counter);
  queue.enqueue([] { square(Tensor::zeros({2})); });
  context.remove_observer(counter);
  counter.reset();
  EXPECT_FALSE(left.expired());
  gate.open();
  queue.synchronize();
  EXPECT_GT(ops, 0);
  EXPECT_TRUE(left.expired());
}

TEST(DeviceQueue, WorkHasTheSettingsOfWhoGaveIt) {
  RankContext context(Device::cpu(0), /*rank=*/5);
  RankContext::Scope scope(context);
  DeviceQueue queue(Device::cpu(1), /*num_threads=*/1);
  struct Seen {
    int rank, threads;
    bool grad, deterministic;
    Phase phase;
    std::uint64_t seed;
  } seen{};
  Gate gate;
  gate.closed().wait(queue);
  {
    NoGrad no_grad;
    Deterministic deterministic;
    PhaseScope phase(Phase::kOptimizer);
    context.random.seed = 42;
    queue.enqueue([&] {
      const RankContext& now = RankContext::current();
      seen = {now.rank,          num_threads(), now.grad_enabled,
              now.deterministic, now.phase,     now.random.seed};
    });
  }
  // The settings have changed back before the work runs.
  context.random.seed = 0;
  gate.open();
  queue.synchronize();
  EXPECT_EQ(seen.rank, 5);
  EXPECT_EQ(seen.threads, 1);
  EXPECT_FALSE(seen.grad);
  EXPECT_TRUE(seen.deterministic);
  EXPECT_EQ(seen.phase, Phase::kOptimizer);
  EXPECT_EQ(seen.seed, 42u);
}

TEST(DeviceQueue, TwoQueuesRunAtTheSameTime) {
  // Each waits for the other, which works only in parallel.
  DeviceQueue a(Device::cpu(0)), b(Device::cpu(1));
  std::promise<void> from_a, from_b;
  a.enqueue([&] {
    from_a.set_value();
    from_b.get_future().wait();
  });
  b.enqueue([&] {
    from_b.set_value();
    from_a.get_future().wait();
  });
  synchronize({&a, &b});
}

TEST(DeviceQueue, AnEventOrdersTwoQueues) {
  Gate gate;
  DeviceQueue a(Device::cpu(0)), b(Device::cpu(1));
  int value = 0, seen = -1;
  QueueEvent written;
  gate.closed().wait(a);
  a.enqueue([&] { value = 7; });
  written.record(a);
  written.wait(b);
  b.enqueue([&] { seen = value; });
  gate.open();
  b.synchronize();
  EXPECT_EQ(seen, 7);
}

TEST(DeviceQueue, AnEventStandsForWhatWasGivenBeforeItsRecord) {
  Gate gate;
  DeviceQueue queue(Device::cpu(0));
  bool first = false;
  QueueEvent event, never;
  never.synchronize();
  queue.enqueue([&] { first = true; });
  event.record(queue);
  gate.closed().wait(queue);  // what follows is held back
  bool second = false;
  queue.enqueue([&] { second = true; });
  event.synchronize();
  EXPECT_TRUE(first);
  EXPECT_FALSE(second);
  gate.open();
  queue.synchronize();
  EXPECT_TRUE(second);
}

TEST(Event, QueryTellsWhetherItHasPassedWithoutWaiting) {
  Gate gate;
  DeviceQueue queue(Device::cpu(0));
  QueueEvent before, behind;
  EXPECT_TRUE(behind.query()) << "never recorded";
  before.record(queue);
  gate.closed().wait(queue);
  behind.record(queue);
  const Event copy = behind;
  before.synchronize();
  EXPECT_TRUE(before.query());
  EXPECT_FALSE(behind.query());
  EXPECT_FALSE(copy.query());
  EXPECT_THROW(behind.elapsed_s(before), Error);
  gate.open();
  behind.synchronize();
  EXPECT_TRUE(behind.query());
  EXPECT_TRUE(copy.query());
  // On the CPU, an operation is finished when it returns.
  Event here;
  here.record();
  EXPECT_TRUE(here.query());
}

TEST(Event, TimeElapsesBetweenTwo) {
  Event first, second, never;
  first.record();
  second.record();
  EXPECT_GE(second.elapsed_s(first), 0);
  EXPECT_EQ(first.elapsed_s(second), -second.elapsed_s(first));
  EXPECT_EQ(first.elapsed_s(first), 0);
  EXPECT_THROW(first.elapsed_s(never), Error);
  EXPECT_THROW(never.elapsed_s(first), Error);
}

// --- Errors ------------------------------------------------------------------

TEST(DeviceQueue, AnErrorIsThrownWhereTheHostSynchronises) {
  DeviceQueue queue(Device::cpu(0));
  bool ran = false;
  queue.enqueue([] { SB_FAIL("the first error"); });
  queue.enqueue([&] { ran = true; });
  queue.enqueue([] { SB_FAIL("another error"); });
  EXPECT_THROW(
      {
        try {
          queue.synchronize();
        } catch (const Error& error) {
          EXPECT_STREQ(error.what(), "the first error");
          throw;
        }
      },
      Error);
  EXPECT_FALSE(ran) << "work behind an error is dropped";
  // The error was reported, and the queue works again.
  queue.enqueue([&] { ran = true; });
  queue.synchronize();
  EXPECT_TRUE(ran);
}

TEST(DeviceQueue, AnErrorReachesWhoWaitsAndNobodyElse) {
  DeviceQueue failing(Device::cpu(0)), waiting(Device::cpu(1));
  DeviceQueue other(Device::cpu(2));
  bool waiting_ran = false, other_ran = false;
  QueueEvent event;
  failing.enqueue([] { SB_FAIL("broken"); });
  event.record(failing);
  event.wait(waiting);
  waiting.enqueue([&] { waiting_ran = true; });
  other.enqueue([&] { other_ran = true; });
  EXPECT_THROW(event.synchronize(), Error);
  EXPECT_THROW(synchronize({&waiting, &failing, &other}), Error);
  EXPECT_FALSE(waiting_ran);
  EXPECT_TRUE(other_ran);
  synchronize({&failing, &waiting, &other});
}

TEST(DeviceQueue, WhatWorkHoldsIsReleasedBeforeTheEventPasses) {
  const Device device = Device::cpu(0);
  DeviceQueue queue(device);
  Tensor x = Tensor::zeros({100}, {DType::kF32, device});
  queue.enqueue([held = x] { held.fill(1); });
  x = Tensor();
  QueueEvent event;
  event.record(queue);
  event.synchronize();
  EXPECT_EQ(device.memory().current_total, 0);
}

TEST(DeviceQueue, DestructionDoesWhatWasGiven) {
  int done = 0;
  {
    DeviceQueue queue(Device::cpu(0));
    for (int i = 0; i < 10; ++i) queue.enqueue([&] { ++done; });
  }
  EXPECT_EQ(done, 10);
}

TEST(DeviceQueue, OnMetaWorkRunsAtOnceOnTheCallingThread) {
  DeviceQueue queue(Device::meta(0));
  const auto me = std::this_thread::get_id();
  bool here = false;
  queue.enqueue([&] {
    here = std::this_thread::get_id() == me && Tensor::zeros({2}).is_meta();
  });
  EXPECT_TRUE(here);
  queue.enqueue([] { SB_FAIL("broken"); });
  QueueEvent event;
  event.record(queue);
  event.wait(queue);
  EXPECT_THROW(queue.synchronize(), Error);
  queue.synchronize();
}

TEST(DeviceQueue, AGraphThatWasRecordedByQueuesRunsBackward) {
  const Device gpu0 = Device::cpu(0), gpu1 = Device::cpu(1);
  RankContext context(gpu0);
  RankContext::Scope scope(context);
  const Tensor w = leaf({3, 3}),
               v = Tensor::full({3, 2}, 0.5, {w.dtype(), gpu1});
  v.set_requires_grad();
  DeviceQueue a(gpu0), b(gpu1);
  Tensor hidden, out;
  QueueEvent done;
  a.enqueue([&] { hidden = relu(w); });
  done.record(a);
  done.wait(b);
  b.enqueue([&] { out = sum(matmul(to_device(hidden, gpu1), v)); });
  synchronize({&a, &b});
  out.backward();
  EXPECT_EQ(w.grad().device(), gpu0);
  EXPECT_EQ(v.grad().device(), gpu1);
}

// --- The hazard of a second queue on a device --------------------------------

/// A second queue of a device copies x, which is 1, to y on another device.
/// Without an event, the work of `compute` runs before the copy.
struct LateCopy {
  const Device gpu0 = Device::cpu(0), gpu1 = Device::cpu(1);
  const Tensor x = Tensor::full({4}, 1, {DType::kF64, gpu0});
  const Tensor y = Tensor::zeros({4}, {DType::kF64, gpu1});

  void beside(DeviceQueue& compute, bool with_event,
              const std::function<void()>& work) const {
    Gate gate;
    DeviceQueue copies(gpu0, 1, kCopyStream);
    // The copies are late: without an event their order is not certain.
    gate.closed().wait(copies);
    copies.enqueue([this] { y.copy_from(x); });
    if (with_event) {
      QueueEvent copied;
      copied.record(copies);
      copied.wait(compute);
    }
    compute.enqueue(work);
    if (!with_event) compute.synchronize();
    gate.open();
    synchronize({&copies, &compute});
  }
};

TEST(DeviceQueueHazard, WritingTheSourceBeforeItIsCopied) {
  for (const bool with_event : {false, true}) {
    const LateCopy late;
    DeviceQueue compute(late.gpu0);
    late.beside(compute, with_event, [&] { late.x.fill(2); });
    EXPECT_EQ(values(late.y)[0], with_event ? 1 : 2) << "2 is wrong";
  }
}

TEST(DeviceQueueHazard, ReadingTheDestinationBeforeItHasArrived) {
  for (const bool with_event : {false, true}) {
    const LateCopy late;
    DeviceQueue compute(late.gpu1);
    double seen = -1;
    late.beside(compute, with_event, [&] { seen = values(late.y)[0]; });
    EXPECT_EQ(seen, with_event ? 1 : 0) << "0 is wrong";
  }
}

}  // namespace
}  // namespace shardbook
