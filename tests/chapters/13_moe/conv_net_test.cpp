// DeepSpeed's example on CIFAR-10: its parameters, its files, its training.

#include "chapters/13_moe/conv_net.h"

#include <fstream>

#include "tests/core/support.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"
#include "tests/support/temp_folder.h"

namespace shardbook::moe {
namespace {

std::int64_t layer_parameters(ConvNet& net) {
  std::int64_t numel = 0;
  for (const NamedTensor& each : net.named_parameters()) {
    if (each.name.rfind("moe_layer_list", 0) == 0) {
      numel += each.tensor.numel();
    }
  }
  return numel;
}

// `fc3` is made once, outside of the loop over layers.
TEST(ConvNet, HasTheParametersOfTheExample) {
  ConvNetOptions options;
  options.moe.use_residual = true;
  ConvNet shared(options);
  EXPECT_EQ(layer_parameters(shared), 50824);
  options.share_mlp = false;
  ConvNet own(options);
  EXPECT_EQ(layer_parameters(own), 57964);
  EXPECT_EQ(own.num_parameters(), 57964 + 456 + 2416 + 48120 + 10164 + 850);
}

TEST(ConvNet, RoutedExpertsBeginAsCopies) {
  ConvNet net(ConvNetOptions{});
  for (MoeLayer& layer : net.moe_layers) {
    const Tensor& weight = layer.experts.c_fc_weight;
    for (std::int64_t e = 1; e < weight.size(0); ++e) {
      EXPECT_TRUE(bitwise_equal(weight.rows_view(e, e + 1).clone(),
                                weight.rows_view(0, 1).clone()));
    }
  }
}

TEST(ConvNet, ComputesOneResultPerImage) {
  ConvNet net(ConvNetOptions{});
  const Batch batch = cifar_batch(synthetic_cifar10(5, 1), {0, 1}, 5);
  EXPECT_EQ(net(batch.inputs).shape(), (Shape{5, 10}));
}

class ConvNetOnRanks : public testing::TestWithParam<int> {};

TEST_P(ConvNetOnRanks, EqualsOneDevice) {
  const int ranks = GetParam();
  ConvNetOptions options;
  options.num_experts =
      ranks == 3 ? std::vector<int>{3, 6} : std::vector<int>{4, 8};
  options.moe.use_residual = true;
  options.moe.aux_coefficient = 0.2;
  options.dtype = DType::kF64;
  ConvTraining training;
  training.steps = 3;
  training.batch = 24;
  const CifarImages images = synthetic_cifar10(60, 1);
  const ConvResult one = on_ranks(1, [&](ProcessGroup& world) {
    return train_conv_net(options, training, images, world, ranks);
  })[0];
  for (int ep : {1, ranks == 4 ? 2 : ranks, ranks}) {
    training.ep = ep;
    const auto found = on_ranks(ranks, [&](ProcessGroup& world) {
      return train_conv_net(options, training, images, world);
    });
    for (int rank = 0; rank < ranks; ++rank) {
      const ConvResult& here = found[at(rank)];
      for (std::size_t k = 0; k < one.losses.size(); ++k) {
        EXPECT_NEAR(here.losses[k], one.losses[k], 1e-10);
      }
      for (std::size_t i = 0; i < one.parameters.size(); ++i) {
        const NamedTensor& whole = one.parameters[i];
        const Tensor expected = take_part(
            whole.tensor, expert_layout(whole.name, rank % ep, ep, 0, 1));
        EXPECT_LT(max_abs_difference(here.parameters[i].tensor, expected), 1e-9)
            << whole.name << " rank " << rank << " ep " << ep;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(WorldSizes, ConvNetOnRanks,
                         testing::Values(1, 2, 3, 4));

TEST(ConvNet, Learns) {
  ConvTraining training;
  training.steps = 25;
  training.lr = 3e-3;
  ConvNetOptions options;
  options.moe.use_residual = true;
  const auto found = on_ranks(2, [&](ProcessGroup& world) {
    return train_conv_net(options, training, synthetic_cifar10(64, 1), world)
        .losses;
  });
  EXPECT_LT(found[0].back(), 0.8 * found[0].front());
}

// --- Files -------------------------------------------------------------------

class Cifar : public testing::Test {
 protected:
  std::string write(const std::string& name,
                    const std::vector<std::uint8_t>& bytes) {
    const std::string path = folder_ / name;
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path;
  }
  std::string error_of(const std::string& path) {
    return shardbook::error_of([&] { read_cifar10(path); });
  }
  TempFolder folder_;
};

TEST_F(Cifar, ReadsItsBinaryFiles) {
  const CifarImages made = synthetic_cifar10(7, 3);
  const auto middle = made.bytes.begin() + 3 * kCifarRecord;
  write("data_batch_2.bin", {middle, made.bytes.end()});
  const std::string first =
      write("data_batch_1.bin", {made.bytes.begin(), middle});
  write("test_batch.bin", {made.bytes.begin(), middle});
  EXPECT_EQ(read_cifar10(folder_.path()).bytes, made.bytes);
  EXPECT_EQ(read_cifar10(first).size(), 3);
}

TEST_F(Cifar, PixelsAreChannelsLastFromMinusOneToOne) {
  std::vector<std::uint8_t> record(kCifarRecord, 0);
  record[0] = 7;
  record[1] = 255;                 // red of the first pixel
  record[1 + 2 * 1024 + 33] = 51;  // blue, second row and column
  const CifarImages images = read_cifar10(write("x.bin", record));
  const Batch batch = cifar_batch(images, {0, 1}, 1);
  EXPECT_EQ(batch.inputs.shape(), (Shape{1, 32, 32, 3}));
  const auto values = batch.inputs.to_vector<double>();
  EXPECT_NEAR(values[0], 1, 1e-6);
  EXPECT_NEAR(values[1], -1, 1e-6);
  EXPECT_NEAR(values[33 * 3 + 2], -0.6, 1e-6);
  EXPECT_EQ(batch.targets.to_vector<std::int64_t>()[0], 7);
}

TEST_F(Cifar, BadFilesAreRefusedWithAReason) {
  expect_text(error_of("/no/such/file"), {"cannot be read"});
  expect_text(error_of(folder_.path()), {"data_batch_1.bin"});
  std::vector<std::uint8_t> bytes = synthetic_cifar10(2, 1).bytes;
  bytes[kCifarRecord] = 10;
  expect_text(error_of(write("label.bin", bytes)), {"label 10 in record 1"});
  bytes.pop_back();
  expect_text(error_of(write("short.bin", bytes)), {"has 6145 bytes"});
  expect_text(error_of(write("empty.bin", {})), {"has 0 bytes"});
}

}  // namespace
}  // namespace shardbook::moe
