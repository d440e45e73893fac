#pragma once

// A mixture of experts in the place of a transformer's MLP.
//
//   LayerFactory layers = ...;                        // of one device, or chapter 07's
//   auto record = std::make_shared<MoeRecord>();
//   layers.mlp = moe_mlp(options, {&ep_group, &tp_group}, record);
//   Gpt model(config, init, layers);
//
// Every token passes through k of E experts, so parameters grow with E and work
// does not. The experts of a layer are spread over the EP group, whose ranks hold
// DIFFERENT tokens: two all-to-alls bring tokens to experts and results back.
//
// Rajbhandari et al. 2022, "DeepSpeed-MoE"; deepspeed.moe.layer.MoE.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/13_moe/experts.h"
#include "chapters/13_moe/gate.h"
#include "chapters/common/models/llama_experts.h"
#include "chapters/common/models/models.h"

namespace shardbook::moe {

struct MoeOptions {
  GateOptions gate;
  /// Experts of each layer, the last one for all that follow (a pyramid has
  /// more in later layers); 1: an ordinary MLP. Empty: gate.num_experts.
  std::vector<int> num_experts;
  /// Each token and its experts, without capacity: nothing is dropped or padded.
  bool is_dropless = false;
  /// Masks and products with them in place of indices.
  bool is_naive = false;
  /// PR-MoE: y = y_moe w0 + mlp(x) w1, w = softmax(x Wc + bc).
  bool use_residual = false;
  /// y = y_moe + mlp(x): an expert that all tokens visit.
  bool shared_expert = false;
  bool gate_shared_expert = false;  ///< times sigmoid(x w)
  bool are_copies = false;          ///< of one expert, as DeepSpeed's begin
  /// Experts' hidden units are cut over TP; false: the rows are, and each rank
  /// of TP has the experts whole.
  bool expert_tensor_parallel = false;
  double aux_coefficient = 1e-2;  ///< of the load-balancing loss; Switch's
  double z_coefficient = 0;       ///< of the z-loss; ST-MoE: 1e-3

  /// Nothing is dropped, so shapes depend on the routing.
  bool depends_on_routing() const { return is_dropless || !gate.drop_tokens; }
};

/// The groups of a layer's ranks; null or of one rank where there are none.
struct MoeGroups {
  ProcessGroup* ep = nullptr;
  ProcessGroup* tp = nullptr;
  /// Places between two EP neighbours in their data-parallel group.
  int ep_stride = 1;
};

/// Data exchanged with a model's layers while it trains.
struct MoeRecord {
  /// The number that the main loss' backward starts from. Auxiliary losses
  /// start from it too, so they count as much.
  double loss_scale = 1;
  /// The tokens of each sample that the layers see; default: all. Draws are
  /// keyed by their places in the whole sample.
  SamplePart part;

  struct Load {
    std::vector<std::int64_t> exp_counts;  ///< choices, before dropping
    std::int64_t dropped = 0;
    /// Dropless: rows that this rank sent to other ranks in forwards, and in
    /// those that recomputation ran again.
    std::int64_t sent_rows = 0, sent_rows_again = 0;
    std::int64_t forwards = 0, forwards_again = 0;
    /// Sum over forwards of the slots of one expert.
    std::int64_t slots = 0;
    std::int64_t most_slots = 0;  ///< of an expert in one forward

    /// Adds choices of each expert.
    void add(const std::vector<std::int64_t>& counts);
  };
  /// The load of this rank's tokens, by the layer's name.
  std::map<std::string, Load> loads;
};

class MoeLayer : public ModuleOf<MoeLayer> {
 public:
  /// `mlp_beside` is the residual MLP or the shared expert, if any. Copies of a
  /// module share its tensors, so several layers may have the same one.
  MoeLayer(const std::string& name, const ExpertsShape& shape,
           const MoeOptions& options, const InitOptions& init,
           AnyModule mlp_beside, AnyModule dropout, const MoeGroups& groups,
           std::shared_ptr<MoeRecord> record);
  /// [n, S, M] -> the same, or [n, M] where each sample is one token. The
  /// gate's losses join the graph here: their backward starts from
  /// record->loss_scale when the output's runs.
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "MoeLayer"; }
  /// The ranks that share the experts of this layer; null or one: none.
  ProcessGroup* expert_parallel_group() const { return groups_.ep; }
  ProcessGroup* tensor_parallel_group() const { return groups_.tp; }
  /// Whether tensor parallelism cuts experts, not their slots.
  bool cuts_experts() const { return options_.expert_tensor_parallel; }
  /// Shared with the other layers of the model.
  MoeRecord& record() { return *record_; }

  TopKGate gate;
  Experts experts;
  std::optional<AnyModule> mlp;                 ///< residual, or shared
  Tensor coefficient_weight, coefficient_bias;  ///< residual [M, 2], [2]
  Tensor shared_gate;                           ///< [M, 1]
  AnyModule resid_dropout;                      ///< as after an ordinary MLP

 private:
  /// Rows [S, M] through their experts.
  Tensor with_capacity(const Tensor& rows, const GateResult& gated);
  /// Choices [E] that a run on shapes draws for another EP rank.
  std::vector<std::int64_t> drawn_counts(int source, std::int64_t tokens,
                                         std::int64_t per_row) const;
  /// The largest `count` over the ranks of EP.
  std::int64_t most_of_ranks(std::int64_t count, const Tensor& rows,
                             std::int64_t per_row) const;
  Tensor attach_losses(const Tensor& y, const GateResult& gated);
  void remember(const GateResult& gated);

  std::string name_;
  MoeOptions options_;
  MoeGroups groups_;
  std::shared_ptr<MoeRecord> record_;
};

/// `LayerFactory::mlp` of a model whose MLPs are mixtures of experts. Groups
/// outlive the model.
decltype(LayerFactory::mlp) moe_mlp(const MoeOptions& options,
                                    const MoeGroups& groups,
                                    std::shared_ptr<MoeRecord> record);

/// The experts of Mixtral and Qwen3-MoE over the ranks of an EP group: gate.weight
/// whole; of experts.gate_up_proj [E, h, 2f] and experts.down_proj [E, f, h] E / ep
/// experts. Routing is the model's own (common/models/llama_experts.h): no
/// capacity, nothing is dropped. Rows travel as in the dropless layer.
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

/// Throws Error unless `tp` ranks can share the slots of an expert.
void check_slots(std::int64_t slots, int tp);
/// Experts of layer `layer`.
std::int64_t experts_of_layer(const MoeOptions& options, std::int64_t layer);
/// Experts of the layer that has the most.
int most_experts(const MoeOptions& options);
/// Whether the options ask for a residual MLP or a shared expert.
bool has_mlp_beside(const MoeOptions& options);
/// Whether `name` is a parameter that the ranks of an EP group have parts of.
bool is_expert(const std::string& name);
/// The part of parameter `name` that rank `ep_rank` of ep holds; with
/// tensor-parallel experts also its part of t. Of other parameters: all.
Shards expert_layout(const std::string& name, int ep_rank, int ep, int tp_rank,
                     int t);

}  // namespace shardbook::moe
