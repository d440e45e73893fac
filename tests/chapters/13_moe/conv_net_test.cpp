// DeepSpeed's example on CIFAR-10: its net and its files. Its training is in
// 15_engine/cifar_strategy_test.cpp.

#include "chapters/13_moe/cifar.h"

#include <fstream>

#include "tests/core/support.h"
#include "tests/support/errors.h"
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
  options.num_experts.clear();
  EXPECT_EQ(ConvNet(options).num_parameters(),
            456 + 2416 + 48120 + 10164 + 850);
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
  const CifarData data = open_cifar10(folder_.path(), 0);
  EXPECT_EQ(data.training.bytes, made.bytes);
  EXPECT_EQ(data.test.size(), 3);
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
  write("data_batch_1.bin", synthetic_cifar10(1, 1).bytes);
  for (const char* name : {"", "/data_batch_1.bin"}) {
    expect_text(
        shardbook::error_of([&] { open_cifar10(folder_.path() + name, 0); }),
        {"test_batch.bin"});
  }
  std::vector<std::uint8_t> bytes = synthetic_cifar10(2, 1).bytes;
  bytes[kCifarRecord] = 10;
  expect_text(error_of(write("label.bin", bytes)), {"label 10 in record 1"});
  bytes.pop_back();
  expect_text(error_of(write("short.bin", bytes)), {"has 6145 bytes"});
  expect_text(error_of(write("empty.bin", {})), {"has 0 bytes"});
}

}  // namespace
}  // namespace shardbook::moe
