#include "chapters/common/models/resnet.h"

#include <cmath>

#include "core/autograd.h"
#include "core/check.h"

namespace shardbook {
namespace {

BatchNorm image_norm(std::int64_t channels, const InitOptions& init,
                     bool relu) {
  BatchNorm norm(channels, init);
  norm.relu = relu;
  return norm;
}

struct BlockSpec {
  std::string name;
  std::int64_t in, width, stride;
};

std::int64_t widening(const ModelConfig& config) {
  return config.bottleneck ? 4 : 1;
}

/// Channels that the last block hands to the head.
std::int64_t features(const ModelConfig& config) {
  return (config.width << (config.depths.size() - 1)) * widening(config);
}

std::vector<BlockSpec> block_specs(const ModelConfig& config) {
  std::vector<BlockSpec> specs;
  std::int64_t in = config.width;
  for (std::size_t stage = 0; stage < config.depths.size(); ++stage) {
    const std::int64_t width = config.width << stage;
    for (std::int64_t i = 0; i < config.depths[stage]; ++i) {
      specs.push_back(
          {"layer" + std::to_string(stage + 1) + "." + std::to_string(i), in,
           width, stage > 0 && i == 0 ? 2 : 1});
      in = width * widening(config);
    }
  }
  return specs;
}

class ResNetLayers : public LayerList {
 public:
  explicit ResNetLayers(const ModelConfig& config)
      : config_(config), specs_(block_specs(config)) {}
  int size() const override { return static_cast<int>(specs_.size()) + 2; }
  std::string name(int layer) const override {
    if (layer == 0) return "conv1";
    return layer == size() - 1 ? "fc" : spec(layer).name;
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    if (layer == 0) return std::make_unique<ResNetStem>(config_, init);
    if (layer == size() - 1) return std::make_unique<ResNetHead>(config_, init);
    const BlockSpec& block = spec(layer);
    return std::make_unique<Named<ResNetBlock>>(
        block.name, ResNetBlock(block.name, config_.bottleneck, block.in,
                                block.width, block.stride, init));
  }

