// gelu_mlp against its three separate layers: values, gradients, observed
// events and memory. On CUDA (core_on_cuda) its products apply GELU and its
// derivative themselves, and only that may differ.

#include <array>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/inplace.h"
#include "core/weight_gradients.h"
#include "tests/core/support.h"
#include "tests/support/dtypes.h"

namespace shardbook {
namespace {

using Mlp = std::function<Tensor(const Tensors&)>;

/// x [rows, in], w1 [in, wide], b1, w2 [wide, out], b2.
struct MlpSizes {
  std::int64_t rows, in, wide, out;
};

/// Sizes where 16-bit products apply GELU, where none do (odd), and tiny ones.
const MlpSizes kMlpSizes[] = {
    {5, 6, 16, 4}, {1, 1, 8, 1}, {7, 3, 5, 9}, {33, 24, 96, 24}, {1, 1, 1, 1}};

bool is_on_cuda() { return RankContext::current().device.is_cuda(); }

Tensor in_layers(const Tensors& x) {
  return linear(gelu(linear(x[0], x[1], x[2])), x[3], x[4]);
}
Tensor in_one(const Tensors& x) {
  return gelu_mlp(x[0], x[1], x[2], x[3], x[4]);
}

/// An input and four parameters.
Tensors mlp_operands(const MlpSizes& s, DType dtype) {
  const auto draw = [&](const Shape& shape, std::uint64_t seed) {
    const MemoryScope kind(seed == 1 ? MemoryKind::kActivation
                                     : MemoryKind::kParameter);
    return leaf(shape, seed, -1, 1, {dtype, RankContext::current().device});
  };
  return {draw({s.rows, s.in}, 1), draw({s.in, s.wide}, 2), draw({s.wide}, 3),
          draw({s.wide, s.out}, 4), draw({s.out}, 5)};
}

double mlp_tolerance(DType dtype) {
  return by_dtype(dtype, 1e-12, 1e-4, 6e-2, 8e-3);
}

/// Equal bits on the CPU, where the kernels are the same.
void expect_same(const Tensor& found, const Tensor& expected) {
  if (!is_on_cuda()) {
    EXPECT_TRUE(bitwise_equal(found, expected));
  }
  expect_close(found, expected, mlp_tolerance(expected.dtype()));
}

void expect_same_gradients(const Tensors& found, const Tensors& expected) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "gradient " << i);
    ASSERT_EQ(found[i].grad().defined(), expected[i].grad().defined());
    if (!found[i].grad().defined()) continue;
    expect_same(found[i].grad(), expected[i].grad());
  }
}

class GeluMlp : public testing::TestWithParam<DType> {
 protected:
  DType dtype = GetParam();
};

TEST_P(GeluMlp, EqualsItsLayers) {
  for (const MlpSizes& sizes : kMlpSizes) {
    const Tensors one = mlp_operands(sizes, dtype),
                  three = mlp_operands(sizes, dtype);
    // Twice: gradients are added, and a graph may be kept
    for (int batch = 0; batch < 2; ++batch) {
      const Tensor y = in_one(one), expected = in_layers(three);
      expect_same(y, expected);
      autograd::backward({weighted_sum(y)}, {}, /*retain_graph=*/batch == 0);
      weighted_sum(expected).backward();
      SCOPED_TRACE(testing::Message() << sizes.wide << " after " << batch);
      expect_same_gradients(one, three);
    }
  }
}

TEST_P(GeluMlp, AGraphThatIsKeptGivesTheSameGradientsAgain) {
  const Tensors x = mlp_operands(kMlpSizes[0], dtype);
  const Tensor loss = weighted_sum(in_one(x));
  const auto next_gradients = [&] {
    for (const Tensor& each : x) each.clear_grad();
    autograd::backward({loss}, {}, /*retain_graph=*/true);
    return gradients_of(x);
  };
  const Tensors first = next_gradients();
  expect_same_bits(next_gradients(), first);
  for (const Tensor& each : x) each.clear_grad();
  // And near them with deferred weight gradients, which use other kernels
  WeightGradients store;
  const DeferWeightGradients defer(store);
  autograd::backward({loss});
  expect_close(x[0].grad(), first[0], mlp_tolerance(dtype));
}

