// DDP, FSDP and tensor parallelism of this chapter against the chapters with
// handwritten ones: the same numbers, the same ledger.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "chapters/02_ddp/ddp.h"
#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/11_dtensor/parallelize.h"
#include "chapters/11_dtensor/recipes.h"
#include "core/layers.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"
#include "tests/support/larger.h"

namespace shardbook::dtensor_test {
namespace {

// Linear 8-4, ReLU, 4-16, ReLU, 16-4: 184 parameters.
Sequential toy() {
  Sequential model;
  model.add(Linear("0", 8, 4, f64_init()));
  model.add(Relu());
  model.add(Linear("2", 4, 16, f64_init()));
  model.add(Relu());
  model.add(Linear("4", 16, 4, f64_init()));
  return model;
}

/// The model's mean squared output for this rank's own samples.
template <typename Model>
Tensor local_loss(Model& model, const ProcessGroup& world) {
  const auto stream = static_cast<std::uint64_t>(10 + world.rank());
  return mean(square(model(noise({6, 8}, stream))));
}

std::vector<double> gradients(Module& model) {
  std::vector<double> all;
  for (const Tensor& parameter : model.parameters()) {
    const auto part = parameter.grad().to_vector<double>();
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// The gradients' calls, without those for one loss or for checks.
std::string gradient_calls(const ProcessGroup& world, CommOp op) {
  std::string log;
  for (const CommRecord& record : world.records()) {
    if (record.op == op && record.dtype == DType::kF64 && record.numel > 1) {
      log += std::to_string(record.numel) + " ";
    }
  }
  return log;
}

void expect_same(const std::string& calls, const std::string& expected) {
  SB_CHECK(calls == expected, calls, " not ", expected);
}

// Both sum in rank order. DDP divides after the sum and this chapter before
// backward: the same bits where d is a power of two.
TEST(DTensorChapters, DdpHasTheNumbersAndTheLedgerOfItsChapter) {
  for (const int d : {2, 3, 4}) {
    on_ranks(d, [d](ProcessGroup& world) {
      Sequential by_hand = toy();
      ddp::DdpOptions options;  // a bucket per parameter
      options.bucket_cap_mb = options.first_bucket_mb = 1e-6;
      ddp::DistributedDataParallel ddp(by_hand, world, options);
      world.clear_records();
      local_loss(ddp, world).backward();
      const std::string expected = gradient_calls(world, CommOp::kAllReduce);
      const auto right = gradients(by_hand);

      Sequential model = toy();
      DeviceMesh devices(world, Topology({"dp"}, {d}));
      const Mesh dp(devices);
      replicate_parameters(model, dp);
      world.clear_records();
      global_mean(local_loss(model, world), dp).backward();
      expect_same(gradient_calls(world, CommOp::kAllReduce), expected);
      expect_same(expected, "4 64 16 64 4 32 ");
      const auto got = gradients(model);
      SB_CHECK(d == 3 ? largest_gap(got, right) < 1e-15 : got == right,
               "other gradients: ", largest_gap(got, right));
      return 0;
    });
  }
}

// One flat parameter: F = 184 on 3 ranks is 62 + 62 + 60, padded to 186.
TEST(DTensorChapters, FsdpHasTheNumbersAndTheLedgerOfItsChapter) {
  for (const int d : {2, 3, 4, 8}) {
    const auto calls = on_ranks(d, [d](ProcessGroup& world) {
      Sequential by_hand = toy();
      fsdp::FullyShardedDataParallel fsdp(by_hand, world);
      world.clear_records();
      local_loss(fsdp, world).backward();
      const std::string gathers = gradient_calls(world, CommOp::kAllGather);
      const std::string scatters =
          gradient_calls(world, CommOp::kReduceScatter);
      auto right = fsdp.parameters()[0].grad().to_vector<double>();

      Sequential model = toy();
      DeviceMesh devices(world, Topology({"dp"}, {d}));
      const Mesh dp(devices);
      FlatUnit unit(model, dp);
      world.clear_records();
      global_mean(local_loss(unit, world), dp).backward();
      expect_same(gradient_calls(world, CommOp::kAllGather), gathers);
      expect_same(gradient_calls(world, CommOp::kReduceScatter), scatters);
      // The chapter's shard ends with padding
      const auto got = unit.flat().local.grad().to_vector<double>();
      right.resize(got.size());
      SB_CHECK(largest_gap(right, got) < 1e-15, "other gradients");
      return gathers + scatters + std::to_string(got.size());
    });
    if (d == 3) {
      EXPECT_EQ(calls[0], "186 186 62");
      EXPECT_EQ(calls[2], "186 186 60");
    }
    if (d == 8) {
      EXPECT_EQ(calls[0], "184 184 23");
    }
  }
}

// Colwise and rowwise against the chapter's layers, bit for bit.
TEST(DTensorChapters, TensorParallelismHasTheNumbersAndTheLedgerOfItsChapter) {
  for (const int t : {2, 4}) {
    on_ranks(t, [t](ProcessGroup& world) {
      const std::int64_t h = 8, tokens = 6;
      const InitOptions init = f64_init();
      const Tensor x = noise({tokens, h}, 1), mine = x.clone();
      x.set_requires_grad();
      mine.set_requires_grad();

      tensor_parallel::ColumnParallelLinear column("fc", {h, 4 * h, {}, 0.02},
                                                   init, world);
      tensor_parallel::RowParallelLinear row("proj", {4 * h, h, {}, 0.02}, init,
                                             world);
      const Tensor right = row(gelu(column(x)));
      sum(square(right)).backward();
      const std::string expected = log_since(world, 0);

      // The same weights, whole, cut by the plan
      const LayerFactory one_device;
      Sequential model;
      BlockPart fc = {.in = h, .out = 4 * h, .bias = true, .stddev = 0.02};
      model.add(one_device.linear("fc", fc, init).as<Linear>());
      std::swap(fc.in, fc.out);
      model.add(one_device.linear("proj", fc, init).as<Linear>());
      DeviceMesh devices(world, Topology({"tp"}, {t}));
      parallelize_module(model, Mesh(devices), {{"", pairwise()}});
      world.clear_records();
      const Tensor y = model[1](gelu(model[0](mine)));
      sum(square(y)).backward();
      expect_same(log_since(world, 0), expected);
      SB_CHECK(bitwise_equal(y, right), "other values");
      SB_CHECK(bitwise_equal(mine.grad(), x.grad()), "other dX");
      const Tensors parameters = model.parameters();
      SB_CHECK(bitwise_equal(parameters[0].grad(), column.weight.grad()) &&
                   bitwise_equal(parameters[1].grad(), column.bias.grad()) &&
                   bitwise_equal(parameters[2].grad(), row.weight.grad()) &&
                   bitwise_equal(parameters[3].grad(), row.bias.grad()),
               "other gradients");
      return 0;
    });
  }
}

}  // namespace
}  // namespace shardbook::dtensor_test
