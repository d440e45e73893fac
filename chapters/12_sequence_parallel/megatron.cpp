#include "chapters/12_sequence_parallel/megatron.h"

#include <memory>
#include <utility>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/12_sequence_parallel/gpt_layers.h"
#include "core/autograd.h"

namespace shardbook::sequence_parallel {
namespace {

using tensor_parallel::VocabParallelEmbedding;

// Tensors are [n, s, ..]: tokens lie along dim 1
constexpr tensor_parallel::Cut kTokens{1};

// A parameter's first gradient becomes its own; a later one is added to that.
MemoryKind gradient_kind(const Tensor& parameter) {
  return parameter.grad().defined() ? MemoryKind::kActivation
                                    : MemoryKind::kGradient;
}

Tensor as_rows(const Tensor& x) { return reshape(x, {-1, x.size(-1)}); }

class GatheringLinear
    : public ModuleOf<GatheringLinear, tensor_parallel::ColumnParallelLinear> {
 public:
  using ModuleOf::ModuleOf;
  Tensor forward(const Tensor& x) override {
    return gathered_linear(x, weight, bias, *tp_);
  }
};

class ScatteringLinear
    : public ModuleOf<ScatteringLinear, tensor_parallel::RowParallelLinear> {
 public:
  using ModuleOf::ModuleOf;
  Tensor forward(const Tensor& x) override {
    // The bias is added to own tokens, once
    const Tensor sum = reduce_scatter_to(linear(x, weight), *tp_, kTokens);
    return bias.defined() ? add(sum, bias) : sum;
  }
};

class ScatteringEmbedding
    : public ModuleOf<ScatteringEmbedding, VocabParallelEmbedding> {
 public:
  using ModuleOf::ModuleOf;
  Tensor forward(const Tensor& ids) override {
    return reduce_scatter_to(embedding_part(weight, ids, first_row()), *tp_,
                             kTokens);
  }
};

}  // namespace

Tensor gathered_linear(const Tensor& x, const Tensor& weight,
                       const Tensor& bias, ProcessGroup& tp) {
  const auto forward = [&tp](const Tensors& in) {
    const Tensor all = tensor_parallel::all_gather(in[0], tp, kTokens, "X");
    return Tensors{linear(all, in[1], in.size() > 2 ? in[2] : Tensor())};
  };
  const bool of_x = x.requires_grad();
  const auto backward = [&tp, of_x, x = x.detach(), weight,
                         bias](const Tensors& grads) {
    const Tensor dy = as_rows(grads[0]);
    const std::int64_t n = x.size(0), own = x.size(1), t = tp.size();
    const std::int64_t in = x.size(2);

    const bool of_weight = weight.requires_grad();

    // Gather the input again, behind the product for its gradient
    Tensor parts, all_dx;
    Work gather;
    if (of_weight) {
      parts = Tensor::empty({t, n, own, in}, x.options());
      gather = tp.all_gather(parts, x, "X for dW");
    }
    if (of_x) all_dx = matmul(dy, weight, false, /*trans_b=*/true);
    gather.wait();
    Tensor all;
    if (of_weight) all = reshape(transpose(parts, 0, 1), {n * t * own, in});
    parts = Tensor();

    // Scatter that gradient's sum, behind the product for the weight's
    Tensor dx, leaving, dweight, dbias;
    Work scatter;
    if (of_x) {
      leaving = transpose(reshape(all_dx, {n, t, own, in}), 0, 1);
      all_dx = Tensor();
      dx = x.empty_like();
      scatter = tp.reduce_scatter(dx, leaving, ReduceOp::kSum, "dX");
    }
    if (of_weight) {
      const MemoryScope kind(gradient_kind(weight));
      dweight = matmul(all, dy, /*trans_a=*/true);
    }
    if (bias.defined() && bias.requires_grad()) {
      const MemoryScope kind(gradient_kind(bias));
      dbias = sum(dy, 0);
    }
    scatter.wait();
    if (!bias.defined()) return Tensors{dx, dweight};
    return Tensors{dx, dweight, dbias};
  };
  if (tp.size() == 1) return linear(x, weight, bias);
  Tensors inputs = {x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return autograd::custom_function("gathered_linear", inputs, forward,
                                   backward)[0];
}

LayerFactory megatron_layers(const ModelConfig& config, ProcessGroup& tp,
                             const MegatronOptions& setup) {
  LayerFactory made = tensor_parallel::layers(config, tp);
  if (setup.recompute_attention) made = recomputing_attention(made);
  if (tp.size() == 1) return made;
  made.linear = [&tp](const std::string& name, const BlockPart& part,
                      const InitOptions& init) -> AnyModule {
    // Of own tokens
    if (part.cut == Cut::kWhole) return LayerFactory().linear(name, part, init);
    const tensor_parallel::LinearShape shape = tensor_parallel::shape_of(part);
    if (tensor_parallel::takes_rows(name, part)) {
      return {std::make_unique<ScatteringLinear>(name, shape, init, tp)};
    }
    return {std::make_unique<GatheringLinear>(name, shape, init, tp)};
  };
  made.for_heads = [&tp](const Tensor& x) {
    return gather_to_parallel(x, tp, kTokens);
  };
  made.embedding = [&tp](const std::string& name, std::int64_t rows,
                         std::int64_t width, double stddev,
                         const InitOptions& init) -> AnyModule {
    return {std::make_unique<ScatteringEmbedding>(name, rows, width, stddev,
                                                  init, tp)};
  };
  // Add positions after the reduce_scatter, for own tokens only
  made.positions = [&tp, whole = made.positions](AnyModule& wpe,
                                                 const Tensor& tokens) {
    return cut_sequence(whole(wpe, tokens), 0, Layout::kContiguous, tp.rank(),
                        tp.size());
  };
  made.dropout = [&tp](double p) {
    return cut_dropout(p, Layout::kContiguous, tp.rank(), tp.size());
  };
  // All tokens meet this rank's part of the vocabulary
  made.logits = [&tp](const Tensor& x, AnyModule& wte) {
    const Tensor all = gather_to_parallel(x, tp, kTokens);
    const Tensor& table = wte.as<VocabParallelEmbedding>().weight;
    return reshape(matmul(as_rows(all), table, false, /*trans_b=*/true),
                   {all.size(0), all.size(1), table.size(0)});
  };
  return made;
}

bool has_partial_gradient(const std::string& name) {
  for (const char* end :
       {"c_proj.bias", "wpe.weight", "layernorm.weight", "model.norm.weight",
        "o_proj.bias", "down_proj.bias"}) {
    if (name.ends_with(end)) return true;
  }
  return name.find(".ln_") != std::string::npos;
}

}  // namespace shardbook::sequence_parallel
