#include "chapters/planner/stage.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/14_hybrid_3d/hybrid_layers.h"
#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/stages.h"
#include "chapters/planner/llama_block.h"
#include "chapters/planner/on_shapes.h"
#include "comm/device_mesh.h"
#include "core/check.h"
#include "core/context.h"
#include "core/optim.h"
#include "core/weight_gradients.h"
#include "sim/virtual_clock.h"

namespace shardbook::planner {
namespace {

InitOptions init_of(const Place& at) {
  InitOptions init;
  init.dtype = at.layout.dtype;
  return init;
}

class Stage {
 public:
  Stage(const Place& at, const hybrid::RankLayers& kinds,
        const ModelConfig& config, const StageParts& parts)
      : at_(at), layers_(kinds.factory) {
    const InitOptions init = init_of(at);
    const std::string table = decoder_names(config).table + ".weight";
    const auto keep = [&](Module& module, std::vector<ParameterSize>& sizes,
                          const std::string& prefix = "") {
      sizes.clear();
      for (const NamedTensor& each : module.named_parameters()) {
        if (parts.is_tied && head_ != nullptr && each.name == table) continue;
        const std::string name = prefix + each.name;
        sizes.push_back({count(each.tensor, name), moe::is_expert(name),
                         each.name == table, kinds.is_whole(name),
                         kinds.is_partial(name)});
      }
    };
    ParameterSizes& sizes = numbers_.sizes;
    sizes.blocks = parts.blocks;
    sizes.dense = parts.dense;
    if (parts.has_embedding) {
      embedding_ = std::make_unique<GptEmbedding>(config, init, layers_);
      keep(*embedding_, sizes.embedding);
    }
    for (std::int64_t i = 0; i < parts.blocks; ++i) {
      if (at.sizes.is_llama) {
        blocks_.push_back(llama_block(at, i, init));
        for (const NamedTensor& each : blocks_.back()->named_parameters()) {
          count(each.tensor, each.name);
        }
        continue;
      }
      blocks_.push_back(std::make_unique<GptBlock>(
          decoder_names(config).block(i), config, init, layers_));
      set_recompute(*blocks_.back(), at.layout.recompute == Recompute::kBlocks);
      keep(*blocks_.back(), i < parts.dense ? sizes.dense_block : sizes.block,
           decoder_names(config).block(i) + ".");
    }
    if (parts.has_head) {
      head_ = std::make_unique<GptHead>(config, init, layers_);
      if (parts.is_tied) {
        const Tensor shared = embedding_->named_parameters()[0].tensor;
        head_->replace_tensors([&](const std::string& name, const Tensor& own) {
          return name == table ? shared : own;
        });
      }
      keep(*head_, sizes.head);
    }
    const MemoryScope kind(MemoryKind::kInput);
    // The layers cut them
    tokens_ = Tensor::zeros({at.layout.micro_batch, at.sizes.seq},
                            {DType::kI64, Device()});
  }

  const Tensors& parameters() const { return parameters_; }
  /// Without seconds and peaks.
  const StageRun& numbers() const { return numbers_; }
  bool has_head() const { return head_ != nullptr; }

  /// A stage without an embedding gets its input from the stage before.
  Tensor input() const { return embedding_ != nullptr ? tokens_ : received(); }
  /// `before` is called in backward before the blocks' and before the embedding's,
  /// where there is a head and an embedding.
  shardbook::StageRun forward(const Tensor& input,
                              const std::function<void()>& before = {}) {
    const auto call_before = [&](const Tensor& x, bool calls) {
      if (!calls || !before) return;
      x.add_grad_hook([before](const Tensor& dx) {
        before();
        return dx;
      });
    };
    const auto layers = [&](const Tensors& in) {
      Tensor x = embedding_ != nullptr ? (*embedding_)(in[0]) : in[0];
      call_before(x, embedding_ != nullptr);
      for (const auto& block : blocks_) x = (*block)(x);
      if (head_ == nullptr) return Tensors{x};
      call_before(x, !at_.sizes.is_llama && !blocks_.empty());
      const Tensor loss = layers_.loss((*head_)(x), tokens_);
      loss_options_ = loss.options();
      return Tensors{loss};
    };
    return run_forward(layers, {input}, {});
  }
  /// For a stage without a head, the gradient comes from the next stage.
  void backward(shardbook::StageRun run) const {
    const PhaseScope phase(Phase::kBackward);
    // Not in a list, which would keep it to the end
    Tensors gradient;
    gradient.push_back(head_ == nullptr ? received()
                                        : Tensor::full({}, 1, loss_options_));
    run_backward(std::move(run), std::move(gradient));
  }

 private:
  double count(const Tensor& parameter, const std::string& name) {
    const auto elements = static_cast<double>(parameter.numel());
    parameters_.push_back(parameter);
    numbers_.parameters += elements;
    if (moe::is_expert(name)) numbers_.expert_parameters += elements;
    return elements;
  }
  /// What one stage sends to another.
  Tensor received() const {
    const bool is_cut = at_.layout.cuts_tokens;
    return Tensor::empty(
        {at_.layout.micro_batch, at_.tokens() / (is_cut ? at_.tp.size() : 1),
         at_.sizes.hidden},
        {at_.layout.dtype, Device()});
  }

