#include "chapters/13_moe/conv_net.h"

#include <cmath>

#include "core/ops.h"

namespace shardbook::moe {
namespace {

constexpr std::int64_t kTokenWidth = 84;

/// PyTorch's initialization: uniform, scaled by the number of inputs.
Tensor uniform(const std::string& name, const Shape& shape, std::int64_t inputs,
               const InitOptions& init) {
  return make_uniform_parameter(
      name, shape, 1 / std::sqrt(static_cast<double>(inputs)), init);
}

}  // namespace

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
