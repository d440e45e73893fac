#include "chapters/planner/llama_block.h"

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/12_sequence_parallel/ring_attention.h"
#include "chapters/13_moe/dispatch.h"
#include "chapters/13_moe/gate.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/layers.h"
#include "core/rope.h"

namespace shardbook::planner {
namespace {

constexpr tensor_parallel::Cut kTokens{1};
constexpr double kInitStddev = 0.02, kEps = 1e-5, kTheta = 10'000;

/// The operation counts, and nobody needs its result.
void counted(const Tensor&) {}

/// Reads 16 bits and writes 8 bits twice, once transposed: a copy's traffic.
void convert(const Place& at, const Tensor& x) {
  if (at.layout.scales_by_maximum) counted(sum(x));  // a maximum reads as much
  counted(scale(x, 1));
}

/// x in FP8.
Tensor converted(const Place& at, const Tensor& x) {
  if (at.layout.converts_to_fp8) {
    const NoGrad no_grad;
    convert(at, x);
  }
  return x;
}

/// Returns y; its gradient arrives in FP8.
Tensor converting_gradient(const Place& at, const Tensor& y) {
  if (!at.layout.converts_to_fp8) return y;
  return autograd::custom_function(
      "fp8", {y}, [](const Tensors& in) { return Tensors{in[0].detach()}; },
      [at](const Tensors& grads) {
        convert(at, grads[0]);
        return grads;
      })[0];
}

/// x W, with columns of W on each rank; gathers tokens where they are cut.
Tensor by_columns(const Place& at, const Tensor& x, const Tensor& weight) {
  const Tensor in = converted(at, x);
  const Tensor y =
      at.layout.cuts_tokens && at.tp.size() > 1
          ? sequence_parallel::gathered_linear(in, weight, Tensor(), at.tp)
          : linear(in, weight, Tensor(),
                   tensor_parallel::sum_input_gradients(at.tp));
  return converting_gradient(at, y);
}

/// x W, with rows of W on each rank; sums over the ranks.
Tensor by_rows(const Place& at, const Tensor& x, const Tensor& weight) {
  const Tensor part = linear(converted(at, x), weight);
  if (at.tp.size() == 1) return converting_gradient(at, part);
  return converting_gradient(
      at, at.layout.cuts_tokens
              ? tensor_parallel::reduce_scatter_to(part, at.tp, kTokens)
              : tensor_parallel::reduce_from(part, at.tp));
}

/// `numel` elements from `begin` on, in memory order.
Tensor piece(const Tensor& flat, std::int64_t begin, const Shape& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  return reshape(slice(flat, 0, begin, begin + numel), shape);
}

/// Queries, keys and values from their projection. Only shapes count here, so
/// each part is a run of the array's elements, and their gradients lie side by
/// side. Where heads are normalised, the norm's backward reads two arrays and
/// writes one.
Tensors rotated_parts(const Place& at, const Tensor& qkv, const Tensor& table) {
  const std::int64_t n = qkv.size(0), s = qkv.size(1), d = table.size(1);
  const Shape of_q = {n, s, at.sizes.heads * d},
              of_k = {n, s, at.sizes.key_heads() * d};
  const std::int64_t keys = n * s * of_q[2], values = keys + n * s * of_k[2];
  const bool normalizes = at.sizes.normalizes_heads;
  const auto forward = [=](const Tensors& in) {
    const Tensor flat = reshape(in[0], {-1});
    if (normalizes) counted(scale(slice(flat, 0, 0, values), 1));
    return Tensors{piece(flat, 0, of_q), piece(flat, keys, of_k),
                   piece(flat, values, of_k)};
  };
  const auto backward = [=, like = qkv.detach()](const Tensors&) {
    const Tensor all = like.empty_like();
    if (normalizes) {
      const Tensor turned = slice(reshape(all, {-1}), 0, 0, values);
      counted(add(turned, turned));
    }
    return Tensors{all};
  };
  const Tensor turned =
      rope(qkv, table, at.sizes.heads + at.sizes.key_heads(), d);
  return autograd::custom_function("heads", {turned}, forward, backward);
}

AttentionOptions own_heads(const Place& at) {
  AttentionOptions options;
  options.heads = at.sizes.heads / at.tp.size();
  options.kv_heads = at.sizes.key_heads() / at.tp.size();
  options.dropout = at.layout.dropout;
  return options;
}

/// Attention of this rank's heads, over the tokens of all ranks of cp.
Tensor attend(const Place& at, const Tensor& q, const Tensor& k,
              const Tensor& v) {
  if (at.cp.size() == 1) return attention(q, k, v, own_heads(at));
  sequence_parallel::RingOptions ring;
  ring.attention = own_heads(at);
  ring.layout = sequence_parallel::Layout::kZigzag;
  return sequence_parallel::ring_attention(q, k, v, ring, at.cp);
}

/// Causal attention to the last `window` tokens at most. It has as many pairs
/// as full causal attention within parts of twice that length.
Tensor attend_in_window(const Place& at, const Tensors& qkv,
                        std::int64_t window) {
  const std::int64_t n = qkv[0].size(0), s = qkv[0].size(1);
  const std::int64_t part = 2 * window;
  if (part >= s || s % part != 0) {
    return attend(at, qkv[0], qkv[1], qkv[2]);
  }
  const auto parts_of = [&](const Tensor& x) {
    return reshape(x, {n * s / part, part, x.size(2)});
  };
  return reshape(
      attend(at, parts_of(qkv[0]), parts_of(qkv[1]), parts_of(qkv[2])),
      qkv[0].shape());
}

/// Slots for all choices, when tokens are spread evenly.
moe::GateOptions even_gate(const Place& at) {
  moe::GateOptions options;
  options.num_experts = at.sizes.experts;
  options.k = at.sizes.experts_per_token;
  options.min_capacity = 1;
  return options;
}

/// Gated experts of the chapter on experts. The router spreads tokens evenly:
/// every expert has the same number of slots.
class ExpertMlp : public ModuleOf<ExpertMlp> {
 public:
  ExpertMlp(const Place& at, const InitOptions& init)
      : at_(at), gate_("gate", at.sizes.hidden, even_gate(at), init) {
    const std::int64_t local = at.sizes.experts / at.ep.size(),
                       h = at.sizes.hidden, width = at.sizes.mlp_width();
    up_ = make_parameter("up", {local, h, 2 * width}, kInitStddev, init);
    down_ = make_parameter("down", {local, width, h}, kInitStddev, init);
  }
  void members(MemberVisitor& visit) override {
    visit.parameter("gate", gate_.weight);
    visit.parameter("experts.up", up_);
    visit.parameter("experts.down", down_);
  }
  /// [n, s, h] -> [n, s, h]; of this rank's own tokens where tp cuts them.
  Tensor forward(const Tensor& x) override {
    const Tensor rows = reshape(x, {-1, x.size(-1)});
    moe::GateCall call;
    call.name = "gate";
    call.per_row = x.size(-2);
    const moe::GateResult gated_by = gate_.route(rows, call);
    const Tensor there =
        moe::to_experts(moe::dispatch(rows, gated_by.routing), &at_.ep);
    const Tensor up =
        converting_gradient(at_, matmul(converted(at_, there), up_));
    const Tensor y =
        converting_gradient(at_, matmul(converted(at_, swiglu(up)), down_));
    const Tensor back = moe::from_experts(y, &at_.ep, at_.sizes.experts);
    return reshape(moe::combine(back, gated_by.routing, gated_by.weights),
                   x.shape());
  }

