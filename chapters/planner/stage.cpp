#include "chapters/planner/stage.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/13_moe/spread_experts.h"
#include "chapters/14_hybrid_3d/hybrid_layers.h"
#include "chapters/common/models/models.h"
#include "chapters/planner/llama_block.h"
#include "chapters/planner/on_shapes.h"
#include "comm/device_mesh.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/optim.h"
#include "core/weight_gradients.h"
#include "sim/virtual_clock.h"

namespace shardbook::planner {
namespace {

LayerFactory factory_of(const Place& at, const ModelConfig& config) {
  LayerFactory layers = at.layout.cuts_tokens
                            ? sequence_parallel::megatron_layers(config, at.tp)
                            : tensor_parallel::layers(config, at.tp);
  if (at.sizes.has_own_experts() && at.ep.size() > 1) {
    layers.mlp = moe::spread_experts(at.ep, std::make_shared<moe::MoeRecord>());
  }
  layers.attention = [at, whole = layers.attention](
                         const Tensor& qkv, const AttentionOptions& options) {
    const auto run = [at, whole, options](const Tensors& in) {
      if (at.cp.size() == 1) return Tensors{whole(in[0], options)};
      AttentionOptions own;
      own.heads = options.heads;
      own.kv_heads = options.kv_heads > 0 ? options.kv_heads : options.heads;
      own.dropout = options.dropout;
      const Tensors parts =
          sequence_parallel::split_qkv(in[0], own.heads / own.kv_heads);
      return Tensors{attend(at, parts[0], parts[1], parts[2], own)};
    };
    return at.layout.recompute == Recompute::kAttention
               ? autograd::recompute(run, {qkv})[0]
               : run({qkv})[0];
  };
  return layers;
}

InitOptions init_of(const Place& at) {
  InitOptions init;
  init.dtype = at.layout.dtype;
  return init;
}

class Stage {
 public:
  Stage(const Place& at, const StageParts& parts) : at_(at) {
    ModelConfig config =
        decoder_of(at.sizes, std::max<std::int64_t>(parts.blocks, 1));
    config.n_positions = at.tokens();
    config.dropout = at.layout.dropout;
    layers_ = factory_of(at, config);
    const InitOptions init = init_of(at);
    hybrid::HybridOptions setup;
    setup.tp = at.layout.tp;
    setup.sequence_parallel = at.layout.cuts_tokens;
    const hybrid::OverTp kinds = hybrid::over_tp(config, setup);
    const std::string table = decoder_names(config).table + ".weight";
    const auto keep = [&](Module& module, std::vector<ParameterSize>& sizes) {
      sizes.clear();
      for (const NamedTensor& each : module.named_parameters()) {
        parameters_.push_back(each.tensor);
        const auto elements = static_cast<double>(each.tensor.numel());
        const bool is_expert = moe::is_expert(each.name);
        if (is_expert) expert_parameters_ += elements;
        sizes.push_back({elements, is_expert, each.name == table,
                         kinds.is_whole(each.name),
                         kinds.is_partial(each.name)});
      }
    };
    sizes_.blocks = parts.blocks;
    if (parts.has_embedding) {
      embedding_ = std::make_unique<GptEmbedding>(config, init, layers_);
      keep(*embedding_, sizes_.embedding);
    }
    for (std::int64_t i = 0; i < parts.blocks; ++i) {
      if (at.sizes.is_llama) {
        llama_.emplace_back(at, i, init);
        const Tensors& own = llama_.back().parameters();
        parameters_.insert(parameters_.end(), own.begin(), own.end());
        for (const Tensor& each : llama_.back().expert_parameters()) {
          expert_parameters_ += static_cast<double>(each.numel());
        }
      } else {
        blocks_.push_back(std::make_unique<GptBlock>(
            decoder_names(config).block(i), config, init, layers_));
        blocks_.back()->recompute = at.layout.recompute == Recompute::kBlocks;
        keep(*blocks_.back(), sizes_.block);
      }
    }
    if (parts.has_head) {
      head_ = std::make_unique<GptHead>(config, init, layers_);
      keep(*head_, sizes_.head);
    }
    const MemoryScope kind(MemoryKind::kInput);
    tokens_ = Tensor::zeros({at.layout.micro_batch, at.tokens()},
                            {DType::kI64, Device()});
  }

