#pragma once

// DeepSpeed's example: a small convolutional net on CIFAR-10 with layers of linear
// experts in the place of its third linear layer.
//
//   conv 3 -> 6, pool, conv 6 -> 16, pool, 400 -> 120 -> 84, MoE .. MoE, 84 -> 10
//
// Each image is one token of width 84. As in the example, the residual MLP `fc3`
// is made once: with `share_mlp` all layers have the same one. Experts begin as
// copies of one. With num_experts [2, 4] the layers have 50824 parameters, or
// 57964 when each has an MLP of its own.
//
// DeepSpeedExamples, training/cifar.

#include "chapters/13_moe/cifar.h"
#include "chapters/13_moe/moe_layer.h"
#include "chapters/common/run/training.h"

namespace shardbook::moe {

struct ConvNetOptions {
  std::vector<int> num_experts = {2, 4};  ///< one MoE layer for each
  MoeOptions moe;  ///< gate, residual, aux_coefficient, ...
  bool share_mlp = true;
  std::uint64_t seed = 0;
  DType dtype = DType::kF32;
};

class ConvNet : public ModuleOf<ConvNet> {
 public:
  /// `record` may be null.
  explicit ConvNet(const ConvNetOptions& options, const MoeGroups& groups = {},
                   std::shared_ptr<MoeRecord> record = nullptr);
  /// [n, 32, 32, 3] -> [n, 10].
  Tensor forward(const Tensor& images) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "ConvNet"; }

  Tensor conv1_weight, conv1_bias, conv2_weight, conv2_bias;
  Linear fc1, fc2, fc4;
  std::vector<MoeLayer> moe_layers;
};

struct ConvTraining {
  std::int64_t steps = 20;
  std::int64_t batch = 32;  ///< images per step, over all ranks
  int ep = 0;               ///< 0: all ranks
  double lr = 1e-3;         ///< of Adam
};
struct ConvResult {
  std::vector<double> losses;
  /// Loads of the experts, over all ranks.
  std::map<std::string, std::vector<std::int64_t>> loads;
  std::vector<NamedTensor> parameters;  ///< this rank's
};
/// Trains on the ranks of `world`: rank r of W has images r, r + W, ... of a batch.
/// With `groups`, a multiple of W, it routes the images in groups, as that many
/// ranks would. Collective.
ConvResult train_conv_net(const ConvNetOptions& options,
                          const ConvTraining& training,
                          const CifarImages& images, ProcessGroup& world,
                          int groups = 0);

}  // namespace shardbook::moe
