// The bill of DataParallel: bytes, memory, traces, and refused devices.

#include <gtest/gtest.h>

#include <map>

#include "chapters/01_data_parallel/bill.h"
#include "chapters/01_data_parallel/data_parallel_strategy.h"
#include "chapters/common/run/trace.h"
#include "tests/chapters/01_data_parallel/data_parallel_support.h"
#include "tests/support/chrome_trace.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook::data_parallel {
namespace {

using namespace test;

double total_sent(const DataParallel& model) {
  double total = 0;
  for (const Device& device : model.device_ids()) {
    total += bytes_sent(model.ledger()->records(device));
  }
  return total;
}

TEST_P(DataParallelParity, BytesFollowTheFormula) {
  for (const std::int64_t rows : {1, 5, 8, 16}) {
    World world(GetParam());
    Probe module;
    DataParallel model(module, world.devices);
    sum(square(model(random_tensor({rows, 6}, 3)))).backward();
    double parameter_bytes = 0;
    for (const Tensor& parameter : module.parameters()) {
      parameter_bytes += static_cast<double>(parameter.bytes());
    }
    const auto traffic =
        step_traffic(rows, GetParam(), 6 * 8, 3 * 8, parameter_bytes, 0);
    const auto chunks = ceil_chunks(rows, GetParam());
    const double used = static_cast<double>(chunks.size());
    const double elsewhere =
        1 - static_cast<double>(chunks[0].second) / static_cast<double>(rows);
    for (std::size_t i = 0; i < world.devices.size(); ++i) {
      EXPECT_EQ(bytes_sent(model.ledger()->records(world.devices[i])),
                traffic[i].total());
    }
    const double x = static_cast<double>(rows) * 48;
    const double y = static_cast<double>(rows) * 24;
    EXPECT_NEAR(total_sent(model),
                elsewhere * (x + 2 * y) + 2 * (used - 1) * parameter_bytes,
                1e-6);
    // The cost model of the ledger agrees on the group's total when all pieces
    // are even.
    if (rows % static_cast<std::int64_t>(used) != 0) continue;
    double model_total = 0;
    for (const Device& device : world.devices) {
      const auto records = model.ledger()->records(device);
      for (const CommRecord& record : records) {
        model_total += wire_bytes(record);
      }
    }
    EXPECT_NEAR(model_total, total_sent(model), 1e-6);
  }
}

TEST(DataParallelBill, LogHasOneScatterOneGatherAndOneScatterBack) {
  World world(3);
  Probe module;
  DataParallel model(module, world.devices);
  sum(square(model(random_tensor({5, 6}, 3)))).backward();
  for (std::size_t i = 0; i < 3; ++i) {
    const auto records = model.ledger()->records(world.devices[i]);
    std::vector<std::string> text;
    for (const CommRecord& record : records) {
      text.push_back(std::string(phase_name(record.phase)) + " " +
                     record_text(record));
      EXPECT_EQ(record.root_or_peer, 0);
    }
    const std::string who = "(rank " + std::to_string(i) + " of 3) ";
    EXPECT_EQ(
        text,
        (std::vector<std::string>{
            "forward scatter f64[30] over devices " + who + "'inputs'",
            "forward broadcast f64[213] over devices " + who + "'parameters'",
            "forward gather f64[15] over devices " + who + "'outputs'",
            "backward scatter f64[15] over devices " + who +
                "'output gradients'",
            "backward reduce f64[213] over devices " + who + "'gradients'"}));
  }
}

TEST(DataParallelBill, BuffersTravelForwardOnly) {
  World world(4);
  BatchNorm module(5, {1, DType::kF64, Device()});
  DataParallel model(module, world.devices);
  sum(square(model(random_tensor({8, 5}, 3)))).backward();
  // 10 parameter values go there and back, 10 buffer values only there.
  const auto traffic = step_traffic(8, 4, 40, 40, 80, 80);
  EXPECT_EQ(traffic[0].replicate, 3 * 160);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(bytes_sent(model.ledger()->records(world.devices[i])),
              traffic[i].total());
  }
}

