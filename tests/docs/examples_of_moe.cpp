// The examples in the comments of the mixture-of-experts chapter's headers, as
// code that compiles.

#include <memory>

#include "chapters/13_moe/cifar.h"
#include "chapters/13_moe/expert_update.h"
#include "chapters/13_moe/moe_layer.h"

namespace shardbook::moe::examples {

// --- chapters/13_moe/moe_layer.h
void moe_layer(LayerFactory layers, const MoeOptions& options,
               ProcessGroup& ep_group, ProcessGroup& tp_group,
               const ModelConfig& config, const InitOptions& init) {
  auto record = std::make_shared<MoeRecord>();
  layers.mlp = moe_mlp(options, {&ep_group, &tp_group}, record);
  Gpt model(config, init, layers);
}

// --- chapters/13_moe/expert_update.h
void expert_update(ExpertUpdate& update, bool is_last, double loss_scale) {
  update.begin_backward(is_last, loss_scale);
  update.reduce();
  const double norm = update.norm();
  update.apply(norm);
}

// --- chapters/13_moe/cifar.h
void cifar(std::int64_t first, std::int64_t stride, std::int64_t rows) {
  CifarImages images = read_cifar10("cifar-10-batches-bin");
  Batch batch = cifar_batch(images, {first, stride}, rows);
}

}  // namespace shardbook::moe::examples
