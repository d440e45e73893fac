#include "chapters/14_hybrid_3d/predict/stage.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/layers.h"
#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/12_sequence_parallel/ring_attention.h"
#include "chapters/common/models/models.h"
#include "comm/device_mesh.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/optim.h"
#include "core/weight_gradients.h"
#include "sim/cost_model.h"
#include "sim/virtual_clock.h"
#include "sim/world.h"

namespace shardbook::predict {
namespace {

constexpr tensor_parallel::Cut kTokens{1};
constexpr double kInitStddev = 0.02;

/// The groups of one rank, and what it needs to make a stage.
struct Place {
  ProcessGroup& tp;
  ProcessGroup& cp;
  const DecoderSizes& sizes;
  const StageLayout& layout;
  std::int64_t kv_heads() const {
    return sizes.kv_heads > 0 ? sizes.kv_heads : sizes.heads;
  }
  /// Tokens of a sequence that this rank's context-parallel place has.
  std::int64_t tokens() const { return sizes.seq / cp.size(); }
};

/// Attention of this rank's heads, over the tokens of all ranks of cp.
Tensor attend(const Place& at, const Tensor& q, const Tensor& k,
              const Tensor& v, double dropout) {
  AttentionOptions options;
  options.heads = at.sizes.heads / at.tp.size();
  options.kv_heads = at.kv_heads() / at.tp.size();
  options.dropout = dropout;
  if (at.cp.size() == 1) return attention(q, k, v, options);
  sequence_parallel::RingOptions ring;
  ring.attention = options;
  ring.layout = sequence_parallel::Layout::kZigzag;
  return sequence_parallel::ring_attention(q, k, v, ring, at.cp);
}

// --- Llama's block -----------------------------------------------------------

/// 16 bits are read, 8 are written twice, once transposed: the traffic of a copy.
void convert(const Tensor& x) { scale(x, 1); }

/// x in FP8.
Tensor converted(const Place& at, const Tensor& x) {
  if (at.layout.converts_to_fp8) {
    const NoGrad no_grad;
    convert(x);
  }
  return x;
}

/// y, whose gradient arrives in FP8.
Tensor converting_gradient(const Place& at, const Tensor& y) {
  if (!at.layout.converts_to_fp8) return y;
  return autograd::custom_function(
      "fp8", {y}, [](const Tensors& in) { return Tensors{in[0].detach()}; },
      [](const Tensors& grads) {
        convert(grads[0]);
        return grads;
      })[0];
}

/// x W, with columns of W on each rank; tokens are gathered where they are cut.
Tensor by_columns(const Place& at, const Tensor& x, const Tensor& weight) {
  const Tensor in = converted(at, x);
  const Tensor y =
      at.layout.cuts_tokens && at.tp.size() > 1
          ? sequence_parallel::gathered_linear(in, weight, Tensor(), at.tp)
          : linear(in, weight, Tensor(),
                   tensor_parallel::sum_input_gradients(at.tp));
  return converting_gradient(at, y);
}

/// x W, with rows of W on each rank: a sum over them.
Tensor by_rows(const Place& at, const Tensor& x, const Tensor& weight) {
  const Tensor part = linear(converted(at, x), weight);
  if (at.tp.size() == 1) return converting_gradient(at, part);
  return converting_gradient(
      at, at.layout.cuts_tokens
              ? tensor_parallel::reduce_scatter_to(part, at.tp, kTokens)
              : tensor_parallel::reduce_from(part, at.tp));
}

/// `numel` elements from `begin` on, as they lie.
Tensor piece(const Tensor& flat, std::int64_t begin, const Shape& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  return reshape(slice(flat, 0, begin, begin + numel), shape);
}

/// Queries, keys and values from their projection. Only shapes count here, so
/// the parts are those of the array's first, second and third elements; queries
/// and keys are read and written once, as rotary positions do.
Tensors rotated_parts(const Place& at, const Tensor& qkv) {
  const std::int64_t n = qkv.size(0), s = qkv.size(1);
  const std::int64_t d = at.sizes.hidden / at.sizes.heads / at.tp.size();
  const Shape of_q = {n, s, at.sizes.heads * d},
              of_k = {n, s, at.kv_heads() * d};
  const std::int64_t keys = n * s * of_q[2], values = keys + n * s * of_k[2];
  const auto forward = [=](const Tensors& in) {
    const Tensor flat = reshape(in[0], {-1});
    const Tensor turned = scale(slice(flat, 0, 0, values), 1);
    return Tensors{piece(turned, 0, of_q), piece(turned, keys, of_k),
                   piece(flat, values, of_k)};
  };
  const auto backward = [shape = qkv.shape()](const Tensors& grads) {
    const Tensor all = concat({reshape(grads[0], {-1}), reshape(grads[1], {-1}),
                               reshape(grads[2], {-1})},
                              0);
    return Tensors{reshape(all, shape)};
  };
  return autograd::custom_function("rotary", {qkv}, forward, backward);
}

/// silu(gate) * up in one pass, from both side by side.
Tensor gated(const Tensor& both) {
  const Shape shape = {both.size(0), both.size(1), both.size(2) / 2};
  const std::int64_t half = both.numel() / 2;
  const auto forward = [=](const Tensors& in) {
    const Tensor flat = reshape(in[0], {-1});
    return Tensors{mul(piece(flat, 0, shape), piece(flat, half, shape))};
  };
  const auto backward = [=, both = both.detach()](const Tensors& grads) {
    const Tensor flat = reshape(both, {-1});
    mul(grads[0], piece(flat, 0, shape));
    mul(grads[0], piece(flat, half, shape));
    return Tensors{Tensor::empty(both.shape(), both.options())};
  };
  return autograd::custom_function("swiglu", {both}, forward, backward)[0];
}

class LlamaBlock {
 public:
  LlamaBlock(const Place& at, const InitOptions& init) : at_(at) {
    const std::int64_t h = at.sizes.hidden, t = at.tp.size();
    const std::int64_t d = h / at.sizes.heads;
    const std::int64_t mlp = at.sizes.mlp > 0 ? at.sizes.mlp : 4 * h;
    const auto weight = [&](std::int64_t in, std::int64_t out) {
      parameters_.push_back(make_parameter(std::to_string(parameters_.size()),
                                           {in, out}, kInitStddev, init));
      return parameters_.back();
    };
    qkv_ = weight(h, (at.sizes.heads + 2 * at.kv_heads()) * d / t);
    out_ = weight(h / t, h);
    up_ = weight(h, (at.sizes.is_gated ? 2 : 1) * mlp / t);
    down_ = weight(mlp / t, h);
    for (Tensor* each : {&gamma_1_, &gamma_2_}) {
      *each = make_constant_parameter({h}, 1, init);
      parameters_.push_back(*each);
    }
    // The norms have no shift; core's has one, which takes no time
    beta_ = make_constant_parameter({h}, 0, init);
  }