TEST_P(DataParallelParity, MemoryHeldFollowsTheFormula) {
  for (const char* model : {"mlp", "gpt-nano"}) {
    for (const double dropout : {0.0, 0.5}) {
      if (model == std::string("mlp") && dropout > 0) continue;
      for (const std::int64_t batch : sized<std::int64_t>({5, 8}, {5})) {
        SCOPED_TRACE(testing::Message() << model << ", dropout " << dropout
                                        << ", batch " << batch);
        Options options = tiny_options(GetParam(), batch);
        options.model = model;
        options.dropout = dropout;
        options.dtype = DType::kF32;
        options.seq = 16;
        World world(GetParam());
        DataParallelStrategy strategy(options, world.devices);
        train(options, strategy.optimizer(), false,
              [&](std::int64_t step) { return strategy.step(step); });
        const std::vector<Bill> bills = strategy.bills();
        for (std::size_t i = 0; i < world.devices.size(); ++i) {
          const MemoryStats memory = world.devices[i].memory();
          for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
            const auto kind = static_cast<MemoryKind>(k);
            EXPECT_EQ(static_cast<double>(memory.held(kind)),
                      bills[i].memory.bytes[k])
                << "device " << i << ", " << held_name(kind);
          }
        }
      }
    }
  }
}

// A replica of the mlp keeps 5 h numbers per token in fc1 and fc2, h in fc3.
// Its outputs' gradient, 4 h, arrives and becomes the one of fc3's input.
TEST(DataParallelBill, AReplicasPeakIsInItsLastLayer) {
  Options options = tiny_options(2, 8);
  options.model = "mlp";
  options.dtype = DType::kF32;
  World world(2);
  DataParallelStrategy strategy(options, world.devices);
  strategy.step(0);
  const double tokens = 4 * static_cast<double>(options.seq), h = 64;
  EXPECT_EQ(static_cast<double>(
                world.devices[1].memory().peak(MemoryKind::kActivation)),
            4 * tokens * (11 * h + 4 * h + h));
}

TEST(DataParallelBill, OnlyTheMainDeviceHoldsStateBetweenSteps) {
  Options options = tiny_options(3, 6);
  options.model = "mlp";
  World world(3);
  DataParallelStrategy strategy(options, world.devices);
  strategy.step(0);
  EXPECT_EQ(world.devices[1].memory().current_total, 0);
  EXPECT_EQ(world.devices[2].memory().current_total, 0);
  EXPECT_GT(world.devices[0].memory().current(MemoryKind::kOptimizerState), 0);
}

TEST(DataParallelBill, TracesHaveATrackPerDevice) {
  World world(2);
  Probe module;
  DataParallel model(module, world.devices);
  const TempFolder folder;
  Options options;
  options.trace = folder / "trace.json";
  {
    TraceScope trace(options, world.devices, *model.ledger());
    sum(square(model(random_tensor({4, 6}, 3)))).backward();
    trace.write();
  }
  const ChromeTrace read = read_chrome_trace(options.trace);
  EXPECT_EQ(read.faults, "");
  for (const int rank : {0, 1}) {
    const std::vector<std::string>& lanes = read.lanes.at(rank);
    EXPECT_EQ(lanes.at(0), "compute");
    EXPECT_EQ(lanes.at(1), "comm devices");
  }
  // Each device computes its own half; the loss is on main's track alone.
  std::map<int, int> matmuls, sums;
  for (const TraceSlice& slice : read.slices) {
    matmuls[slice.rank] += slice.name.starts_with("matmul") ? 1 : 0;
    sums[slice.rank] += slice.name == "sum" ? 1 : 0;
  }
  EXPECT_GT(matmuls[0], 0);
  EXPECT_EQ(matmuls[0], matmuls[1]);
  EXPECT_EQ(sums[0], 1);
  EXPECT_EQ(sums[1], 0);
  EXPECT_FALSE(world.context.observed());
  model(random_tensor({4, 6}, 3));
}

TEST(DataParallelErrors, DevicesAreNamedOnce) {
  World world(2);
  Probe module;
  expect_text(error_of([&] { DataParallel(module, {}); }),
              {"device_ids is empty"});
  expect_text(error_of([&] {
                DataParallel(module, {world.devices[0], world.devices[0]});
              }),
              {"are the same device"});
}

}  // namespace
}  // namespace shardbook::data_parallel
