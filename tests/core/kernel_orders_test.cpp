// Weights of convolutions in oneDNN's order: copies that end when a weight is
// written, and gradients that become row-major when read.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/inplace.h"
#include "core/optim.h"
#include "core/tensor_storage.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

const Shape kImages = {2, 8, 8, 16};
const Shape kWeight = {32, 16, 3, 3};

Tensor convolve(const Tensor& x, const Tensor& weight) {
  return conv2d(x, weight, Tensor(), 1, 1);
}

/// Forward and backward of one split.
void use(const Tensor& weight, std::uint64_t seed = 1) {
  const Tensor x = leaf(kImages, seed, -1, 1, kOfF32);
  weighted_sum(convolve(x, weight)).backward();
}

/// Every test has a device of its own, whose workspace it watches.
class KernelOrders : public testing::Test {
 protected:
  std::int64_t workspace() const {
    return context_.device.memory().current(MemoryKind::kWorkspace);
  }

  RankContext context_{Device::cpu(7)};
  RankContext::Scope scope_{context_};
};

TEST_F(KernelOrders, CopiesAreKeptFromTheSecondUseUntilTheWeightIsWritten) {
  const Tensor w = leaf(kWeight, 2, -1, 1, kOfF32);
  use(w);
  EXPECT_EQ(workspace(), 0);
  use(w);
  const std::int64_t kept = workspace();
  EXPECT_EQ(kept, 2 * w.bytes());  // Of forward and of backward
  use(w);
  EXPECT_EQ(workspace(), kept);
  w.raw();
  EXPECT_EQ(workspace(), 0);
  // The next step is expected to use the weight as the last one did
  use(w);
  EXPECT_EQ(workspace(), kept);
  use(w);
  w.raw();
  w.raw();
  use(w);
  EXPECT_EQ(workspace(), kept);
  // The last step used the weight once
  w.raw();
  use(w);
  EXPECT_EQ(workspace(), 0);
}

TEST_F(KernelOrders, CopiesEndWithTheWeight) {
  {
    const Tensor w = leaf(kWeight, 2, -1, 1, kOfF32);
    use(w), use(w);
    EXPECT_GT(workspace(), 0);
    release_storage(w);
    EXPECT_EQ(workspace(), 0);
    restore_storage(w);
    w.copy_from(noise(kWeight, 3));
    use(w);
    EXPECT_GT(workspace(), 0);
  }
  EXPECT_EQ(workspace(), 0);
}

TEST_F(KernelOrders, ADeviceWithACapacityKeepsNone) {
  RankContext small(Device::cpu(0, 64 << 20));
  const RankContext::Scope scope(small);
  const Tensor w = leaf(kWeight, 2, -1, 1, kOfF32);
  use(w), use(w), use(w);
  EXPECT_EQ(small.device.memory().current(MemoryKind::kWorkspace), 0);
}

TEST_F(KernelOrders, EveryWriteIsSeen) {
  struct Writer {
    std::string name;
    std::function<void(const Tensor&)> write;
  };
  const Tensor other = noise(kWeight, 5, -1, 1, kOfF32);
  const std::vector<Writer> writers = {
      {"an address", [](const Tensor& w) { w.data<float>()[7] = 3; }},
      {"copy_from", [&](const Tensor& w) { w.copy_from(other); }},
      {"fill", [](const Tensor& w) { w.fill(0.25); }},
      {"add_into", [&](const Tensor& w) { add_into(w, other); }},
      {"scale_in_place", [](const Tensor& w) { scale_in_place(w, 0.5); }},
      {"a view", [](const Tensor& w) { w.rows_view(3, 4).fill(1); }},
      {"set_data", [&](Tensor w) { set_data(w, other); }},
      {"sgd", [](const Tensor& w) { make_optimizer("sgd", {w}, {})->step(); }},
      {"adamw",
       [](const Tensor& w) { make_optimizer("adamw", {w}, {})->step(); }}};
  const Tensor x = noise(kImages, 1, -1, 1, kOfF32);
  for (const Writer& writer : writers) {
    SCOPED_TRACE(writer.name);
    const Tensor w = leaf(kWeight, 2, -1, 1, kOfF32);
    use(w), use(w);
    ASSERT_GT(workspace(), 0);
    const Tensor before = convolve(x, w).detach();
    writer.write(w);
    const Tensor after = convolve(x, w).detach();
    const Tensor fresh = convolve(x, w.clone()).detach();
    EXPECT_TRUE(bitwise_equal(after, fresh));
    EXPECT_FALSE(bitwise_equal(after, before));
  }
}