// On CUDA cuBLASLt's epilogues have the tanh form: catches products that use it
// for the other form.
TEST_P(GeluMlp, ExactGeluIsThatOfTheLayers) {
  const Tensors one = mlp_operands(kMlpSizes[3], dtype),
                three = mlp_operands(kMlpSizes[3], dtype);
  const Tensor y =
      gelu_mlp(one[0], one[1], one[2], one[3], one[4], GeluForm::kErf);
  const Tensor h = gelu(linear(three[0], three[1], three[2]), GeluForm::kErf);
  const Tensor expected = linear(h, three[3], three[4]);
  EXPECT_TRUE(bitwise_equal(y, expected));
  weighted_sum(y).backward();
  weighted_sum(expected).backward();
  expect_same_gradients(one, three);
}

TEST_P(GeluMlp, NeedsNoBias) {
  const Tensors one = mlp_operands(kMlpSizes[0], dtype),
                three = mlp_operands(kMlpSizes[0], dtype);
  const Tensor y = gelu_mlp(one[0], one[1], Tensor(), one[3], Tensor());
  const Tensor expected = linear(gelu(linear(three[0], three[1])), three[3]);
  expect_same(y, expected);
  weighted_sum(y).backward();
  weighted_sum(expected).backward();
  expect_same_gradients(one, three);
}

TEST_P(GeluMlp, FrozenOperandsGetNoGradient) {
  for (std::size_t trained = 0; trained < 5; ++trained) {
    const Tensors one = mlp_operands(kMlpSizes[0], dtype),
                  three = mlp_operands(kMlpSizes[0], dtype);
    for (std::size_t i = 0; i < 5; ++i) {
      one[i].set_requires_grad(i == trained);
      three[i].set_requires_grad(i == trained);
    }
    weighted_sum(in_one(one)).backward();
    weighted_sum(in_layers(three)).backward();
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(one[i].grad().defined(), i == trained) << i;
    }
    expect_same_gradients(one, three);
  }
}

SB_OVER_FLOATING_DTYPES(GeluMlp);

TEST(GeluMlpDeferred, WeightGradientsThatWaitHaveTheSameBits) {
  const Deterministic deterministic;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensors now = mlp_operands(kMlpSizes[0], dtype),
                  later = mlp_operands(kMlpSizes[0], dtype);
    weighted_sum(in_one(now)).backward();
    WeightGradients store;
    {
      const DeferWeightGradients defer(store);
      weighted_sum(in_one(later)).backward();
    }
    EXPECT_FALSE(later[1].grad().defined());
    EXPECT_FALSE(later[3].grad().defined());
    store.flush();
    store.pop();
    expect_same_bits(gradients_of(now), gradients_of(later));
  }
}

/// Measurements of one training step of an MLP, in two micro-batches.
struct MlpStep : Observer {
  void on_op_begin(const OpEvent& event) override {
    names.push_back(std::string(event.name) + " " + phase_name(event.phase));
    events.emplace_back(names.back(), event.flops, event.bytes);
    flops += event.flops;
  }
  std::vector<std::string> names;
  std::vector<std::tuple<std::string, double, double>> events;
  double flops = 0;
  std::array<std::int64_t, kNumMemoryKinds> peak{};
  std::int64_t after_forward = 0, after_step = 0;
  std::vector<int> order;  ///< in which parameters got their gradients
};

enum class MlpMode { kPlain, kDeferred, kRecomputed };