  const Tensors& parameters() const { return parameters_; }
  const ParameterSizes& sizes() const { return sizes_; }
  /// The number of elements in experts.
  double expert_parameters() const { return expert_parameters_; }

  /// A stage without an embedding gets its input from the stage before.
  Tensor input() const {
    if (embedding_ != nullptr) return tokens_;
    const Tensor x = Tensor::zeros(shape(), {at_.layout.dtype, Device()});
    x.set_requires_grad();
    return x;
  }
  Tensor forward(const Tensor& input) {
    Tensor x = embedding_ != nullptr ? (*embedding_)(input) : input;
    for (const auto& block : blocks_) x = (*block)(x);
    for (const LlamaBlock& block : llama_) x = block(x);
    return head_ != nullptr ? layers_.loss((*head_)(x), tokens_) : x;
  }
  /// For a stage without a head, `dy` comes from the next stage.
  void backward(const Tensor& y, Tensor dy = Tensor()) const {
    const PhaseScope phase(Phase::kBackward);
    if (!dy.defined() && head_ == nullptr) dy = gradient();
    autograd::backward({y}, head_ == nullptr ? Tensors{dy} : Tensors{});
  }
  Tensor gradient() const {
    const MemoryScope kind(MemoryKind::kInput);
    return Tensor::zeros(shape(), {at_.layout.dtype, Device()});
  }

 private:
  Shape shape() const {
    const bool is_cut = at_.layout.cuts_tokens;
    return {at_.layout.micro_batch, at_.tokens() / (is_cut ? at_.tp.size() : 1),
            at_.sizes.hidden};
  }

