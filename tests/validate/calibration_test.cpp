#include <gtest/gtest.h>

#include "bench/this_machine/calibrate.h"
#include "sim/cluster.h"

namespace shardbook::this_machine {
namespace {

TEST(Calibration, FindsTheFixedTimeAndTheTimePerUnit) {
  const Fit line = fit({{1e6, 3e-6}, {2e6, 5e-6}, {10e6, 21e-6}});
  EXPECT_NEAR(line.fixed_s, 1e-6, 1e-12);
  EXPECT_NEAR(line.per_unit_s, 2e-12, 1e-18);
}

TEST(Calibration, HasNoNegativeTimes) {
  // The line through these points meets no work at -1 us.
  const Fit steep = fit({{1e6, 1e-6}, {2e6, 3e-6}});
  EXPECT_EQ(steep.fixed_s, 0);
  EXPECT_GT(steep.per_unit_s, 1e-12);
  // More work took less time.
  const Fit falling = fit({{1e6, 3e-6}, {2e6, 1e-6}});
  EXPECT_EQ(falling.per_unit_s, 0);
  EXPECT_GT(falling.fixed_s, 1e-6);
}

TEST(Calibration, TellsBytesFromArithmetic) {
  std::vector<Sample> samples;
  for (const double work : {1e7, 1e8, 1e9}) {
    for (const double bytes : {1e5, 1e7}) {
      samples.push_back({work, 5e-6 + work * 4e-12 + bytes * 2e-10, bytes});
    }
  }
  const Fit both = fit(samples, /*by_both=*/true);
  EXPECT_NEAR(both.fixed_s, 5e-6, 1e-10);
  EXPECT_NEAR(both.per_unit_s, 4e-12, 1e-16);
  EXPECT_NEAR(both.per_byte_s, 2e-10, 1e-14);
}

TEST(Calibration, GivesEachCoreItsShareOfTheMemory) {
  const OperationFit gelu = {"gelu", Phase::kForward, false, {2e-6, 1e-11}};
  const std::string text = cluster_json({gelu}, {3e-6, 1e-10}, 4, 32e9);
  const sim::Cluster cluster = sim::Cluster::from_json(text, "measured");
  EXPECT_EQ(cluster.num_devices(), 4);
  EXPECT_EQ(cluster.device.memory_bytes, 8000000000);
}

}  // namespace
}  // namespace shardbook::this_machine