  Tensor operator()(const Tensor& x) const {
    if (at_.layout.recompute != Recompute::kBlocks) return compute(x);
    return autograd::recompute(
        [this](const Tensors& in) { return Tensors{compute(in[0])}; }, {x})[0];
  }
  const Tensors& parameters() const { return parameters_; }

 private:
  Tensor compute(const Tensor& x) const {
    const Tensor qkv = by_columns(at_, layer_norm(x, gamma_1_, beta_), qkv_);
    const auto heads = [this](const Tensors& in) {
      const Tensors parts = rotated_parts(at_, in[0]);
      return Tensors{
          attend(at_, parts[0], parts[1], parts[2], at_.layout.dropout)};
    };
    const Tensor values = at_.layout.recompute == Recompute::kAttention
                              ? autograd::recompute(heads, {qkv})[0]
                              : heads({qkv})[0];
    const Tensor y = add(x, by_rows(at_, values, out_));
    const Tensor up = by_columns(at_, layer_norm(y, gamma_2_, beta_), up_);
    // Any function of single elements takes as long as GELU
    const Tensor wide = at_.sizes.is_gated ? gated(up) : gelu(up);
    return add(y, by_rows(at_, wide, down_));
  }

  Place at_;
  Tensors parameters_;
  Tensor qkv_, out_, up_, down_, gamma_1_, gamma_2_, beta_;
};

// --- A stage -----------------------------------------------------------------

ModelConfig config_of(const Place& at, const StageParts& parts) {
  ModelConfig config;
  config.n_embd = at.sizes.hidden;
  config.n_head = at.sizes.heads;
  config.n_positions = at.tokens();
  config.n_layer = std::max<std::int64_t>(parts.blocks, 1);
  config.vocab_size = at.sizes.vocabulary;
  config.dropout = at.layout.dropout;
  return config;
}

LayerFactory factory_of(const Place& at, const ModelConfig& config) {
  LayerFactory layers = at.layout.cuts_tokens
                            ? sequence_parallel::megatron_layers(config, at.tp)
                            : tensor_parallel::layers(config, at.tp);
  layers.attention = [at, whole = layers.attention](
                         const Tensor& qkv, const AttentionOptions& options) {
    const auto run = [at, whole, options](const Tensors& in) {
      if (at.cp.size() == 1) return Tensors{whole(in[0], options)};
      const Tensors parts = sequence_parallel::split_qkv(in[0]);
      return Tensors{attend(at, parts[0], parts[1], parts[2], options.dropout)};
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
    const ModelConfig config = config_of(at, parts);
    layers_ = factory_of(at, config);
    const InitOptions init = init_of(at);
    const auto keep = [this](Module& module) {
      for (const NamedTensor& each : module.named_parameters()) {
        parameters_.push_back(each.tensor);
      }
    };
    if (parts.has_embedding) {
      embedding_ = std::make_unique<GptEmbedding>(config, init, layers_);
      keep(*embedding_);
    }
    for (std::int64_t i = 0; i < parts.blocks; ++i) {
      if (at.sizes.is_llama) {
        llama_.emplace_back(at, init);
        const Tensors& own = llama_.back().parameters();
        parameters_.insert(parameters_.end(), own.begin(), own.end());
      } else {
        blocks_.push_back(std::make_unique<GptBlock>("h." + std::to_string(i),
                                                     config, init, layers_));
        blocks_.back()->recompute = at.layout.recompute == Recompute::kBlocks;
        keep(*blocks_.back());
      }
    }
    if (parts.has_head) {
      head_ = std::make_unique<GptHead>(config, init, layers_);
      keep(*head_);
    }
    const MemoryScope kind(MemoryKind::kInput);
    tokens_ = Tensor::zeros({at.layout.micro_batch, at.tokens()},
                            {DType::kI64, Device()});
  }

  const Tensors& parameters() const { return parameters_; }

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
  void backward(const Tensor& y) const {
    const PhaseScope phase(Phase::kBackward);
    if (head_ != nullptr) {
      autograd::backward({y});
      return;
    }
    autograd::backward({y}, {gradient()});
  }

 private:
  Shape shape() const {
    const bool is_cut = at_.layout.cuts_tokens;
    return {at_.layout.micro_batch, at_.tokens() / (is_cut ? at_.tp.size() : 1),
            at_.sizes.hidden};
  }
  Tensor gradient() const {
    const MemoryScope kind(MemoryKind::kInput);
    return Tensor::zeros(shape(), {at_.layout.dtype, Device()});
  }

  Place at_;
  LayerFactory layers_;
  Tensors parameters_;
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

/// A backward whose gradients of weights come later, as zero bubble runs it.
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
  sim::VirtualClock& clock = *sim::VirtualClock::current();
  // The first micro-batch creates the gradients, the next adds to them
  {
    const Tensor y = stage.forward(stage.input());
    stage.backward(y);
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

  // One kernel for all parameters, as a fused optimizer's
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

}  // namespace

StageRun run_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                   const StageLayout& layout, const StageParts& parts) {
  const int parts_of_sequence =
      layout.cp * (layout.cuts_tokens ? layout.tp : 1);
  SB_CHECK(sizes.seq % parts_of_sequence == 0, "sequences of ", sizes.seq,
           " tokens do not divide by ", parts_of_sequence, " ranks");
  StageRun run;
  sim::WorldOptions world;
  world.launch.backend = "sim";
  world.cost = std::make_shared<const sim::CostModel>(cluster);
  // Ranks of a tensor-parallel group do the same
  world.fold_class = [&](int rank) { return rank / layout.tp; };
  world.num_recorded_ranks = 0;
  sim::run_world(
      layout.tp * layout.cp,
      [&](ProcessGroup& all) {
        DeviceMesh mesh(all, Topology::megatron(layout.tp, layout.cp, 1, 1));
        const Place at = {mesh.group("tp"), mesh.group("cp"), sizes, layout};
        const StageRun mine = run_rank(at, parts);
        if (all.rank() == 0) run = mine;
      },
      world);
  return run;
}

}  // namespace shardbook::predict