MlpStep train_mlp(const Mlp& mlp, MlpMode mode, int num_micro_batches,
                  const MlpSizes& sizes = {9, 6, 24, 6}) {
  const auto watched = std::make_shared<MlpStep>();
  MlpStep& seen = *watched;
  Device device = is_on_cuda() ? Device::cuda() : Device::cpu();
  RankContext context(device);
  const RankContext::Scope scope(context);
  const Tensors x = mlp_operands(sizes, DType::kBF16);
  for (int i = 1; i < 5; ++i) {
    x[i].add_accumulate_hook([&seen, i](Tensor&) { seen.order.push_back(i); });
  }
  device.reset_peak_memory();
  const std::int64_t before = device.memory().current_total;
  context.add_observer(watched);
  WeightGradients store;
  for (int i = 0; i < num_micro_batches; ++i) {
    const auto forward = [&](const Tensors&) { return Tensors{mlp(x)}; };
    const Tensor y = mode == MlpMode::kRecomputed
                         ? autograd::recompute(forward, {x[0]})[0]
                         : mlp(x);
    seen.after_forward = device.memory().current_total - before;
    if (mode == MlpMode::kDeferred) {
      const DeferWeightGradients defer(store);
      autograd::backward({y}, {ones_like(y)});
      store.flush();
    } else {
      autograd::backward({y}, {ones_like(y)});
    }
  }
  while (!store.empty()) store.pop();
  context.remove_observer(watched);
  const MemoryStats memory = device.memory();
  seen.after_step = memory.current_total - before;
  seen.peak = memory.peak_by_kind;
  // Scratch of kernels, which differ
  seen.peak[static_cast<std::size_t>(MemoryKind::kWorkspace)] = 0;
  return seen;
}

// The peak is in the backward of the second layer or of the first.
TEST(GeluMlpCosts, AreThoseOfItsLayers) {
  for (const MlpMode mode :
       {MlpMode::kPlain, MlpMode::kDeferred, MlpMode::kRecomputed}) {
    for (const int batches : {1, 3}) {
      for (const MlpSizes& sizes :
           {MlpSizes{9, 6, 24, 6}, MlpSizes{9, 24, 8, 6}}) {
        SCOPED_TRACE(testing::Message()
                     << "mode " << static_cast<int>(mode) << ", " << batches
                     << ", " << sizes.wide << " wide");
        const MlpStep one = train_mlp(in_one, mode, batches, sizes);
        const MlpStep three = train_mlp(in_layers, mode, batches, sizes);
        EXPECT_EQ(one.flops, three.flops);
        EXPECT_EQ(one.after_forward, three.after_forward);
        EXPECT_EQ(one.after_step, three.after_step);
        EXPECT_EQ(one.peak, three.peak);
        EXPECT_EQ(one.order, three.order);
        if (!is_on_cuda()) {
          EXPECT_EQ(one.events, three.events);
        }
      }
    }
  }
}

std::map<std::string, int> count_names(const std::vector<std::string>& names) {
  std::map<std::string, int> counts;
  for (const std::string& name : names) ++counts[name];
  return counts;
}

TEST(GeluMlpCosts, GeluIsPartOfTheProductsOnCudaOnly) {
  const bool fused = is_on_cuda();
  auto seen = count_names(train_mlp(in_one, MlpMode::kPlain, 1).names);
  EXPECT_EQ(seen["linear_gelu forward"], fused ? 1 : 0);
  EXPECT_EQ(seen["gelu forward"], fused ? 0 : 1);
  EXPECT_EQ(seen["matmul_gelu backward"], fused ? 1 : 0);
  EXPECT_EQ(seen["gelu backward"], fused ? 0 : 1);
  EXPECT_EQ(seen["sum_rows backward"], fused ? 1 : 2);
  // Deferred weight gradients keep GELU's output, as the bill counts
  seen = count_names(train_mlp(in_one, MlpMode::kDeferred, 1).names);
  EXPECT_EQ(seen["matmul_gelu backward"], 0);
  EXPECT_EQ(seen["gelu backward"], 1);
  EXPECT_EQ(seen["sum_rows backward"], 2);
}

TEST(GeluMlpErrors, NameTheShapes) {
  const Tensor x = leaf({2, 3}), w = leaf({3, 8}), b = leaf({8});
  const Tensor w2 = leaf({8, 2});
  expect_error([&] { gelu_mlp(x, w2, b, w2, Tensor()); }, {"[2, 3]", "[8, 2]"});
  expect_error([&] { gelu_mlp(x, w, b, w, Tensor()); }, {"[2, 8]", "[3, 8]"});
  expect_error([&] { gelu_mlp(x, w, x, w2, Tensor()); }, {"bias", "[2, 3]"});
}

}  // namespace
}  // namespace shardbook
