// Memory per rank under ZeRO, by formula. Published tables are in tests/validate;
// fsdp_strategy_test.cpp compares the bytes held.

#include <gtest/gtest.h>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"

namespace shardbook::zero_test {
namespace {

using zero::deepspeed_estimate;
using zero::DeepSpeedSetup;
using zero::model_states;

// [QUIRK] 18 bytes in shards where the paper counts 14: f32 gradients as well.
TEST(ZeroTables, DeepSpeedCountsGradientsTwice) {
  DeepSpeedSetup setup;
  setup.parameters = 8e9;
  setup.devices_per_node = 8;
  EXPECT_EQ(deepspeed_estimate(2, setup).device_bytes -
                model_states(2, 8e9, 8).total(),
            8e9 * (2 + 2.0 / 8));
}

TEST(ZeroTables, AllF32AdamIsTheOtherColumn) {
  const auto bytes = zero::state_bytes(DType::kF32, "adam", {});
  EXPECT_EQ(model_states(0, 1, 4, bytes).total(), 16);
  EXPECT_EQ(model_states(1, 1, 4, bytes).total(), 8 + 8.0 / 4);
  EXPECT_EQ(model_states(2, 1, 4, bytes).total(), 4 + 12.0 / 4);
  EXPECT_EQ(model_states(3, 1, 4, bytes).total(), 16.0 / 4);
}

}  // namespace
}  // namespace shardbook::zero_test
