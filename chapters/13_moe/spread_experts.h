#pragma once

// The experts of Mixtral and Qwen3-MoE over the ranks of an EP group.
//
// Routing is the model's own (common/models/llama_experts.h): no capacity, nothing
// is dropped. A rank chooses experts for its own tokens; their rows travel to the
// ranks that have these experts, and back, as in the dropless layer of this
// chapter.

#include <memory>
#include <string>

#include "chapters/13_moe/moe_layer.h"
#include "chapters/common/models/llama_experts.h"

namespace shardbook::moe {

/// gate.weight whole; of experts.gate_up_proj [E, h, 2f] and experts.down_proj
/// [E, f, h] E / ep experts.
class SpreadExperts : public ModuleOf<SpreadExperts, LlamaExperts> {
 public:
  /// Throws Error unless ep divides the experts.
  SpreadExperts(const std::string& name, const ModelConfig& config,
                const InitOptions& init, ProcessGroup& ep,
                std::shared_ptr<MoeRecord> record);
  std::string type_name() const override { return "SpreadExperts"; }

 protected:
  Tensor through_experts(const Tensor& rows, const Choices& choices) override;

 private:
  std::string name_;
  ProcessGroup* ep_;
  std::shared_ptr<MoeRecord> record_;
};

/// `LayerFactory::mlp` of a model whose config has experts; blocks without them
/// have the MLP of `layers`. The group outlives the model.
decltype(LayerFactory::mlp) spread_experts(ProcessGroup& ep,
                                           std::shared_ptr<MoeRecord> record);

}  // namespace shardbook::moe
