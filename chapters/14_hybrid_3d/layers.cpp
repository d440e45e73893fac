#include "chapters/14_hybrid_3d/layers.h"

#include <utility>

#include "chapters/07_tensor_parallel/layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/common/sharded/loss.h"
#include "core/autograd.h"

namespace shardbook::hybrid {
namespace {

using sequence_parallel::cut_sequence;
using sequence_parallel::Layout;

/// An embedding that takes the ids of all tokens, and looks up those of this
/// rank.
class EmbeddingOfOwnTokens : public ModuleOf<EmbeddingOfOwnTokens> {
 public:
  EmbeddingOfOwnTokens(AnyModule inner, Layout layout, int rank, int c)
      : inner(std::move(inner)), layout_(layout), rank_(rank), c_(c) {}
  Tensor forward(const Tensor& tokens) override {
    Tensor own;
    {
      const MemoryScope kind(MemoryKind::kInput);
      own = cut_sequence(tokens, 1, layout_, rank_, c_);
    }
    return inner(own);
  }
  void members(MemberVisitor& visit) override { (*inner).members(visit); }
  std::string type_name() const override { return (*inner).type_name(); }

  AnyModule inner;

 private:
  Layout layout_;
  int rank_, c_;
};

/// Tensor-parallel layers on the tokens of a context-parallel rank.
LayerFactory on_own_tokens(const LayerFactory& inner, const ModelConfig& config,
                           const HybridOptions& how, std::int64_t seq,
                           ProcessGroup& tp, ProcessGroup& cp) {
  LayerFactory made = inner;
  const auto sequence = how.sequence();
  const int rank = cp.rank(), c = cp.size();
  const Layout layout = sequence.layout;
  made.embedding = [=](const std::string& name, std::int64_t rows,
                       std::int64_t width, double stddev,
                       const InitOptions& init) -> AnyModule {
    return {std::make_unique<EmbeddingOfOwnTokens>(
        inner.embedding(name, rows, width, stddev, init), layout, rank, c)};
  };
  // Positions are cut as the tokens are: over cp, then (Megatron) over tp
  made.positions = [=, &tp, whole = LayerFactory().positions](
                       AnyModule& wpe, const Tensor& tokens) {
    const Tensor own = cut_sequence(whole(wpe, tokens), 0, layout, rank, c);
    if (!how.sequence_parallel) return own;
    return cut_sequence(own, 0, Layout::kContiguous, tp.rank(), tp.size());
  };
  // This rank's heads meet the keys of all tokens
  made.attention =
      [t = tp.size(),
       over_cp =
           sequence_parallel::sequence_layers(sequence, seq, cp).attention](
          const Tensor& qkv, AttentionOptions options) {
        options.heads /= t;
        return over_cp(qkv, options);
      };
  made.logits = [inner](const Tensor& x, AnyModule& wte) {
    return inner.logits(x, wte.as<EmbeddingOfOwnTokens>().inner);
  };
  made.loss = [=, &tp, &cp, classes = config.vocab_size](
                  const Tensor& logits, const Tensor& targets) {
    Tensor own;
    {
      const MemoryScope kind(MemoryKind::kInput);
      own = cut_sequence(targets, 1, layout, rank, c);
    }
    return mean_loss_over_ranks(
        [&](Reduction reduction) {
          return tensor_parallel::vocab_parallel_cross_entropy(
              logits, own, classes, tp, reduction);
        },
        own, {&cp});
  };
  return made;
}

LayerFactory factory_of(const Options& options, const ModelConfig& config,
                        const HybridOptions& how, ProcessGroup& tp,
                        ProcessGroup& cp) {
  if (tp.size() == 1) {
    return sequence_parallel::sequence_layers(how.sequence(), options.seq, cp);
  }
  const LayerFactory over_tp =
      how.sequence_parallel ? sequence_parallel::megatron_layers(config, tp)
                            : tensor_parallel::layers(config, tp);
  if (cp.size() == 1) return over_tp;
  return on_own_tokens(over_tp, config, how, options.seq, tp, cp);
}

/// Attention that keeps its input, and runs forward again before its backward.
LayerFactory recomputing_attention(LayerFactory layers) {
  layers.attention = [whole = layers.attention](
                         const Tensor& qkv, const AttentionOptions& options) {
    return autograd::recompute(
        [=](const Tensors& in) { return Tensors{whole(in[0], options)}; },
        {qkv})[0];
  };
  return layers;
}

/// The layers of a list, whose blocks do the same.
class RecomputingBlocks : public LayerList {
 public:
  explicit RecomputingBlocks(std::shared_ptr<const LayerList> layers)
      : RecomputingBlocks(layers, *layers) {
    on_shapes_.reset(new RecomputingBlocks(layers, layers->on_shapes()));
  }
  int size() const override { return layers_.size(); }
  std::string name(int layer) const override { return layers_.name(layer); }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    auto made = layers_.make(layer, init);
    set_recompute(*made, true);
    return made;
  }
  const LayerList& on_shapes() const override {
    return on_shapes_ ? *on_shapes_ : *this;
  }

 private:
  RecomputingBlocks(std::shared_ptr<const LayerList> owner,
                    const LayerList& layers)
      : owner_(std::move(owner)), layers_(layers) {}

  std::shared_ptr<const LayerList> owner_;
  const LayerList& layers_;
  std::unique_ptr<RecomputingBlocks> on_shapes_;
};

}  // namespace

RankLayers rank_layers(const Options& options, const HybridOptions& how,
                       ProcessGroup& tp, ProcessGroup& cp) {
  RankLayers made;
  const ModelConfig config = model_config(options);
  made.tp_shapes = std::make_shared<ShapeGroup>(tp.rank(), tp.size(), "tp");
  made.cp_shapes = std::make_shared<ShapeGroup>(cp.rank(), cp.size(), "cp");
  made.factory = factory_of(options, config, how, tp, cp);
  made.on_shapes =
      factory_of(options, config, how, *made.tp_shapes, *made.cp_shapes);
  if (how.recompute == "attention") {
    made.factory = recomputing_attention(made.factory);
    made.on_shapes = recomputing_attention(made.on_shapes);
  }
  made.padded = config;
  made.padded.vocab_size = padded_vocabulary(config.vocab_size, tp.size());
  made.list = layers_of(made.padded, made.factory, made.on_shapes);
  if (how.recompute == "blocks") {
    made.list = std::make_shared<RecomputingBlocks>(made.list);
  }
  made.layout = [t = tp.size()](const std::string& name, int rank) {
    return tensor_parallel::layout(name, rank, t);
  };
  return made;
}

}  // namespace shardbook::hybrid