  Place at_;
  LayerFactory layers_;
  Tensors parameters_;
  double expert_parameters_ = 0;
  ParameterSizes sizes_;
  std::unique_ptr<GptEmbedding> embedding_;
  std::vector<std::unique_ptr<GptBlock>> blocks_;
  std::vector<LlamaBlock> llama_;
  std::unique_ptr<GptHead> head_;
  Tensor tokens_;
};

double in_use(MemoryKind kind) {
  return static_cast<double>(
      RankContext::current().device.memory().current(kind));
}

double peak(MemoryKind kind) {
  return static_cast<double>(RankContext::current().device.memory().peak(kind));
}
void reset_peaks() { RankContext::current().device.reset_peak_memory(); }

/// A backward with later gradients of weights, as zero bubble runs it.
void split_backward(Stage& stage, StageRun& run) {
  const double before = in_use(MemoryKind::kActivation);
  sim::VirtualClock& clock = *sim::VirtualClock::current();
  WeightGradients later;
  {
    const Tensor y = stage.forward(stage.input());
    clock.begin_steps();
    const DeferWeightGradients scope(later);
    stage.backward(y);
    later.flush();
  }
  run.backward_input_s = clock.now_s();
  run.kept_for_weights_bytes = in_use(MemoryKind::kActivation) - before;
  clock.begin_steps();
  later.pop();
  run.backward_weight_s = clock.now_s();
}

StageRun run_rank(const Place& at, const StageParts& parts) {
  Stage stage(at, parts);
  StageRun run;
  for (const Tensor& each : stage.parameters()) {
    run.parameters += static_cast<double>(each.numel());
  }
  run.expert_parameters = stage.expert_parameters();
  run.sizes = stage.sizes();
  sim::VirtualClock& clock = *sim::VirtualClock::current();
  // The first micro-batch creates the gradients, the next adds to them
  {
    const Tensor x = stage.input(), dy = stage.gradient();
    clock.begin_steps();
    const Tensor y = stage.forward(x);
    const double forward_s = clock.now_s();
    stage.backward(y, dy);
    run.first_backward_s = clock.now_s() - forward_s;
  }
  {
    const double before = in_use(MemoryKind::kActivation);
    const double gradients = in_use(MemoryKind::kGradient);
    const double messages = in_use(MemoryKind::kCommunication);
    reset_peaks();
    const Tensor x = stage.input();
    clock.begin_steps();
    const Tensor y = stage.forward(x);
    run.forward_s = clock.now_s();
    run.kept_bytes = in_use(MemoryKind::kActivation) - before;
    run.forward_peak_bytes = peak(MemoryKind::kActivation) - before;
    clock.begin_steps();
    stage.backward(y);
    run.backward_s = clock.now_s();
    run.backward_peak_bytes = peak(MemoryKind::kActivation) - before;
    run.passing_gradient_bytes = peak(MemoryKind::kGradient) - gradients;
    run.message_bytes = peak(MemoryKind::kCommunication) - messages;
  }
  if (at.layout.splits_backward) split_backward(stage, run);
  clock.begin_steps();
  double first = 0;
  sim::DeviceClock::StepSums before;
  for (int i = 0; i < 2; ++i) {
    const Tensor y = stage.forward(stage.input());
    if (parts.has_head) y.item();  // as chapters read each loss
    stage.backward(y);
    if (i == 1) break;
    first = clock.now_s();
    before = clock.main().state().sums;
  }
  run.both_s = clock.now_s() - first;
  const sim::DeviceClock::StepSums after = clock.main().state().sums;
  run.busy_s = after.busy_s - before.busy_s;
  for (const sim::LinkBytes& each : after.links) {
    run.sent_bytes[each.link] += each.bytes;
  }
  for (const sim::LinkBytes& each : before.links) {
    run.sent_bytes[each.link] -= each.bytes;
  }

  // One kernel for all parameters, like a fused optimizer's
  const Tensor all = make_constant_parameter(
      {static_cast<std::int64_t>(run.parameters)}, 0, init_of(at));
  all.set_grad(all.empty_like());
  const auto optimizer = make_optimizer("adamw", {all}, OptimizerOptions());
  optimizer->keep_master_copies();
  clock.begin_steps();
  {
    const PhaseScope phase(Phase::kOptimizer);
    grad_norm({all});
    optimizer->step();
  }
  run.optimizer_s = clock.now_s();
  run.trust = clock.trust();
  return run;
}

/// The cluster with a faster network for messages of experts: between nodes, a
/// token has fewer copies than it visits experts.
sim::Cluster with_expert_traffic(sim::Cluster cluster,
                                 const DecoderSizes& sizes,
                                 const StageLayout& layout) {
  const int nodes = layout.ep / cluster.devices_per_node;
  if (!layout.sends_once_per_node || nodes <= 1) return cluster;
  const auto k = static_cast<double>(sizes.experts_per_token);
  const double other = 1.0 / nodes;  // chance of an expert on a given node
  const double copies = k * other, once = 1 - std::pow(1 - other, k);
  cluster.network.bytes_per_s *= copies / once;
  return cluster;
}

}  // namespace

bool DecoderSizes::has_own_experts() const {
  return model != nullptr && model->llama.num_experts > 0;
}

StageRun run_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                   const StageLayout& layout, const StageParts& parts) {
  const int parts_of_sequence =
      layout.cp * (layout.cuts_tokens ? layout.tp : 1);
  SB_CHECK(sizes.seq % parts_of_sequence == 0, "sequences of ", sizes.seq,
           " tokens do not divide by ", parts_of_sequence, " ranks");
  SB_CHECK(sizes.is_llama ||
               (sizes.experts == 0 && sizes.head_dim == 0 && sizes.window == 0),
           "experts, windows and heads of their own width belong to Llama's "
           "block");
  SB_CHECK(layout.recompute != Recompute::kEverySecondProduct ||
               (sizes.is_llama && sizes.is_gated && sizes.experts == 0),
           "every second product is computed again in Llama's gated block "
           "only");
  const bool is_own = sizes.has_own_experts();
  const std::int64_t experts =
      is_own ? sizes.model->llama.num_experts : sizes.experts;
  SB_CHECK(layout.ep == 1 || experts % layout.ep == 0, experts,
           " experts do not divide by ep ", layout.ep);
  SB_CHECK(layout.ep == 1 || is_own ||
               (layout.cp == 1 && layout.ep % layout.tp == 0 &&
                (layout.tp == 1 || layout.cuts_tokens)),
           "ep ", layout.ep, " with tp ", layout.tp, " and cp ", layout.cp,
           ": tp has to divide ep and to cut the tokens, and cp is 1");
  StageRun run;
  const int replicas =
      layout.ep == 1 || is_own ? layout.ep : layout.ep / layout.tp;
  const Topology topology =
      Topology::megatron(layout.tp, layout.cp, replicas, 1);
  // Ranks of a tensor-parallel group do the same; so do ranks that share
  // experts, since tokens are spread evenly. A ring keeps the pace of its last
  // rank, which merges most rows, and whose hop leaves the node if one does
  on_shapes(
      with_expert_traffic(cluster, sizes, layout), topology.world_size(),
      [&](int) { return (layout.cp - 1) * layout.tp; },
      [&](ProcessGroup& all) {
        DeviceMesh mesh(all, topology);
        // Where tp is among those that share the experts, all ranks do
        ProcessGroup& ep = layout.ep > 1 && !is_own ? all : mesh.group("dp");
        const Place at = {mesh.group("tp"), mesh.group("cp"), ep, sizes,
                          layout};
        const StageRun mine = run_rank(at, parts);
        if (all.is_first()) run = mine;
      });
  return run;
}