 private:
  const BlockSpec& spec(int layer) const {
    return specs_[static_cast<std::size_t>(layer - 1)];
  }
  ModelConfig config_;
  std::vector<BlockSpec> specs_;
};

}  // namespace

// --- Stem --------------------------------------------------------------------

ResNetStem::ResNetStem(const ModelConfig& config, const InitOptions& init)
    : conv1("conv1", 3, config.width, /*size=*/7, /*stride=*/2, init),
      bn1(image_norm(config.width, init, /*relu=*/true)),
      maxpool(/*size=*/3, /*stride=*/2, /*padding=*/1) {}

Tensor ResNetStem::forward(const Tensor& images) {
  SB_CHECK(images.ndim() == 4 && images.size(1) == 3, "resnet: images ",
           shape_text(images.shape()), "; give [n, 3, height, width]");
  return maxpool(bn1(conv1(permute(images, {0, 2, 3, 1}))));
}

void ResNetStem::members(MemberVisitor& visit) {
  visit.module("conv1", conv1);
  visit.module("bn1", bn1);
  visit.module("maxpool", maxpool);
}

// --- Blocks ------------------------------------------------------------------

ResNetBlock::ResNetBlock(const std::string& name, bool bottleneck,
                         std::int64_t in, std::int64_t width,
                         std::int64_t stride, const InitOptions& init) {
  const std::int64_t out = bottleneck ? 4 * width : width;
  const auto add = [&](std::int64_t from, std::int64_t to, std::int64_t size,
                       std::int64_t step) {
    convs.emplace_back(name + ".conv" + std::to_string(convs.size() + 1), from,
                       to, size, step, init);
    norms.push_back(image_norm(to, init, /*relu=*/true));
  };
  if (bottleneck) {
    add(in, width, 1, 1);
    add(width, width, 3, stride);
    add(width, out, 1, 1);
  } else {
    add(in, width, 3, stride);
    add(width, out, 3, 1);
  }
  if (stride != 1 || in != out) {
    downsample.add(Conv2d(name + ".downsample.0", in, out, 1, stride, init));
    downsample.add(image_norm(out, init, /*relu=*/false));
  }
}

Tensor ResNetBlock::compute(const Tensor& x) {
  const Tensor shortcut = downsample.size() > 0 ? downsample(x) : x;
  Tensor y = x;
  for (std::size_t i = 0; i + 1 < convs.size(); ++i) y = norms[i](convs[i](y));
  // The last norm adds the shortcut before its ReLU
  return norms.back()(Tensors{convs.back()(y), shortcut})[0];
}

Tensor ResNetBlock::forward(const Tensor& x) {
  if (!recompute) return compute(x);
  return autograd::recompute(
      [this](const Tensors& inputs) { return Tensors{compute(inputs[0])}; },
      {x})[0];
}

void ResNetBlock::members(MemberVisitor& visit) {
  for (std::size_t i = 0; i < convs.size(); ++i) {
    const std::string number = std::to_string(i + 1);
    visit.module("conv" + number, convs[i]);
    visit.module("bn" + number, norms[i]);
  }
  visit.module("downsample", downsample);
}

// --- Head --------------------------------------------------------------------

ResNetHead::ResNetHead(const ModelConfig& config, const InitOptions& init) {
  const std::int64_t in = features(config);
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  weight =
      make_uniform_parameter("fc.weight", {config.num_labels, in}, bound, init);
  bias = make_uniform_parameter("fc.bias", {config.num_labels}, bound, init);
}

Tensor ResNetHead::forward(const Tensor& x) {
  const Tensor logits =
      matmul(global_avg_pool2d(x), weight, /*trans_a=*/false, /*trans_b=*/true);
  return add(logits, bias);
}

void ResNetHead::members(MemberVisitor& visit) {
  visit.parameter("fc.weight", weight);
  visit.parameter("fc.bias", bias);
}

// --- All of it ---------------------------------------------------------------

ResNet::ResNet(const ModelConfig& config, const InitOptions& init)
    : stem(config, init), head(config, init) {
  for (const BlockSpec& spec : block_specs(config)) {
    block_names.push_back(spec.name);
    blocks.emplace_back(spec.name, config.bottleneck, spec.in, spec.width,
                        spec.stride, init);
  }
}

Tensor ResNet::forward(const Tensor& images) {
  Tensor x = stem(images);
  for (ResNetBlock& block : blocks) x = block(x);
  return head(x);
}

void ResNet::members(MemberVisitor& visit) {
  stem.members(visit);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    visit.module(block_names[i], blocks[i]);
  }
  head.members(visit);
}

std::unique_ptr<LayerList> resnet_layers(const ModelConfig& config) {
  return std::make_unique<ResNetLayers>(config);
}

std::vector<ResNetBlockSize> resnet_blocks(const ModelConfig& config) {
  std::vector<ResNetBlockSize> blocks;
  for (const BlockSpec& spec : block_specs(config)) {
    blocks.push_back(
        {spec.in, spec.width, spec.width * widening(config), spec.stride});
  }
  return blocks;
}

ResNetSize resnet_size(const ModelConfig& config) {
  ResNetSize size;
  const auto conv_and_norm = [&](std::int64_t in, std::int64_t out,
                                 std::int64_t kernel) {
    size.trained += static_cast<double>(in * out * kernel * kernel + 2 * out);
    size.statistics += static_cast<double>(2 * out);
  };
  conv_and_norm(3, config.width, 7);
  for (const BlockSpec& spec : block_specs(config)) {
    const std::int64_t out = spec.width * widening(config);
    if (config.bottleneck) {
      conv_and_norm(spec.in, spec.width, 1);
      conv_and_norm(spec.width, spec.width, 3);
      conv_and_norm(spec.width, out, 1);
    } else {
      conv_and_norm(spec.in, spec.width, 3);
      conv_and_norm(spec.width, out, 3);
    }
    if (spec.stride != 1 || spec.in != out) conv_and_norm(spec.in, out, 1);
  }
  size.trained +=
      static_cast<double>((features(config) + 1) * config.num_labels);
  return size;
}

}  // namespace shardbook
