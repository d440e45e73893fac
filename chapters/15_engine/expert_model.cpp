// A module with layers of experts: stage 0 sums, stages 1 and 2 are ZeRO, once
// for the dense parameters and once for each group of experts.

#include <fmt/format.h>

#include <map>
#include <sstream>
#include <utility>

#include "chapters/02_ddp/ddp.h"
#include "chapters/13_moe/expert_update.h"
#include "chapters/13_moe/moe_layer.h"
#include "chapters/15_engine/internal/data_parallel_model.h"
#include "comm/coalesce.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::engine::internal {
namespace {

constexpr char kTokenEmbedding[] = "transformer.wte.weight";

int size_of(const ProcessGroup* group) {
  return group == nullptr ? 1 : group->size();
}

struct Layer {
  std::string path;
  moe::MoeLayer* layer;
  /// Of each rank of the world, its place in the layer's expert-parallel group.
  std::vector<int> places;

  int ep() const { return size_of(layer->expert_parallel_group()); }
  /// Tensor-parallel ranks that have parts of an expert.
  int cuts() const {
    return layer->cuts_experts() ? size_of(layer->tensor_parallel_group()) : 1;
  }
  /// Tensor-parallel ranks have the same experts, and parts of their slots.
  bool shares_slots() const {
    return !layer->cuts_experts() &&
           size_of(layer->tensor_parallel_group()) > 1;
  }
  bool has(const std::string& parameter) const {
    return parameter.rfind(path + ".experts.", 0) == 0;
  }
  /// Layers whose experts the same ranks hold.
  std::pair<std::vector<int>, bool> key() const {
    return {places, shares_slots()};
  }
};

std::vector<Layer> layers_of(Module& module) {
  std::vector<Layer> layers;
  for (const NamedModule& each : module.named_modules()) {
    auto* layer = dynamic_cast<moe::MoeLayer*>(each.module);
    if (layer != nullptr) layers.push_back({each.name, layer, {}});
  }
  return layers;
}

/// Refuses what such models do not go with.
void check(const DeepSpeedConfig& config, const Mpu& mpu, const Layer& first) {
  const std::string& path = first.path;
  const int stage = config.zero.stage;
  SB_CHECK(stage < 3, config.label, ": /zero_optimization/stage 3 with ", path,
           ", a layer of experts: experts are not whole on any rank, and stage "
           "3 would gather them for every micro-batch; give stage 0, 1 or 2");
  const int t = size_of(first.layer->tensor_parallel_group());
  SB_CHECK(t == 1 || size_of(mpu.model) == t, "initialize: ", path,
           ", a layer of experts, has ", t,
           " tensor-parallel ranks, and the model group of mpu has ",
           size_of(mpu.model), "; give mpu the same ranks");
  const std::string key =
      config.gradient_predivide_factor != 1     ? "/gradient_predivide_factor"
      : !config.communication_data_type.empty() ? "/communication_data_type"
                                                : "";
  SB_CHECK(stage > 0 || key.empty(), config.label, ": ", key, " with ", path,
           ", a layer of experts, at stage 0: gradients are divided before "
           "they are summed, in their own dtype; leave the key out, or give "
           "/zero_optimization/stage 1 or 2");
}

class WithExperts : public DataParallelModel {
 public:
  WithExperts(Module& module, const DeepSpeedConfig& config, const Mpu& mpu,
              ProcessGroup& world)
      : DataParallelModel(module, config, mpu, world),
        layers_(layers_of(module)) {
    check(config, mpu, layers_.front());
    ddp::check_same_model("engine", module, dp_);
    make_groups();
    share_values(config.zero.stage);

    // Experts are a list of parameters for each way to spread them
    std::vector<NamedTensor> trained;
    for (const NamedTensor& each : module.named_parameters()) {
      if (each.tensor.requires_grad()) trained.push_back(each);
    }
    // Elements on several ranks of the model group count on the first one
    const auto counts = [this](const std::string& name) {
      return is_first_holder(
          [this](const std::string& name, int model_rank) {
            return part(name, 0, model_rank);
          },
          name, mpu_.model->rank());
    };
    const bool is_cut = size_of(mpu.model) > 1;
    std::vector<moe::ParameterGroup> groups = {
        {"dense", dp_, [this](const std::string& name) {
           return layer_of(name) == nullptr;
         }}};
    if (is_cut) groups[0].counts = counts;
    for (const auto& [key, replicas] : replicas_) {
      groups.push_back(
          {"experts", *replicas, [this, key = key](const std::string& name) {
             const Layer* layer = layer_of(name);
             return layer != nullptr && layer->key() == key;
           }});
      const bool shares_slots = key.second;
      if (is_cut && !shares_slots) groups.back().counts = counts;
    }
    update_ = std::make_unique<moe::ExpertUpdate>(
        trained, groups, world, zero_options(config, module),
        config.optimizer.name(), config.optimizer.params);
  }

