// Training steps that launch graphs: the same bits, and the same ledger, as the
// operations one by one.

#include <gtest/gtest.h>

#include "chapters/00_single_device/single_device.h"
#include "comm/launch.h"
#include "core/device_graph.h"
#include "tests/core/support.h"

namespace shardbook::single_device {
namespace {

struct Case {
  std::string model = "mlp";
  std::int64_t batch = 4, micro_batches = 1;
  DType dtype = DType::kF32;
  bool recompute = false;
  std::int64_t steps = 3;  ///< plain, recorded, launched again
};

struct Outcome {
  TrainingLog log;
  std::vector<NamedTensor> parameters;
  MemoryStats memory;
  MemoryBill bill;
};

Outcome train_with(const Case& setup, bool cuda_graphs) {
  Options options;
  options.device = "cuda";
  options.data = "random";
  options.model = setup.model;
  options.batch = setup.batch;
  options.dtype = setup.dtype;
  options.steps = setup.steps;
  options.seq = 2;
  options.clip = 0.5;
  SingleDeviceOptions single;
  single.num_micro_batches = setup.micro_batches;
  single.recompute = setup.recompute;
  single.master_weights = setup.dtype == DType::kBF16;
  single.cuda_graphs = cuda_graphs;
  RankContext context(Device::cuda());
  const RankContext::Scope scope(context);
  Outcome outcome;
  {
    SingleDevice device(options, single);
    outcome.log = train(options, device.optimizer(), false,
                        [&](std::int64_t k) { return device.step(k); });
    outcome.bill = device.bill();
    outcome.memory = context.device.memory();
    for (const NamedTensor& each : device.full_state()) {
      outcome.parameters.push_back({each.name, each.tensor.clone()});
    }
  }
  return outcome;
}

void expect_same(const Case& setup) {
  SCOPED_TRACE(testing::Message()
               << setup.model << " " << setup.batch << " in "
               << setup.micro_batches << " " << dtype_name(setup.dtype));
  const Outcome plain = train_with(setup, false);
  const Outcome graphs = train_with(setup, true);
  EXPECT_EQ(graphs.log.losses, plain.log.losses);
  EXPECT_EQ(graphs.log.grad_norms, plain.log.grad_norms);
  // Batches differ, or a repeated one would pass
  EXPECT_NE(plain.log.losses[1], plain.log.losses[2]);
  ASSERT_EQ(graphs.parameters.size(), plain.parameters.size());
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(
        bitwise_equal(graphs.parameters[i].tensor, plain.parameters[i].tensor))
        << plain.parameters[i].name;
  }
  for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
    EXPECT_EQ(static_cast<double>(graphs.memory.held_by_kind[k]),
              plain.bill.bytes[k])
        << held_name(static_cast<MemoryKind>(k));
  }
}

TEST(TrainingGraphs, GiveTheSameBitsAndBills) {
  expect_same({"mlp", 2, 1, DType::kF32, false, 4});
}

// Pieces of 2, 2 and 1 rows: one graph creates gradients, two add to them.
TEST(TrainingGraphs, HaveOneForEachSizeOfPiece) { expect_same({"mlp", 5, 3}); }

TEST(TrainingGraphs, KeepPrecisionAndLossScale) {
  expect_same({"mlp", 1, 1, DType::kBF16});
  expect_same({"mlp", 1, 1, DType::kF16});
}

TEST(TrainingGraphs, StartFromTheLossScaleOfEachStep) {
  Options options;
  options.device = "cuda";
  options.data = "random";
  options.model = "mlp";
  options.batch = 2, options.seq = 2;
  RankContext context(Device::cuda());
  const RankContext::Scope scope(context);
  const LoadedModel loaded = build_model(options);
  const Dataset data = Dataset::open(options, loaded.config);
  PieceGraphs graphs(options, *loaded.model, data);
  const Tensor weight = loaded.model->parameters().back();
  for (const double scale : {1.0, 1.0, 4.0, 0.5}) {
    weight.clear_grad();
    accumulate_gradients(options, *loaded.model, data, 0, 2, scale);
    const Tensor expected = weight.grad().clone();
    for (const Tensor& each : loaded.model->parameters()) each.clear_grad();
    graphs.accumulate(0, 2, scale);
    EXPECT_TRUE(bitwise_equal(weight.grad(), expected)) << scale;
    for (const Tensor& each : loaded.model->parameters()) each.clear_grad();
  }
}

TEST(TrainingGraphs, TrainAGpt) {
  expect_same({"gpt-nano", 1, 1, DType::kF32, /*recompute=*/true});
}

TEST(TrainingGraphs, HaveNoMessagesToOtherRanks) {
  LaunchOptions launch;
  launch.device = "cuda";
  expect_error(
      [&] {
        run_ranks(
            2,
            [](ProcessGroup& world) {
              const Tensor x = Tensor::full({3}, 1);
              world.all_reduce(x).wait();
              DeviceGraph graph([&] { world.all_reduce(x).wait(); });
            },
            launch);
      },
      {"device graph: ",
       ": a graph cannot record this: other ranks take part"});
}

TEST(TrainingGraphs, NeedStepsThatRepeat) {
  Options options;
  expect_error([&] { check_cuda_graphs(options); },
               {"--cuda-graphs", "--device cuda"});
  options.device = "cuda";
  check_cuda_graphs(options);
  options.dropout = 0.1;
  expect_error([&] { check_cuda_graphs(options); }, {"--dropout 0.1", "mask"});
  options.dropout = 0;
  options.trace = "t.json";
  expect_error([&] { check_cuda_graphs(options); }, {"--trace t.json"});
  options.trace.clear();
  options.model = "resnet18";
  expect_error([&] { check_cuda_graphs(options); },
               {"--model resnet18", "--cuda-graphs", "convolutions"});
}

}  // namespace
}  // namespace shardbook::single_device
