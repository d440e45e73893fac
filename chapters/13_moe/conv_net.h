#pragma once

// DeepSpeed's example: a small convolutional net on CIFAR-10 with layers of linear
// experts in the place of its third linear layer.
//
//   conv 3 -> 6, pool, conv 6 -> 16, pool, 400 -> 120 -> 84, MoE .. MoE, 84 -> 10
//
// Each image is one token of width 84. As in the example, the residual MLP `fc3`
// is made once: with `share_mlp` all layers have the same one. Experts begin as
// copies of one. With num_experts [2, 4] the layers have 50824 parameters, or
// 57964 when each has an MLP of its own. Without layers of experts, the last
// layer is called fc3, and fc4 with them.
//
// DeepSpeedExamples, training/cifar.

#include "chapters/13_moe/cifar.h"
#include "chapters/13_moe/moe_layer.h"

namespace shardbook::moe {

struct ConvNetOptions {
  /// One MoE layer for each; empty: none.
  std::vector<int> num_experts = {2, 4};
  MoeOptions moe = {};  ///< gate, residual, aux_coefficient, ...
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
  /// "fc4", or "fc3" without experts.
  std::string last_name() const { return moe_layers.empty() ? "fc3" : "fc4"; }

  Tensor conv1_weight, conv1_bias, conv2_weight, conv2_bias;
  Linear fc1, fc2, last;
  std::vector<MoeLayer> moe_layers;
};

}  // namespace shardbook::moe
