// ZeRO in virtual time on a described machine: the effect of overlap and
// prefetching.

#include <gtest/gtest.h>

#include <mutex>

#include "chapters/common/models/models.h"
#include "sim/cluster.h"
#include "sim/world.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

struct Times {
  double step_s = 0;
  double bytes = 0;
  std::int64_t shard = 0;
};

/// The last of three steps of GPT-2 in bf16 on the eight devices of a
/// DGX A100; tensors are shapes.
Times time_of(const ZeroOptions& options, bool recompute = false) {
  sim::WorldOptions world_options;
  world_options.launch.backend = "sim";
  world_options.cost =
      std::make_shared<sim::CostModel>(sim::Cluster::read("dgx-a100"));
  Times times;
  std::mutex mutex;
  sim::run_world(
      8,
      [&](ProcessGroup& world) {
        ModelConfig config = ModelConfig::read("gpt2");
        const auto model = make_model(config, init_of(DType::kBF16));
        set_recompute(*model, recompute);
        const auto zero = make_zero(*model, world, options, "adam", {});
        sim::VirtualClock& clock = *sim::VirtualClock::current();
        clock.begin_steps();
        const std::size_t before = world.records().size();
        for (int step = 0; step < 3; ++step) {
          const Tensor x = Tensor::zeros({2, 1024}, {DType::kI64, Device()});
          language_loss((*zero)(x), x).backward();
          zero->step();
          clock.end_step();
        }
        const std::lock_guard<std::mutex> lock(mutex);
        if (world.rank() != 0) return;
        times.step_s = clock.last_step_s();
        times.shard = zero->shard_numel();
        for (std::size_t i = before; i < world.records().size(); ++i) {
          times.bytes += wire_bytes(world.records()[i]);
        }
      },
      world_options);
  return times;
}

ZeroOptions bucketed(int number) {
  ZeroOptions options = stage(number);
  options.reduce_bucket_size = 8'000'000;  // about one block
  return options;
}

TEST(ZeroTime, OverlapHidesReductionsBehindBackward) {
  for (int number = 1; number <= 2; ++number) {
    const Times overlapped = time_of(bucketed(number));
    ZeroOptions options = bucketed(number);
    options.overlap_comm = false;
    const Times waiting = time_of(options);
    EXPECT_LT(overlapped.step_s, waiting.step_s) << "stage " << number;
    EXPECT_EQ(overlapped.bytes, waiting.bytes);
  }
}

TEST(ZeroTime, PrefetchingHidesGathersBehindComputation) {
  const Times ahead = time_of(stage(3));
  ZeroOptions options = stage(3);
  options.prefetch_bucket_size = 0;
  const Times on_demand = time_of(options);
  options.overlap_comm = false;
  const Times waiting = time_of(options);
  EXPECT_LT(ahead.step_s, on_demand.step_s);
  EXPECT_LT(on_demand.step_s, waiting.step_s);
  EXPECT_EQ(ahead.bytes, waiting.bytes);
}

TEST(ZeroTime, OffloadTakesItsTimeOnTheLinkToTheHost) {
  ZeroOptions options = bucketed(2);
  const Times plain = time_of(options);
  options.offload_optimizer = true;
  const Times offloaded = time_of(options);
  EXPECT_GT(offloaded.step_s, plain.step_s);
  EXPECT_EQ(offloaded.bytes, plain.bytes);
}

// A sub-group is copied to the device while the host updates the next one, so
// only the last copy shows; each group adds an operation and a copy.
TEST(ZeroTime, SubGroupsReturnWhileTheNextIsUpdated) {
  constexpr std::int64_t kGroups = 4;
  const sim::CostModel cost(sim::Cluster::read("dgx-a100"));
  for (const int number : {2, 3}) {
    ZeroOptions options = bucketed(number);
    options.offload_optimizer = true;
    const Times whole = time_of(options);
    options.sub_group_size = whole.shard / kGroups;
    ASSERT_EQ(whole.shard % kGroups, 0);
    const double saved_s = whole.step_s - time_of(options).step_s;
    const auto bytes = 2.0 * static_cast<double>(whole.shard);
    const double hidden_s =
        cost.host_copy(bytes).seconds - cost.host_copy(bytes / kGroups).seconds;
    EXPECT_LT(saved_s, hidden_s) << number;
    EXPECT_GT(saved_s, 0.8 * hidden_s) << number;
  }
}

}  // namespace
}  // namespace shardbook::zero_test
