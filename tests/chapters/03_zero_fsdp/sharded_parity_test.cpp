// DDP, ZeRO and FSDP against one device, on convolutions whose batch norms
// share their statistics.

#include <gtest/gtest.h>

#include "chapters/02_ddp/sync_batch_norm.h"
#include "chapters/03_zero_fsdp/fsdp/state_dict.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::sharded_test {
namespace {

using ddp_test::every;
using ddp_test::init_of;
using ddp_test::largest_difference;
using ddp_test::Samples;
using ddp_test::Values;
using ddp_test::values_of;

/// Two convolutions with batch norm; 5 x 5 images of 2 channels.
class ConvNet : public ModuleOf<ConvNet> {
 public:
  explicit ConvNet(const InitOptions& init)
      : conv1("conv1", 2, 4, 3, 1, init),
        norm1(4, init),
        conv2("conv2", 4, 6, 3, 2, init),
        norm2(6, init),
        head("head", 6, 3, init) {
    norm1.relu = norm2.relu = true;
  }
  Tensor forward(const Tensor& x) override {
    return head(global_avg_pool2d(norm2(conv2(norm1(conv1(x))))));
  }
  void members(MemberVisitor& visit) override {
    visit.module("conv1", conv1);
    visit.module("norm1", norm1);
    visit.module("conv2", conv2);
    visit.module("norm2", norm2);
    visit.module("head", head);
  }
  Conv2d conv1;
  BatchNorm norm1;
  Conv2d conv2;
  BatchNorm norm2;
  Linear head;
};

constexpr int kSteps = 4;

/// Global batch `step`: 24 images.
Samples global_batch(int step) {
  const TensorOptions f64{DType::kF64, Device()};
  Samples all{Tensor::empty({24, 5, 5, 2}, f64), Tensor::empty({24, 3}, f64)};
  const auto seed = static_cast<std::uint64_t>(50 + step);
  fill_normal(all.x, seed, 1, 0, 1);
  fill_normal(all.y, seed, 2, 0, 1);
  return all;
}

/// Appends the running statistics to `rest`.
Values with_buffers(Module& model, const std::vector<NamedTensor>& rest) {
  Tensors all;
  for (const NamedTensor& each : rest) all.push_back(each.tensor);
  for (const Tensor& buffer : model.buffers()) all.push_back(buffer);
  return values_of(all);
}

/// Trains on the rank's images; `update` is called after each backward.
void train_steps(const std::function<Tensor(const Tensor& x)>& forward,
                 const std::function<void()>& update, int rank, int ranks) {
  for (int step = 0; step < kSteps; ++step) {
    const Samples mine = every(global_batch(step), rank, ranks);
    mse_loss(forward(mine.x), mine.y).backward();
    update();
  }
}

Values train_zero(int stage, ConvNet& model, ProcessGroup& world) {
  const auto zero = zero::make_zero(
      model, world,
      {.stage = stage, .reduce_bucket_size = 40, .persistence_threshold = 7},
      "adamw", {});
  train_steps([&](const Tensor& x) { return (*zero)(x); },
              [&] { zero->step(); }, world.rank(), world.size());
  return with_buffers(model, zero->full_parameters());
}

Values train_fsdp(const std::string& strategy, ConvNet& model,
                  ProcessGroup& world) {
  fsdp::FsdpOptions options{.per_parameter = strategy == "fsdp2"};
  if (strategy != "fsdp one") {
    options.auto_wrap_policy =
        fsdp::transformer_auto_wrap_policy({"Linear", "Conv2d", "BatchNorm"});
  }
  fsdp::FullyShardedDataParallel fsdp(model, world, options);
  const auto optimizer = make_optimizer("adamw", fsdp.parameters(), {});
  const auto update = [&] {
    optimizer->step();
    fsdp.clear_grad();
  };
  train_steps([&](const Tensor& x) { return fsdp(x); }, update, world.rank(),
              world.size());
  return with_buffers(model, full_state_dict(fsdp));
}

/// Trains with DDP, or on one device.
template <typename Forward>
Values train_whole(ConvNet& model, Forward& forward, int rank, int ranks) {
  const auto optimizer = make_optimizer("adamw", model.parameters(), {});
  const auto update = [&] {
    optimizer->step();
    model.clear_grad();
  };
  train_steps([&](const Tensor& x) { return forward(x); }, update, rank, ranks);
  return with_buffers(model, model.named_parameters());
}

Values train(const std::string& strategy, ProcessGroup& world) {
  ConvNet model(init_of(DType::kF64));
  ddp::convert_sync_batchnorm(model, world);
  if (strategy == "ddp") {
    ddp::DistributedDataParallel ddp(model, world);
    return train_whole(model, ddp, world.rank(), world.size());
  }
  return strategy[0] == 'z' ? train_zero(strategy.back() - '0', model, world)
                            : train_fsdp(strategy, model, world);
}

class ShardedParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ShardedParity,
                         testing::ValuesIn(world_sizes({1, 3, 4})));

// [RED] With synchronised statistics d ranks normalise as one device does.
TEST_P(ShardedParity, ConvolutionsWithSyncBatchNormEqualOneDevice) {
  RankContext context(Device::cpu(), 0, 1);
  const RankContext::Scope scope(context);
  ConvNet model(init_of(DType::kF64));
  const Values one = train_whole(model, model, 0, 1);
  for (const std::string strategy :
       {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp one", "fsdp2"}) {
    for (const Values& rank : on_ranks(GetParam(), [&](ProcessGroup& world) {
           return train(strategy, world);
         })) {
      EXPECT_LT(largest_difference(rank, one), 1e-10) << strategy;
    }
  }
}

}  // namespace
}  // namespace shardbook::sharded_test