  Place at_;
  LayerFactory layers_;
  Tensors parameters_;
  StageRun numbers_;
  std::unique_ptr<GptEmbedding> embedding_;
  std::vector<std::unique_ptr<Module>> blocks_;
  std::unique_ptr<GptHead> head_;
  Tensor tokens_;
  TensorOptions loss_options_;
};

Held held_of(const std::array<std::int64_t, kNumMemoryKinds>& bytes) {
  const auto of = [&](MemoryKind kind) {
    return static_cast<double>(bytes[static_cast<std::size_t>(kind)]);
  };
  return {of(MemoryKind::kActivation), of(MemoryKind::kGradient),
          of(MemoryKind::kCommunication)};
}

/// Watches one rank's memory from now on.
class Watch {
 public:
  Watch() { restart(); }
  /// The moment with most bytes since the last call, beside those at the begin.
  Held peak() {
    const Held most = held_of(memory().at_peak_by_kind);
    restart();
    return most - before_;
  }
  Held kept() const { return held_of(memory().current_by_kind) - before_; }

 private:
  static MemoryStats memory() { return RankContext::current().device.memory(); }
  static void restart() { RankContext::current().device.reset_peak_memory(); }

  Held before_ = held_of(memory().current_by_kind);
};

sim::VirtualClock& the_clock() { return *sim::VirtualClock::current(); }

/// Seconds of work on an idle device, in all, of the device and of the host.
struct Alone {
  double s = 0, busy_s = 0, host_s = 0;
};

Alone alone(const std::function<void()>& work) {
  the_clock().begin_steps();
  work();
  sim::DeviceClock& clock = the_clock().main();
  return {the_clock().now_s(), clock.state().sums.busy_s, clock.host()};
}

constexpr double kLong = 1000;  // seconds

/// Adds the seconds behind work that the device does for a long time. A host that
/// waits for the device inside cannot run ahead.
void run_ahead(ActionTime& time, const std::function<void()>& work) {
  the_clock().begin_steps();
  the_clock().main().run(OpEvent{}, kLong);
  work();
  time.device_s = the_clock().now_s() - kLong;
  time.host_s = the_clock().main().host();
  if (time.host_s > kLong) time.device_s = time.host_s = time.s;
}

/// The first micro-batch's: the device does less than that of the next.
ActionTime first_time(const ActionTime& time, const Alone& next,
                      const Alone& first) {
  return {first.s, time.device_s - (next.busy_s - first.busy_s), first.host_s};
}

/// A micro-batch's forward and backward.
struct Pass {
  double forward_s = 0, kept_bytes = 0;
  Alone backward;
  Held forward_peak;
  BackwardPeaks peaks;
};

Pass run_pass(Stage& stage) {
  Pass pass;
  Watch watch;
  std::vector<Held> peaks;
  shardbook::StageRun run;
  pass.forward_s = alone([&] {
                     run = stage.forward(
                         stage.input(), [&] { peaks.push_back(watch.peak()); });
                   }).s;
  pass.forward_peak = watch.peak();
  run.outputs.clear();  // sent
  pass.kept_bytes = watch.kept().activations;
  pass.backward = alone([&] { stage.backward(std::move(run)); });
  peaks.push_back(watch.peak());
  // Head, blocks, embedding, of those that the stage has
  std::size_t next = 0;
  if (stage.has_head() && peaks.size() > 1) pass.peaks.head = peaks[next++];
  if (next < peaks.size()) pass.peaks.blocks = peaks[next++];
  if (next < peaks.size()) pass.peaks.embedding = peaks[next++];
  return pass;
}

/// A backward with later gradients of weights, as zero bubble runs it.
class SplitBackward {
 public:
  explicit SplitBackward(Stage& stage)
      : stage_(stage), run_(stage.forward(stage.input())) {
    run_.outputs.clear();
  }
  void input() {
    const DeferWeightGradients scope(later_);
    stage_.backward(std::move(run_));
    later_.flush();
  }
  void weights() { later_.pop(); }