TEST_F(KernelOrders, WeightsOfOneStorageHaveCopiesOfTheirOwn) {
  const Tensor both = noise({2, 32, 16, 3, 3}, 2, -1, 1, kOfF32);
  const Tensor x = noise(kImages, 1, -1, 1, kOfF32);
  for (int repeat = 0; repeat < 3; ++repeat) {
    for (const std::int64_t i : {0, 1}) {
      const Tensor w = both.flat_view(i * shape_numel(kWeight), kWeight);
      const Tensor fresh = noise({2, 32, 16, 3, 3}, 2, -1, 1, kOfF32)
                               .flat_view(i * shape_numel(kWeight), kWeight);
      EXPECT_TRUE(bitwise_equal(convolve(x, w), convolve(x, fresh)));
    }
  }
}

/// The gradient of one split alone, row-major.
Tensor gradient_of(const Tensor& weight, std::uint64_t seed) {
  const Tensor w = weight.clone().set_requires_grad();
  use(w, seed);
  w.grad().raw();
  return w.grad();
}

TEST_F(KernelOrders, GradientsAddUpWithTheBitsOfRowMajorOnes) {
  const Tensor w = leaf(kWeight, 2, -1, 1, kOfF32);
  const Tensor sum_of_three = gradient_of(w, 1);
  add_into(sum_of_three, gradient_of(w, 2));
  add_into(sum_of_three, gradient_of(w, 3));
  for (const bool is_read_between : {false, true}) {
    w.clear_grad();
    for (const std::uint64_t split : {1, 2, 3}) {
      use(w, split);
      if (is_read_between) w.grad().raw();
    }
    EXPECT_TRUE(bitwise_equal(w.grad(), sum_of_three)) << is_read_between;
  }
}

TEST_F(KernelOrders, AWeightUsedTwiceAddsItsGradients) {
  const Tensor w = leaf(kWeight, 2, -1, 1, kOfF32);
  const Tensor x = noise(kImages, 1, -1, 1, kOfF32);
  const Tensor y = noise(kImages, 2, -1, 1, kOfF32);
  add(sum(convolve(x, w)), sum(convolve(y, w))).backward();
  const Tensor twice = w.grad();
  w.clear_grad();
  sum(convolve(y, w)).backward();
  sum(convolve(x, w)).backward();
  EXPECT_TRUE(bitwise_equal(w.grad(), twice));
}

TEST_F(KernelOrders, AGradientIsAWeightLikeAnyOther) {
  const Tensor w = leaf(kWeight, 2, -1, 1, kOfF32);
  use(w);
  const Tensor x = noise(kImages, 1, -1, 1, kOfF32);
  const Tensor y = convolve(x, w.grad());
  EXPECT_TRUE(bitwise_equal(y, convolve(x, gradient_of(w, 1))));
}

// If channels do not fill oneDNN's blocks, copies are larger than the weight,
// and gradients are row-major from the start.
TEST_F(KernelOrders, OddNumbersOfChannels) {
  const Tensor w = leaf({9, 5, 3, 3}, 2, -1, 1, kOfF32);
  const Tensor x = leaf({2, 7, 10, 5}, 1, -1, 1, kOfF32);
  Tensor first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    w.clear_grad(), x.clear_grad();
    weighted_sum(conv2d(x, w, Tensor(), 2, 1)).backward();
    if (repeat == 0) first = w.grad();
    EXPECT_TRUE(bitwise_equal(w.grad(), first));
  }
}

}  // namespace
}  // namespace shardbook
