#include "chapters/13_moe/cifar.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/check.h"
#include "core/ops.h"

namespace shardbook::moe {
namespace {

constexpr std::int64_t kPixels = kCifarSide * kCifarSide;
constexpr int kLabels = 10;

void read_file(const std::string& path, std::vector<std::uint8_t>& bytes) {
  std::ifstream file(path, std::ios::binary);
  SB_CHECK(file, "CIFAR-10: ", path, " cannot be read");
  const std::vector<char> read{std::istreambuf_iterator<char>(file), {}};
  SB_CHECK(!file.bad(), "CIFAR-10: ", path, " cannot be read to its end");
  const auto n = static_cast<std::int64_t>(read.size());
  SB_CHECK(n > 0 && n % kCifarRecord == 0, "CIFAR-10: ", path, " has ", n,
           " bytes; give records of ", kCifarRecord,
           ", a label and 3 x 32 x 32 pixels");
  for (std::int64_t i = 0; i < n; i += kCifarRecord) {
    const int label =
        static_cast<std::uint8_t>(read[static_cast<std::size_t>(i)]);
    SB_CHECK(label < kLabels, "CIFAR-10: ", path, " has label ", label,
             " in record ", i / kCifarRecord, "; labels are 0 to 9");
  }
  bytes.insert(bytes.end(), read.begin(), read.end());
}

constexpr std::int64_t kTokenWidth = 84;

/// PyTorch's initialization: uniform, scaled by the number of inputs.
Tensor uniform(const std::string& name, const Shape& shape, std::int64_t inputs,
               const InitOptions& init) {
  return make_uniform_parameter(
      name, shape, 1 / std::sqrt(static_cast<double>(inputs)), init);
}

}  // namespace

CifarImages read_cifar10(const std::string& path) {
  namespace fs = std::filesystem;
  CifarImages images;
  if (!fs::is_directory(path)) {
    read_file(path, images.bytes);
    return images;
  }
  for (int i = 1; i <= 5; ++i) {
    const fs::path file =
        fs::path(path) / ("data_batch_" + std::to_string(i) + ".bin");
    if (fs::exists(file)) read_file(file.string(), images.bytes);
  }
  SB_CHECK(images.size() > 0, "CIFAR-10: ", path,
           " has no data_batch_1.bin to data_batch_5.bin; give the folder "
           "cifar-10-batches-bin");
  return images;
}

CifarImages synthetic_cifar10(std::int64_t n, std::uint64_t seed) {
  const std::uint64_t labels = stream_of("cifar.labels");
  const std::uint64_t noise = stream_of("cifar.pixels");
  CifarImages images;
  images.bytes.reserve(static_cast<std::size_t>(n * kCifarRecord));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto element = static_cast<std::uint64_t>(i);
    const auto label = random_bits(seed, labels, element) % kLabels;
    images.bytes.push_back(static_cast<std::uint8_t>(label));
    for (std::uint32_t colour = 0; colour < 3; ++colour) {
      // 0, 64, 128 or 192 of each colour, by the digits of the label
      const std::uint32_t base = (label >> (2 * colour % 5)) % 4 * 64;
      for (std::int64_t pixel = 0; pixel < kPixels; ++pixel) {
        const auto at =
            static_cast<std::uint64_t>((i * 3 + colour) * kPixels + pixel);
        images.bytes.push_back(static_cast<std::uint8_t>(
            base + random_bits(seed, noise, at) % 64));
      }
    }
  }
  return images;
}

CifarData open_cifar10(const std::string& folder, std::uint64_t seed) {
  if (folder.empty()) {
    return {synthetic_cifar10(1000, seed), synthetic_cifar10(200, seed + 1)};
  }
  SB_CHECK(std::filesystem::is_directory(folder), "--data ", folder,
           ": is no folder; give cifar-10-batches-bin, which has "
           "data_batch_1.bin to data_batch_5.bin and test_batch.bin");
  return {read_cifar10(folder), read_cifar10(folder + "/test_batch.bin")};
}

