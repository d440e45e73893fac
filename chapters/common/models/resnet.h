#pragma once

// ResNet as torchvision has it, layer by layer and name by name.
//
//   stem       conv1 7x7 stride 2, bn1, ReLU, max pool 3x3 stride 2
//   layer1.0   blocks of stage 1, and so on; the first of each later stage
//   ...        halves height and width, and doubles the width
//   fc         mean over height and width, linear
//
// It reads f32 images [n, 3, S, S], as PyTorch does; between layers they are
// channels-last [n, h, w, c], where convolutions are products of rows.
// He et al. 2015, "Deep Residual Learning for Image Recognition".

#include <memory>
#include <string>
#include <vector>

#include "chapters/common/models/layer_list.h"
#include "chapters/common/models/models.h"
#include "core/layers.h"

namespace shardbook {

class ResNetStem : public ModuleOf<ResNetStem> {
 public:
  ResNetStem(const ModelConfig& config, const InitOptions& init);
  /// [n, 3, S, S] -> [n, about S/4, about S/4, width]
  Tensor forward(const Tensor& images) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "ResNetStem"; }

  Conv2d conv1;
  BatchNorm bn1;
  MaxPool2d maxpool;
};

/// BasicBlock: 3x3, 3x3. Bottleneck: 1x1, 3x3 (which has the stride), 1x1 to
/// four times the width. Each with batch norm; ReLU(branch + shortcut). With
/// `recompute`, only the block's input is kept for backward.
class ResNetBlock : public ModuleOf<ResNetBlock> {
 public:
  ResNetBlock(const std::string& name, bool bottleneck, std::int64_t in,
              std::int64_t width, std::int64_t stride, const InitOptions& init);
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "ResNetBlock"; }

  std::vector<Conv2d> convs;     ///< conv1, conv2, and conv3 of a bottleneck
  std::vector<BatchNorm> norms;  ///< bn1, ...
  Sequential downsample;         ///< 1x1 and batch norm, or empty
  bool recompute = false;

 private:
  Tensor compute(const Tensor& x);
};

/// Mean over height and width, then logits = x weight^T + bias.
class ResNetHead : public ModuleOf<ResNetHead> {
 public:
  ResNetHead(const ModelConfig& config, const InitOptions& init);
  /// [n, h, w, c] -> [n, labels]
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "ResNetHead"; }

  Tensor weight;  ///< fc.weight [labels, c]: as files have it
  Tensor bias;    ///< fc.bias [labels]
};

/// The layers one after another.
class ResNet : public ModuleOf<ResNet> {
 public:
  ResNet(const ModelConfig& config, const InitOptions& init);
  Tensor forward(const Tensor& images) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "ResNet"; }

  ResNetStem stem;
  std::vector<std::string> block_names;  ///< "layer1.0", ...
  std::vector<ResNetBlock> blocks;
  ResNetHead head;
};

/// The same layers for pipelines: stem, blocks, head.
std::unique_ptr<LayerList> resnet_layers(const ModelConfig& config);

/// Channels and stride of a block.
struct ResNetBlockSize {
  std::int64_t in = 0, width = 0, out = 0, stride = 1;
  bool has_downsample() const { return stride != 1 || in != out; }
};
std::vector<ResNetBlockSize> resnet_blocks(const ModelConfig& config);

/// Elements of the parameters that are trained, and of the running statistics.
struct ResNetSize {
  double trained = 0;
  double statistics = 0;
};
ResNetSize resnet_size(const ModelConfig& config);

}  // namespace shardbook
