// Contexts, scopes, and the events that observers get.

#include "core/context.h"

#include <algorithm>
#include <thread>
#include <tuple>
#include <vector>

#include "core/optim.h"
#include "core/rope.h"
#include "core/tensor_storage.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

/// Records every event.
class Notebook : public SeenOps {
 public:
  void on_op_end(const OpEvent& event) override { ended.push_back(event); }
  void on_allocation(const AllocationEvent& event) override {
    allocations.push_back(event);
    net += event.bytes;
  }

  std::vector<OpEvent> ended;
  std::vector<AllocationEvent> allocations;
  std::int64_t net = 0;

  const OpEvent& only(const std::string& name) const {
    static const OpEvent kNone{"none",      -1, -1, Phase::kForward, Device(),
                               DType::kF32, {}, 0,  Device()};
    const OpEvent* found = &kNone;
    for (const OpEvent& event : begun) {
      if (event.name == name) found = &event;
    }
    return *found;
  }
};

TEST(Scope, InstallsAContextAndPutsTheOldOneBack) {
  RankContext& outer = RankContext::current();
  RankContext mine(Device::cpu(5), /*rank=*/5);
  {
    RankContext::Scope scope(mine);
    EXPECT_EQ(&RankContext::current(), &mine);
    EXPECT_EQ(Tensor::zeros({1}).device(), mine.device);
    RankContext inner(Device::cpu(6));
    RankContext::Scope nested(inner);
    EXPECT_EQ(Tensor::zeros({1}).device().name(), "cpu:6");
  }
  EXPECT_EQ(&RankContext::current(), &outer);
}

TEST(Scope, SetsTheCoresOfTheThread) {
  const int before = num_threads();
  RankContext mine(Device::cpu(), 0, /*num_threads=*/3);
  {
    RankContext::Scope scope(mine);
#ifdef SHARDBOOK_HAVE_OPENMP
    EXPECT_EQ(num_threads(), 3);
#endif
  }
  EXPECT_EQ(num_threads(), before);
}

TEST(Scope, AThreadWithoutOneGetsItsOwn) {
  RankContext* theirs = nullptr;
  bool had_one = true;
  std::string device;
  std::thread([&] {
    had_one = RankContext::installed() != nullptr;
    theirs = &RankContext::current();
    device = RankContext::current().device.name();
  }).join();
  EXPECT_FALSE(had_one);
  EXPECT_NE(theirs, &RankContext::current());
  EXPECT_EQ(device, "cpu:0");
}

TEST(ContextValues, ComeBackAlsoAfterAnError) {
  RankContext& context = RankContext::current();
  try {
    NoGrad no_grad;
    Deterministic deterministic;
    MemoryScope kind(MemoryKind::kInput);
    PhaseScope phase(Phase::kOptimizer);
    EXPECT_FALSE(context.grad_enabled);
    EXPECT_TRUE(context.deterministic);
    EXPECT_EQ(context.memory_kind, MemoryKind::kInput);
    EXPECT_EQ(context.phase, Phase::kOptimizer);
    SB_FAIL("on purpose");
  } catch (const Error&) {
  }
  EXPECT_TRUE(context.grad_enabled);
  EXPECT_FALSE(context.deterministic);
  EXPECT_EQ(context.memory_kind, MemoryKind::kActivation);
  EXPECT_EQ(context.phase, Phase::kForward);
}

TEST(Workers, AreKeptPerDeviceAndCopySettings) {
  RankContext rank(Device::cpu(0), /*rank=*/3);
  const Device other = Device::cpu(1);
  RankContext& worker = rank.worker(other);
  EXPECT_EQ(&worker, &rank.worker(other));
  EXPECT_NE(&worker, &rank.worker(Device::cpu(1)));
  EXPECT_EQ(worker.device, other);
  EXPECT_EQ(worker.rank, 3);

  const auto notebook = std::make_shared<Notebook>();
  rank.grad_enabled = false;
  rank.deterministic = true;
  rank.is_recomputing = true;
  rank.phase = Phase::kBackward;
  rank.random = {11, 12, 13, {14, 15}};
  rank.add_observer(notebook);
  EXPECT_FALSE(worker.observed());  // settings are copied at the call
  RankContext& again = rank.worker(other);
  EXPECT_FALSE(again.grad_enabled);
  EXPECT_TRUE(again.deterministic);
  EXPECT_TRUE(again.is_recomputing);
  EXPECT_EQ(again.phase, Phase::kBackward);
  EXPECT_EQ(again.random.seed, 11u);
  EXPECT_EQ(again.random.step, 12u);
  EXPECT_EQ(again.random.next_op, 13u);
  EXPECT_EQ(again.random.batch.first, 14);
  EXPECT_EQ(again.random.batch.stride, 15);
  EXPECT_TRUE(again.observed());
  rank.remove_observer(notebook);
  EXPECT_FALSE(rank.observed());
}