// --- Stages from runs of one and of two blocks -------------------------------

namespace {

using Field = double StageRun::*;

constexpr Field kFields[] = {&StageRun::forward_s,
                             &StageRun::backward_s,
                             &StageRun::first_backward_s,
                             &StageRun::both_s,
                             &StageRun::busy_s,
                             &StageRun::optimizer_s,
                             &StageRun::parameters,
                             &StageRun::expert_parameters,
                             &StageRun::backward_input_s,
                             &StageRun::backward_weight_s,
                             &StageRun::kept_bytes,
                             &StageRun::forward_peak_bytes,
                             &StageRun::backward_peak_bytes,
                             &StageRun::kept_for_weights_bytes};

}  // namespace

const StageRun& known_stage(const sim::Cluster& cluster, const DecoderSizes& of,
                            const StageLayout& options,
                            const StageParts& parts) {
  auto key = std::make_tuple(
      cluster.name, cluster.device.sustained, of.model, of.hidden, of.heads,
      of.seq, of.vocabulary, of.kv_heads, of.head_dim, of.window, of.experts,
      of.experts_per_token, of.mlp, of.is_llama, of.is_gated,
      of.normalizes_heads, options.tp, options.cp, options.ep,
      options.sends_once_per_node, options.cuts_tokens, options.recompute,
      options.micro_batch, options.converts_to_fp8, options.scales_by_maximum,
      options.splits_backward, options.dtype, options.dropout, parts.blocks,
      parts.has_embedding, parts.has_head);
  static std::map<decltype(key), StageRun> known;
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = run_stage(cluster, of, options, parts);
}

StageRun composed_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                        const StageLayout& layout, const StageParts& parts) {
  SB_CHECK(sizes.window == 0,
           "blocks with and without a window alternate: run the whole stage");
  if (parts.blocks < 1) return known_stage(cluster, sizes, layout, parts);
  StageParts fewer = parts;
  fewer.blocks = 1;
  StageRun run = known_stage(cluster, sizes, layout, fewer);
  if (parts.blocks == 1) return run;
  fewer.blocks = 2;
  const StageRun& two = known_stage(cluster, sizes, layout, fewer);
  const auto further = static_cast<double>(parts.blocks - 1);
  for (const Field field : kFields) {
    run.*field += further * (two.*field - run.*field);
  }
  for (const auto& [link, bytes] : two.sent_bytes) {
    run.sent_bytes[link] += further * (bytes - run.sent_bytes[link]);
  }
  run.sizes.blocks = parts.blocks;
  run.passing_gradient_bytes =
      std::max(run.passing_gradient_bytes, two.passing_gradient_bytes);
  run.message_bytes = std::max(run.message_bytes, two.message_bytes);
  run.trust = std::max(run.trust, two.trust);
  return run;
}

}  // namespace shardbook::planner