  Tensor forward(const Tensor& inputs, bool) override {
    return module_(inputs);
  }
  void before_backward(bool reduces, double loss_scale,
                       double factor) override {
    update_->begin_backward(reduces, loss_scale);
    // Losses of gates start from the same number as the main one
    for (const Layer& each : layers_) each.layer->record().loss_scale = factor;
  }
  double update(double) override {
    const PhaseScope phase(Phase::kOptimizer);
    const NoGrad no_grad;
    update_->reduce();
    const double norm = update_->norm();
    update_->apply(norm);
    return norm;
  }

  Optimizer& optimizer() override { return update_->optimizer(); }

  std::vector<NamedTensor> full_state() override {
    std::vector<NamedTensor> all =
        gather_parts(module_.named_parameters(), layout_, world_, vocabulary());
    if (world_.rank() != 0) return {};
    for (const NamedTensor& each : module_.named_buffers()) all.push_back(each);
    return all;
  }
  TrainingState state() override {
    TrainingState state = update_->state(module_.named_buffers());
    place_parts(state, layout_, world_.rank(), vocabulary());
    return state;
  }
  Bill bill(const Options&, const ModelConfig&, std::int64_t, std::int64_t,
            std::int64_t) const override {
    SB_FAIL("engine: a module with experts has no bill; chapter 13 has one");
  }

 private:
  const Layer* layer_of(const std::string& parameter) const {
    for (const Layer& each : layers_) {
      if (each.has(parameter)) return &each;
    }
    return nullptr;
  }

  /// The part of a parameter that a rank holds, by its places.
  Shards part(const std::string& name, int place, int model_rank) const {
    const Layer* layer = layer_of(name);
    if (layer != nullptr) {
      return moe::expert_layout(name, place, layer->ep(), model_rank,
                                layer->cuts());
    }
    return mpu_.layout ? mpu_.layout(name, model_rank) : Shards();
  }

  /// Groups of ranks with the same experts: those with the same place in their
  /// expert-parallel groups.
  void make_groups() {
    std::vector<int> own;
    for (const Layer& each : layers_) {
      const ProcessGroup* group = each.layer->expert_parallel_group();
      own.push_back(group == nullptr ? 0 : group->rank());
    }
    const int model_rank = mpu_.model == nullptr ? 0 : mpu_.model->rank();
    for (const std::string& text : world_.exchange(
             fmt::format("{} {}", model_rank, fmt::join(own, " ")))) {
      std::istringstream places(text);
      places >> model_ranks_.emplace_back();
      for (Layer& each : layers_) places >> each.places.emplace_back();
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const Layer& each = layers_[i];
      std::shared_ptr<ProcessGroup>& replicas = replicas_[each.key()];
      if (replicas != nullptr) continue;
      ProcessGroup& all = each.shares_slots() ? world_ : dp_;
      replicas = all.split(own[i], all.rank(), "edp" + std::to_string(i));
      SB_CHECK(replicas->size() * each.ep() == all.size(),
               "engine: ", each.path, ": its experts are on groups of ",
               each.ep(), " ranks, which do not divide the ", all.size(),
               " ranks evenly; give the groups of expert_topology");
    }
  }

  /// Every rank begins with the values of the first one that has them. ZeRO
  /// sends what it trains.
  void share_values(int stage) {
    Tensors dense;
    std::map<std::pair<std::vector<int>, bool>, Tensors> experts;
    for (const NamedTensor& each : module_.named_parameters()) {
      if (stage > 0 && each.tensor.requires_grad()) continue;
      const Layer* layer = layer_of(each.name);
      (layer == nullptr ? dense : experts[layer->key()]).push_back(each.tensor);
    }
    broadcast_coalesced(dp_, dense, 0, "parameters");
    for (const auto& [key, tensors] : experts) {
      broadcast_coalesced(*replicas_.at(key), tensors, 0, "parameters");
    }
    broadcast_coalesced(dp_, module_.buffers(), 0, "buffers");
  }

  /// Rows of a GPT's embedding; 0 for other models.
  std::int64_t vocabulary() {
    for (const NamedTensor& each : module_.named_parameters()) {
      if (each.name != kTokenEmbedding) continue;
      return whole_shape(layout_(each.name, world_.rank()),
                         each.tensor.shape())[0];
    }
    return 0;
  }

  std::vector<Layer> layers_;
  std::vector<int> model_ranks_;  ///< of each rank of the world
  /// Ranks with the same experts, by Layer::key.
  std::map<std::pair<std::vector<int>, bool>, std::shared_ptr<ProcessGroup>>
      replicas_;
  const ParameterLayout layout_ = [this](const std::string& name, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const Layer* layer = layer_of(name);
    return part(name, layer == nullptr ? 0 : layer->places.at(r),
                model_ranks_.at(r));
  };
  std::unique_ptr<moe::ExpertUpdate> update_;
};

}  // namespace

bool has_experts(Module& module) { return !layers_of(module).empty(); }

std::unique_ptr<DataParallelModel> make_expert_model(
    Module& module, const DeepSpeedConfig& config, const Mpu& mpu,
    ProcessGroup& world) {
  return std::make_unique<WithExperts>(module, config, mpu, world);
}

}  // namespace shardbook::engine::internal
