// Costs of operations; cost_model_test.cpp has messages.

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "sim/cost_model.h"

namespace shardbook::sim {
namespace {

OpEvent op_event(const char* name, double flops, double bytes, DType dtype,
                 const ProductShape& shape = {}) {
  return {name,  flops, bytes, Phase::kForward, Device(),
          dtype, shape, 0,     Device()};
}

OpEvent product(std::int64_t m, std::int64_t n, std::int64_t k,
                DType dtype = DType::kBF16) {
  const auto count = [](std::int64_t a, std::int64_t b) {
    return static_cast<double>(a) * static_cast<double>(b);
  };
  return op_event("matmul", 2 * count(m, n) * static_cast<double>(k),
                  static_cast<double>(dtype_bytes(dtype)) *
                      (count(m, k) + count(k, n) + count(m, n)),
                  dtype, {m, n, k, 1});
}

double flops_per_s(const CostModel& costs, const OpEvent& event) {
  return event.flops / costs.operation(event).seconds;
}

TEST(CostModel, LargestProductsReachTheMeasuredMaximum) {
  // The maximum over many shapes, in benchmarks of single products.
  struct Device {
    const char* preset;
    double measured;
  };
  for (const Device& device :
       {Device{"dgx-a100", 271.2e12}, Device{"dgx-h100", 794.5e12}}) {
    Cluster cluster = Cluster::read(device.preset);
    cluster.device.sustained = 1;
    const CostModel costs(cluster);
    double best = 0;
    for (const std::int64_t m : {1024, 2048, 4096, 8192}) {
      for (const std::int64_t n : {4096, 8192, 10240, 16384}) {
        for (const std::int64_t k : {2048, 4096, 5120, 8192}) {
          best = std::max(best, flops_per_s(costs, product(m, n, k)));
        }
      }
    }
    EXPECT_NEAR(best / device.measured, 1, 0.05) << device.preset;
  }
}

TEST(CostModel, ProductsAreAsFastAsTheirTilesFillTheDevice) {
  const CostModel costs(Cluster::read("dgx-a100"));
  const double large = flops_per_s(costs, product(8192, 8192, 8192));
  EXPECT_LT(flops_per_s(costs, product(512, 512, 512)), large / 3);
  // A long k is split, so even few tiles fill the device.
  EXPECT_GT(flops_per_s(costs, product(768, 768, 65536)), large / 2);
  // Padding 50257 to 50304 columns makes a vocabulary faster.
  EXPECT_LT(costs.operation(product(8192, 50304, 768)).seconds,
            costs.operation(product(8192, 50257, 768)).seconds);
  // One row reads the whole weight: memory is the limit.
  const Cost row = costs.operation(product(1, 8192, 8192));
  EXPECT_STREQ(row.setup, "memory");
  // Only narrow types use matrix units.
  EXPECT_GT(large,
            5 * flops_per_s(costs, product(8192, 8192, 8192, DType::kF32)));
}

TEST(CostModel, TypesWithoutUnitsRunOnWiderOnes) {
  const CostModel t4(Cluster::read("kaggle-t4x2"));
  EXPECT_DOUBLE_EQ(
      t4.operation(product(4096, 4096, 4096, DType::kBF16)).seconds,
      t4.operation(product(4096, 4096, 4096, DType::kF32)).seconds);
}

TEST(CostModel, ElementwiseOperationsTakeBytesOverBandwidth) {
  const CostModel costs(Cluster::read("dgx-a100"));
  OpEvent gelu = op_event("gelu", 1e9, 4e9, DType::kBF16);
  const Cost cost = costs.operation(gelu);
  const DeviceSpec& device = costs.cluster().device;
  EXPECT_NEAR(cost.seconds,
              4e9 / (device.memory_bytes_per_s * device.memory_efficiency),
              1e-5);
  gelu.bytes = 100;
  EXPECT_DOUBLE_EQ(costs.operation(gelu).seconds, device.kernel_s);
  // On the host each of the node's ranks gets an eighth.
  gelu.bytes = 1e9;
  const DeviceSpec& host = costs.cluster().host;
  EXPECT_NEAR(costs.operation(gelu, true).seconds,
              8e9 / (host.memory_bytes_per_s * host.memory_efficiency), 1e-3);
}

// Korthikanti et al. 2022, table 4: one layer of 22B parameters over 8 tensor
// parallel A100, forward 7.7 ms and backward 11.9 ms, timed alone.
TEST(CostModel, AMegatronLayerTakesItsPublishedTime) {
  Cluster cluster = Cluster::read("selene");
  cluster.device.sustained = 1;
  const CostModel costs(cluster);
  auto seconds = [&](const OpEvent& event) {
    return costs.operation(event).seconds;
  };
  constexpr std::int64_t kHidden = 6144, kRows = 4 * 2048, kRanks = 8;
  const double tensor = static_cast<double>(kRows * kHidden * 2);
  double forward_s = 0, backward_s = 0;
  for (const auto& [n, k] : {std::pair(3 * kHidden / kRanks, kHidden),
                             std::pair(kHidden, kHidden / kRanks),
                             std::pair(4 * kHidden / kRanks, kHidden),
                             std::pair(kHidden, 4 * kHidden / kRanks)}) {
    forward_s += seconds(product(kRows, n, k));
    backward_s += seconds(product(kRows, k, n)) + seconds(product(k, n, kRows));
  }
  // Each rank has 8 of the 64 heads, of 96 elements each.
  const double pair_flops = 2 * 2048.0 * 2048 * 96 * 8 * 4;
  const ProductShape scores = {2048, 2048, 96, 8 * 4};
  forward_s += seconds(op_event("attention", 2 * pair_flops / 2, tensor / 2,
                                DType::kBF16, scores));
  backward_s += seconds(
      op_event("attention", 5 * pair_flops / 2, tensor, DType::kBF16, scores));
  // On whole activations: norms, dropout, residuals. On a rank's part: GELU.
  auto passes = [&](double count) {
    return seconds(op_event("elementwise", 0, count * tensor, DType::kBF16));
  };
  forward_s += 2 * passes(2) + 2 * passes(2.5) + 2 * passes(3) + passes(1);
  backward_s += 2 * passes(3) + 2 * passes(2.5) + 2 * passes(3) + passes(1.5);
  const double messages_s =
      2 * costs.collective(CommOp::kAllReduce, tensor, {0, 1, 2, 3, 4, 5, 6, 7})
              .seconds;
  EXPECT_NEAR((forward_s + messages_s) / 7.7e-3, 1, 0.1);
  EXPECT_NEAR((backward_s + messages_s) / 11.9e-3, 1, 0.1);
}

TEST(CostModel, UnfusedAttentionPaysForItsScores) {
  Cluster cluster = Cluster::read("dgx-a100");
  const OpEvent attention =
      op_event("attention", 2 * 2048.0 * 2048 * 64 * 64, 4.0 * 2048 * 4096 * 2,
               DType::kBF16, {2048, 2048, 64, 64});
  const double fused = CostModel(cluster).operation(attention).seconds;
  cluster.software.fused_attention = false;
  const double unfused = CostModel(cluster).operation(attention).seconds;
  const double scores = 2048.0 * 2048 * 64 * 2;
  EXPECT_GT(unfused, 3 * fused);
  EXPECT_GT(unfused, 7 * scores / cluster.device.memory_bytes_per_s);
}

// 60 bytes per logit in total, instead of 8.
TEST(CostModel, UnfusedLossPaysForEachOperation) {
  Cluster cluster = Cluster::read("dgx-a100");
  const double logits = 1e9;
  OpEvent forward =
      op_event("cross_entropy", 5 * logits, 2 * logits, DType::kF16);
  OpEvent backward =
      op_event("cross_entropy", 3 * logits, 4 * logits, DType::kF16);
  backward.phase = Phase::kBackward;
  const auto seconds = [&] {
    const CostModel costs(cluster);
    return costs.operation(forward).seconds + costs.operation(backward).seconds;
  };
  const DeviceSpec& device = cluster.device;
  const double speed = device.memory_bytes_per_s * device.memory_efficiency;
  const double starts = 2 * device.half_memory_bytes;
  EXPECT_NEAR(seconds(), (6 * logits + starts) / speed, 1e-9);
  cluster.software.fused_loss = false;
  EXPECT_NEAR(seconds(), (60 * logits + starts) / speed, 1e-9);
}

// As many passes as PyTorch makes without torch.compile.
TEST(CostModel, ElementwiseOperationsMayBeManyPasses) {
  Cluster cluster = Cluster::read("dgx-h100");
  const auto ratio = [&](const char* name, Phase phase) {
    OpEvent event = op_event(name, 1e9, 1e12, DType::kBF16);
    event.phase = phase;
    cluster.software.fused_elementwise = true;
    const double fused = CostModel(cluster).operation(event).seconds;
    cluster.software.fused_elementwise = false;
    return CostModel(cluster).operation(event).seconds / fused;
  };
  EXPECT_NEAR(ratio("rms_norm", Phase::kForward), 34.0 / 4, 1e-3);
  EXPECT_NEAR(ratio("rms_norm", Phase::kBackward), 68.0 / 6, 1e-3);
  EXPECT_NEAR(ratio("rope", Phase::kForward), 5, 1e-3);
  EXPECT_NEAR(ratio("swiglu", Phase::kBackward), 1.6, 1e-3);
  EXPECT_EQ(ratio("layer_norm", Phase::kForward), 1);  // one kernel there
}

// --- The textbook's cluster --------------------------------------------------

TEST(Textbook, ProductsTakeTheirFlopsAndNothingElseTakesTime) {
  const CostModel costs(Cluster::read("textbook"));
  EXPECT_EQ(costs.cluster().device.launch_s, 0);
  for (const std::int64_t n : {1, 100, 4097}) {
    const OpEvent each = product(n, n, n, DType::kF32);
    EXPECT_DOUBLE_EQ(costs.operation(each).seconds, each.flops / 1e14);
  }
  const OpEvent gelu = op_event("gelu", 1e12, 1e12, DType::kF32);
  EXPECT_EQ(costs.operation(gelu).seconds, 0);
  EXPECT_EQ(costs.operation(gelu, /*on_host=*/true).seconds, 0);
}

}  // namespace
}  // namespace shardbook::sim