 private:
  Place at_;
  moe::TopKGate gate_;
  Tensor up_, down_;  ///< [E / ep, h, 2 f], [E / ep, f, h]
};

class LlamaBlock : public ModuleOf<LlamaBlock> {
 public:
  LlamaBlock(const Place& at, std::int64_t index, const InitOptions& init)
      : at_(at),
        has_window_(at.sizes.window > 0 && index % 2 == 0),
        recomputes_(at.layout.recompute == Recompute::kBlocks ||
                    (at.layout.recompute == Recompute::kEverySecondBlock &&
                     index % 2 == 0)) {
    const DecoderSizes& of = at.sizes;
    const std::int64_t h = of.hidden, t = at.tp.size(), d = of.head_width();
    const auto weight = [&](const std::string& name, std::int64_t in,
                            std::int64_t out) {
      return make_parameter(name, {in, out}, kInitStddev, init);
    };
    qkv_ = weight("qkv", h, (of.heads + 2 * of.key_heads()) * d / t);
    out_ = weight("out", of.heads * d / t, h);
    if (of.experts > 0) {
      experts_.emplace(at, init);
    } else {
      up_ = weight("up", h, (of.is_gated ? 2 : 1) * of.mlp_width() / t);
      down_ = weight("down", of.mlp_width() / t, h);
    }
    gamma_1_ = make_constant_parameter({h}, 1, init);
    gamma_2_ = make_constant_parameter({h}, 1, init);
    const MemoryScope kind(MemoryKind::kInput);
    std::vector<std::int64_t> positions(static_cast<std::size_t>(at.tokens()));
    std::iota(positions.begin(), positions.end(), 0);
    // A head of each rank has d / t columns: as many in all as heads / t of d
    table_ =
        rope_table(positions, d / t, kTheta, {}, {at.layout.dtype, Device()});
  }