class Observed : public testing::Test {
 protected:
  Observed() : scope_(context) { context.add_observer(notebook_); }
  ~Observed() override { context.remove_observer(notebook_); }

  RankContext context;

 private:
  const std::shared_ptr<Notebook> notebook_ = std::make_shared<Notebook>();

 protected:
  Notebook& seen = *notebook_;

 private:
  RankContext::Scope scope_;
};

TEST_F(Observed, AProductCostsTwoFlopsPerTriple) {
  const Tensor a = Tensor::zeros({2, 3, 5});
  const Tensor b = Tensor::zeros({2, 5, 7});
  matmul(a, b);
  EXPECT_EQ(seen.only("matmul").flops, 2.0 * 2 * 3 * 5 * 7);
  EXPECT_EQ(seen.only("matmul").bytes, 4.0 * (2 * 15 + 2 * 35 + 2 * 21));
  EXPECT_EQ(seen.only("matmul").phase, Phase::kForward);
  EXPECT_EQ(seen.only("matmul").device, context.device);
}

TEST_F(Observed, TheBackwardOfALinearLayerCostsTwiceItsForward) {
  const Tensor x = leaf({4, 3}), w = leaf({3, 5}), b = leaf({5});
  const Tensor y = linear(x, w, b);
  EXPECT_EQ(seen.only("linear").flops, 2.0 * 4 * 3 * 5);
  EXPECT_EQ(seen.only("linear").bytes, 8.0 * (12 + 15 + 5 + 20));
  const Tensor dy = Tensor::full({4, 5}, 1, y.options());
  seen.begun.clear();
  autograd::backward({y}, {dy});
  EXPECT_EQ(seen.flops_of("matmul"), 2 * 2.0 * 4 * 3 * 5);
  EXPECT_EQ(seen.only("matmul").phase, Phase::kBackward);
}

TEST_F(Observed, OneGradientIsHalfOfTheBackward) {
  const Tensor x = noise({4, 3}), w = leaf({3, 5});
  const Tensor loss = sum(linear(x, w));
  seen.begun.clear();
  loss.backward();
  EXPECT_EQ(seen.flops_of("matmul"), 2.0 * 4 * 3 * 5);
}

TEST_F(Observed, ElementwiseOperationsReadAndWriteOnce) {
  const Tensor a = Tensor::zeros({4, 6}), row = Tensor::zeros({6});
  add(a, row);
  EXPECT_EQ(seen.only("add").flops, 24);
  EXPECT_EQ(seen.only("add").bytes, 4.0 * (24 + 6 + 24));
  relu(a);
  EXPECT_EQ(seen.only("relu").bytes, 4.0 * (24 + 24));
}

TEST_F(Observed, OperationsOfLlamaCostTheirFormulas) {
  const Tensor x = Tensor::zeros({2, 3, 16}).set_requires_grad();
  const Tensor weight = Tensor::zeros({16}).set_requires_grad();
  const double n = 2 * 3 * 16;
  const auto cost_of = [&](const Tensor& y) {
    const OpEvent forward = seen.begun.back();
    seen.begun.clear();
    autograd::backward({y}, {y.detach()});
    const OpEvent backward = seen.begun.at(0);
    return std::vector<double>{forward.flops, forward.bytes, backward.flops,
                               backward.bytes};
  };
  using Costs = std::vector<double>;
  EXPECT_EQ(cost_of(rms_norm(x, weight, 1e-6)),
            (Costs{5 * n, 4 * 2 * n, 11 * n, 4 * 3 * n}));
  EXPECT_EQ(cost_of(swiglu(x)),
            (Costs{5 * n / 2, 4 * 1.5 * n, 11 * n / 2, 4 * 2.5 * n}));
  // 12 of 16 columns turn
  const Tensor table = rope_table({0, 1, 2}, 4, 100, {});
  const double turned = n * 12 / 16, bytes = 4 * (2 * n + 12);
  EXPECT_EQ(cost_of(rope(x, table, 3, 4)),
            (Costs{3 * turned, bytes, 3 * turned, bytes}));
  // Two heads of queries and one of keys, 4 wide: 6 of 9 pairs are seen
  AttentionOptions options = attention_of(2);
  options.kv_heads = 1;
  const double pairs = 2 * 2 * 6, attention_bytes = 4 * (n + n / 2);
  EXPECT_EQ(cost_of(attention(x, options)),
            (Costs{2 * 2 * pairs * 4, attention_bytes, 5 * 2 * pairs * 4,
                   2 * attention_bytes}));
}