Batch cifar_batch(const CifarImages& images, BatchSlice slice,
                  std::int64_t rows, DType dtype) {
  std::vector<float> pixels;
  std::vector<std::int64_t> labels;
  pixels.reserve(static_cast<std::size_t>(rows * 3 * kPixels));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t image =
        (slice.first + row * slice.stride) % images.size();
    const std::uint8_t* record = images.bytes.data() + image * kCifarRecord;
    labels.push_back(record[0]);
    // Channels lie together in the file, and last in the tensor
    for (std::int64_t pixel = 0; pixel < kPixels; ++pixel) {
      for (std::int64_t colour = 0; colour < 3; ++colour) {
        pixels.push_back(
            static_cast<float>(record[1 + colour * kPixels + pixel]) / 127.5F -
            1);
      }
    }
  }
  Batch batch;
  const MemoryScope kind(MemoryKind::kInput);
  batch.inputs = to_dtype(
      Tensor::from_values(pixels, {rows, kCifarSide, kCifarSide, 3}), dtype);
  batch.targets = Tensor::from_values(labels, {rows});
  batch.slice = slice;
  return batch;
}

// --- The net -----------------------------------------------------------------------

ConvNet::ConvNet(const ConvNetOptions& options, const MoeGroups& groups,
                 std::shared_ptr<MoeRecord> record) {
  const InitOptions init = {.seed = options.seed, .dtype = options.dtype};
  if (record == nullptr) record = std::make_shared<MoeRecord>();
  conv1_weight = uniform("conv1.weight", {6, 3, 5, 5}, 75, init);
  conv1_bias = uniform("conv1.bias", {6}, 75, init);
  conv2_weight = uniform("conv2.weight", {16, 6, 5, 5}, 150, init);
  conv2_bias = uniform("conv2.bias", {16}, 150, init);
  fc1 = Linear("fc1", 16 * 5 * 5, 120, init);
  fc2 = Linear("fc2", 120, kTokenWidth, init);
  last = Linear(options.num_experts.empty() ? "fc3" : "fc4", kTokenWidth, 10,
                init);

  ExpertsShape shape;
  shape.width = kTokenWidth;
  shape.hidden = 0;
  shape.stddev = 1 / std::sqrt(3.0 * kTokenWidth);  // of a linear layer's
  shape.are_copies = true;
  const AnyModule shared{
      std::make_unique<Linear>("fc3", kTokenWidth, kTokenWidth, init)};
  for (std::size_t i = 0; i < options.num_experts.size(); ++i) {
    const std::string name = "moe_layer_list." + std::to_string(i);
    MoeOptions own = options.moe;
    own.gate.num_experts = shape.experts = options.num_experts[i];
    AnyModule mlp = shared;  // with the same tensors
    if (!options.share_mlp) {
      mlp = {std::make_unique<Linear>(name + ".mlp", kTokenWidth, kTokenWidth,
                                      init)};
    }
    moe_layers.emplace_back(name, shape, own, init, std::move(mlp),
                            AnyModule{std::make_unique<Dropout>(0)}, groups,
                            record);
  }
}

Tensor ConvNet::forward(const Tensor& images) {
  Tensor x = max_pool2d(relu(conv2d(images, conv1_weight, conv1_bias)), 2, 2);
  x = max_pool2d(relu(conv2d(x, conv2_weight, conv2_bias)), 2, 2);
  // In the order of PyTorch: channels first
  x = reshape(permute(x, {0, 3, 1, 2}), {images.size(0), -1});
  x = relu(fc2(relu(fc1(x))));
  for (MoeLayer& layer : moe_layers) x = layer(x);
  return last(x);
}

void ConvNet::members(MemberVisitor& visit) {
  visit.parameter("conv1.weight", conv1_weight);
  visit.parameter("conv1.bias", conv1_bias);
  visit.parameter("conv2.weight", conv2_weight);
  visit.parameter("conv2.bias", conv2_bias);
  visit.module("fc1", fc1);
  visit.module("fc2", fc2);
  for (std::size_t i = 0; i < moe_layers.size(); ++i) {
    visit.module("moe_layer_list." + std::to_string(i), moe_layers[i]);
  }
  visit.module(last_name(), last);
}

}  // namespace shardbook::moe