  void members(MemberVisitor& visit) override {
    visit.parameter("qkv", qkv_);
    visit.parameter("out", out_);
    if (experts_) {
      visit.module("mlp", *experts_);
    } else {
      visit.parameter("up", up_);
      visit.parameter("down", down_);
    }
    visit.parameter("gamma_1", gamma_1_);
    visit.parameter("gamma_2", gamma_2_);
  }

  Tensor forward(const Tensor& x) override {
    if (recomputes_) {
      return autograd::recompute(
          [this](const Tensors& in) { return Tensors{compute(in[0])}; },
          {x})[0];
    }
    const Tensor y = compute(x);
    if (at_.layout.recompute != Recompute::kEverySecondProduct) return y;
    return autograd::custom_function(
        "replay", {y},
        [](const Tensors& in) { return Tensors{in[0].detach()}; },
        [this, x = x.detach()](const Tensors& grads) {
          replay(x);
          return grads;
        })[0];
  }

 private:
  /// Runs the recomputation of Recompute::kEverySecondProduct. The seven products give queries, keys, values, attention's output, gate, up
  // and down: the second, fourth and sixth are recomputed. Where tokens are cut,
  // the reduced fourth is kept, so it is not recomputed.
  void replay(const Tensor& x) {
    const NoGrad no_grad;
    const std::int64_t t = at_.tp.size(), d = at_.sizes.head_width(),
                       h = at_.sizes.hidden;
    const bool is_cut = at_.layout.cuts_tokens && t > 1;
    const auto product = [&](std::int64_t width, std::int64_t columns) {
      const Tensor in =
          Tensor::empty({x.size(0), at_.tokens(), width}, x.options());
      return linear(converted(at_, in),
                    Tensor::empty({width, columns}, x.options()));
    };
    counted(rms_norm(x, gamma_1_, kEps));
    const Tensor keys = product(h, at_.sizes.key_heads() * d / t);
    counted(
        rope(Tensor::empty({x.size(0), at_.tokens(), at_.sizes.heads * d / t},
                           x.options()),
             table_, at_.sizes.heads, d / t));
    counted(rope(keys, table_, at_.sizes.key_heads(), d / t));
    if (!is_cut) counted(product(at_.sizes.heads * d / t, h));
    counted(rms_norm(add(x, x), gamma_2_, kEps));
    counted(product(h, at_.sizes.mlp_width() / t));
    counted(swiglu(
        Tensor::empty({x.size(0), at_.tokens(), 2 * at_.sizes.mlp_width() / t},
                      x.options())));
  }

  Tensor compute(const Tensor& x) {
    const Tensor qkv = by_columns(at_, rms_norm(x, gamma_1_, kEps), qkv_);
    const auto heads = [this](const Tensors& in) {
      const Tensors parts = rotated_parts(at_, in[0], table_);
      return Tensors{has_window_
                         ? attend_in_window(at_, parts, at_.sizes.window)
                         : attend(at_, parts[0], parts[1], parts[2])};
    };
    const Tensor values = at_.layout.recompute == Recompute::kAttention
                              ? autograd::recompute(heads, {qkv})[0]
                              : heads({qkv})[0];
    const Tensor y = add(x, by_rows(at_, values, out_));
    return add(y, mlp(rms_norm(y, gamma_2_, kEps)));
  }

  Tensor mlp(const Tensor& x) {
    if (experts_) return (*experts_)(x);
    const Tensor up = by_columns(at_, x, up_);
    // Any function of single elements takes as long as GELU
    return by_rows(at_, at_.sizes.is_gated ? swiglu(up) : gelu(up), down_);
  }

  Place at_;
  bool has_window_, recomputes_;
  Tensor qkv_, out_, up_, down_, gamma_1_, gamma_2_, table_;
  std::optional<ExpertMlp> experts_;
};

}  // namespace

std::unique_ptr<Module> llama_block(const Place& at, std::int64_t index,
                                    const InitOptions& init) {
  return std::make_unique<LlamaBlock>(at, index, init);
}

}  // namespace shardbook::planner