TEST_F(Observed, EveryBeginHasItsEnd) {
  const Tensor x = leaf({6, 4}, 1, 0.1, 1);
  sum(log(softmax(matmul(x, transpose(x, 0, 1))))).backward();
  ASSERT_EQ(seen.begun.size(), seen.ended.size());
  std::vector<std::string> begun, ended;
  for (const OpEvent& event : seen.begun) begun.push_back(event.name);
  for (const OpEvent& event : seen.ended) ended.push_back(event.name);
  std::sort(begun.begin(), begun.end());
  std::sort(ended.begin(), ended.end());
  EXPECT_EQ(begun, ended);
}

TEST_F(Observed, AnOperationThatThrowsEndsToo) {
  const Tensor table = Tensor::zeros({2, 3});
  const Tensor bad = Tensor::from_values<std::int64_t>({5}, {1});
  expect_error([&] { embedding(table, bad); }, {"5"});
  EXPECT_EQ(seen.begun.size(), seen.ended.size());
}

TEST_F(Observed, MetaCostsWhatCpuCosts) {
  auto step = [&](const Device& device) {
    seen.begun.clear();
    const TensorOptions f32{DType::kF32, device};
    const Tensor x = Tensor::zeros({2, 4, 12}, f32).set_requires_grad();
    const Tensor g = Tensor::full({4}, 1, f32), b = Tensor::zeros({4}, f32);
    Tensor y = attention(x, attention_of(2));
    y = layer_norm(gelu(y), g, b);
    // The operations of Llama: two heads of queries share one of keys
    const Tensor angles = rope_table({0, 3, 1, 2}, 2, 100, {}, f32);
    AttentionOptions shared = attention_of(2);
    shared.kv_heads = 1;
    y = attention(rope(concat({y, y}, 2), angles, 3, 2), shared);
    y = swiglu(concat({rms_norm(y, g, 1e-6), y}, 2));
    const Tensor targets = Tensor::zeros({8}, {DType::kI64, device});
    cross_entropy(reshape(y, {8, 4}), targets).backward();
    std::vector<std::tuple<std::string, double, double>> events;
    for (const OpEvent& event : seen.begun) {
      events.emplace_back(event.name, event.flops, event.bytes);
    }
    return events;
  };
  const auto on_cpu = step(context.device);
  EXPECT_GE(on_cpu.size(), 8u);
  EXPECT_EQ(on_cpu, step(Device::meta()));
}

TEST_F(Observed, AllocationsAddUpToWhatIsInUse) {
  {
    MemoryScope kind(MemoryKind::kParameter);
    Tensor x = Tensor::zeros({10});
    ASSERT_EQ(seen.allocations.size(), 1u);
    EXPECT_EQ(seen.allocations[0].bytes, 40);
    EXPECT_EQ(seen.allocations[0].kind, MemoryKind::kParameter);
    EXPECT_EQ(seen.allocations[0].device, context.device);
    set_memory_kind(x, MemoryKind::kGradient);
    EXPECT_EQ(seen.net, 40);
    const Tensor y = leaf({5, 5});
    sum(square(matmul(y, y))).backward();
    EXPECT_EQ(seen.net, context.device.memory().current_total);
  }
  EXPECT_EQ(seen.net, 0);
}

TEST_F(Observed, TheOptimizerHasAPhaseOfItsOwn) {
  const Tensor w = leaf({4});
  w.set_grad(Tensor::full({4}, 1, w.options()));
  auto optimizer = make_optimizer("adam", {w}, OptimizerOptions{});
  optimizer->step();
  EXPECT_EQ(seen.only("adam").phase, Phase::kOptimizer);
  EXPECT_EQ(context.phase, Phase::kForward);
}

TEST_F(Observed, ScratchOfKernelsIsWorkspace) {
  // 16-bit products widen pieces of their operands.
  {
    Deterministic deterministic;
    matmul(Tensor::zeros({64, 64}, kOfBF16), Tensor::zeros({64, 64}, kOfBF16));
  }
  std::int64_t workspace = 0, kept = 0;
  for (const AllocationEvent& event : seen.allocations) {
    if (event.kind != MemoryKind::kWorkspace) continue;
    workspace += std::max<std::int64_t>(event.bytes, 0);
    kept += event.bytes;
  }
  EXPECT_GT(workspace, 0);
  EXPECT_EQ(kept, 0);
}

}  // namespace
}  // namespace shardbook