 private:
  Stage& stage_;
  shardbook::StageRun run_;
  WeightGradients later_;
};

void split_backward(Stage& stage, StageRun& run) {
  Alone input, weights;
  {
    Watch watch;
    SplitBackward split(stage);
    watch.peak();
    input = alone([&] { split.input(); });
    run.backward_input.s = input.s;
    run.backward_input_peak = watch.peak();
    run.kept_for_weights_bytes = watch.kept().activations;
    weights = alone([&] { split.weights(); });
    run.backward_weight.s = weights.s;
    run.backward_weight_peak = watch.peak();
  }
  {
    SplitBackward split(stage);
    run_ahead(run.backward_input, [&] { split.input(); });
    run_ahead(run.backward_weight, [&] { split.weights(); });
  }
  // The first one creates the gradients
  for (const Tensor& each : stage.parameters()) each.clear_grad();
  SplitBackward split(stage);
  const Watch watch;
  run.first_backward_input =
      first_time(run.backward_input, input, alone([&] { split.input(); }));
  run.input_gradients = watch.kept().gradients;
  run.first_backward_weight =
      first_time(run.backward_weight, weights, alone([&] { split.weights(); }));
}

StageRun run_rank(const Place& at, const hybrid::RankLayers& layers,
                  const ModelConfig& config, const StageParts& parts) {
  Stage stage(at, layers, config, parts);
  StageRun run = stage.numbers();
  // The first micro-batch creates the gradients, the next adds to them
  const Pass first = run_pass(stage), next = run_pass(stage);
  run.first_backward_peaks = first.peaks;
  run.forward.s = next.forward_s;
  run.backward.s = next.backward.s;
  run.kept_bytes = next.kept_bytes;
  run.forward_peak = next.forward_peak;
  run.backward_peaks = next.peaks;
  if (at.layout.splits_backward) split_backward(stage, run);

  shardbook::StageRun set;
  run_ahead(run.forward, [&] { set = stage.forward(stage.input()); });
  set.outputs.clear();
  const auto add_sums = [&] {
    const sim::DeviceClock::StepSums sums = the_clock().main().state().sums;
    run.busy_s += sums.busy_s - kLong;
    for (const sim::LinkBytes& each : sums.links) {
      run.sent_bytes[each.link] += each.bytes;
    }
  };
  add_sums();
  run_ahead(run.backward, [&] { stage.backward(std::move(set)); });
  add_sums();
  run.first_backward = first_time(run.backward, next.backward, first.backward);

  // One kernel for all parameters, like a fused optimizer's
  const Tensor all = make_constant_parameter(
      {static_cast<std::int64_t>(run.parameters)}, 0, init_of(at));
  all.set_grad(all.empty_like());
  const auto optimizer = make_optimizer("adamw", {all}, OptimizerOptions());
  optimizer->keep_master_copies();
  run.optimizer_s = alone([&] {
                      const PhaseScope phase(Phase::kOptimizer);
                      grad_norm({all});
                      optimizer->step();
                    }).s;
  run.trust = the_clock().trust();
  return run;
}

/// The cluster with a faster network for messages of experts: between nodes, a
/// token has fewer copies than it visits experts.
sim::Cluster with_expert_traffic(sim::Cluster cluster,
                                 const DecoderSizes& sizes,
                                 const StageLayout& layout) {
  const int nodes = layout.ep / cluster.devices_per_node;
  if (!layout.sends_once_per_node || nodes <= 1) return cluster;
  const auto k = static_cast<double>(sizes.chosen_experts());
  const double other = 1.0 / nodes;  // chance of an expert on a given node
  const double copies = k * other, once = 1 - std::pow(1 - other, k);
  cluster.network.bytes_per_s *= copies / once;
  return cluster;
}

}  // namespace

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
  SB_CHECK(layout.recompute != Recompute::kEverySecondBlock || sizes.is_llama,
           "every second block is computed again in Llama's block only");
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
  hybrid::HybridOptions setup = layer_setup(sizes, layout);
  setup.dp = layout.ep == 1 || is_own ? layout.ep : layout.ep / layout.tp;
  ModelConfig config =
      decoder_of(sizes, std::max<std::int64_t>(parts.blocks, 1), parts.dense);
  config.dropout = layout.dropout;
  const Topology topology = hybrid::topology_of(setup);
  const auto seconds = [](const StageRun& each) {
    return each.forward.s + each.backward.s;
  };
  const auto slowest_of = [&](const FoldClass& ranks) {
    StageRun slowest;
    on_shapes(with_expert_traffic(cluster, sizes, layout),
              topology.world_size(), ranks, [&](ProcessGroup& all) {
                DeviceMesh mesh(all, topology);
                const hybrid::Groups groups = hybrid::groups_of(mesh, setup);
                // All ranks share the experts of a model that does not train
                ProcessGroup& ep = layout.ep > 1 ? all : mesh.group("dp");
                const Place at = {groups.tp, groups.cp, ep, sizes, layout};
                const StageRun mine = run_rank(
                    at, hybrid::rank_layers(config, sizes.seq, setup, groups),
                    config, parts);
                if (seconds(mine) > seconds(slowest)) slowest = mine;
              });
    return slowest;
  };
  std::vector<FoldClass> classes = ranks_that_run(cluster, topology);
  const std::int64_t choices = layout.micro_batch * sizes.seq /
                               parts_of_sequence * sizes.chosen_experts();
  if (layout.ep > 1 && choices % experts != 0) {
    // The last has fewer rows than the first, and may take longer: products are
    // the fastest where rows are a multiple of 8
    const int last = topology.world_size() - layout.tp;
    classes.push_back([last](int) { return last; });
  }
  for (const FoldClass& ranks : classes) {
    StageRun own = slowest_of(ranks);
    if (seconds(own) <= seconds(run)) continue;
    // Those before send more over the network
    if (!run.sent_bytes.empty()) own.sent_bytes = run.sent_bytes;
    run = own;
  }
  return run;
}

}  // namespace shardbook::planner
