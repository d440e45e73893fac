#include "chapters/14_hybrid_3d/hybrid_layers.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/12_sequence_parallel/megatron.h"
#include "chapters/13_moe/spread_experts.h"
#include "chapters/common/sharded/loss.h"

namespace shardbook::hybrid {
namespace {

using sequence_parallel::cut_ids;
using sequence_parallel::cut_sequence;
using sequence_parallel::Layout;

/// `run` around a module, whose parameters it leaves as they are.
class Around : public ModuleOf<Around> {
 public:
  using Run = std::function<Tensor(AnyModule& inner, const Tensor& x)>;
  Around(AnyModule inner, Run run)
      : inner(std::move(inner)), run_(std::move(run)) {}
  Tensor forward(const Tensor& x) override { return run_(inner, x); }
  void members(MemberVisitor& visit) override { (*inner).members(visit); }
  std::string type_name() const override { return (*inner).type_name(); }

  AnyModule inner;

 private:
  Run run_;
};

/// Tensor-parallel layers on the tokens of a context-parallel rank.
LayerFactory on_own_tokens(const LayerFactory& inner, const ModelConfig& config,
                           const HybridOptions& setup, std::int64_t seq,
                           ProcessGroup& tp, ProcessGroup& cp) {
  LayerFactory made = inner;
  const auto sequence = setup.sequence();
  const int rank = cp.rank(), c = cp.size();
  const Layout layout = sequence.layout;
  made.embedding = [=](const std::string& name, std::int64_t rows,
                       std::int64_t width, double stddev,
                       const InitOptions& init) -> AnyModule {
    // The ids of all tokens arrive
    return {std::make_unique<Around>(
        inner.embedding(name, rows, width, stddev, init),
        [=](AnyModule& table, const Tensor& tokens) {
          return table(cut_ids(tokens, layout, rank, c));
        })};
  };
  // Positions are cut as the tokens are: over cp, then (Megatron) over tp
  made.positions = [=, &tp, whole = LayerFactory().positions](
                       AnyModule& wpe, const Tensor& tokens) {
    const Tensor own = cut_sequence(whole(wpe, tokens), 0, layout, rank, c);
    if (!setup.sequence_parallel) return own;
    return cut_sequence(own, 0, Layout::kContiguous, tp.rank(), tp.size());
  };
  // This rank's heads meet the keys of all tokens, and turn by their positions
  const LayerFactory over_cp =
      sequence_parallel::sequence_layers(sequence, seq, cp);
  made.attention = over_cp.attention;
  made.rope_table = over_cp.rope_table;
  made.logits = [inner](const Tensor& x, AnyModule& wte) {
    return inner.logits(x, wte.as<Around>().inner);
  };
  made.loss = [=, &tp, &cp, classes = config.vocab_size](
                  const Tensor& logits, const Tensor& targets) {
    const Tensor own = cut_ids(targets, layout, rank, c);
    return mean_loss_over_ranks(
        [&](Reduction reduction) {
          return tensor_parallel::vocab_parallel_cross_entropy(
              logits, own, classes, tp, reduction);
        },
        own, {&cp});
  };
  return made;
}

LayerFactory dense_layers(const ModelConfig& config, std::int64_t seq,
                          const HybridOptions& setup, ProcessGroup& tp,
                          ProcessGroup& cp) {
  if (tp.size() == 1) {
    return sequence_parallel::sequence_layers(setup.sequence(), seq, cp);
  }
  const LayerFactory over_tp =
      setup.sequence_parallel ? sequence_parallel::megatron_layers(config, tp)
                              : tensor_parallel::layers(config, tp);
  if (cp.size() == 1) return over_tp;
  return on_own_tokens(over_tp, config, setup, seq, tp, cp);
}

// --- Experts -----------------------------------------------------------------

/// The tokens of each sample that a context-parallel rank has.
moe::SamplePart part_of_samples(std::int64_t seq, Layout layout, int rank,
                                int c) {
  return {seq, sequence_parallel::positions(layout, rank, c, seq)};
}

/// `experts` with `run` around them, and dropout after it.
decltype(LayerFactory::mlp) wrapped(decltype(LayerFactory::mlp) experts,
                                    Around::Run run) {
  return [=](const std::string& name, const ModelConfig& config,
             const InitOptions& init, const LayerFactory& layers) -> AnyModule {
    ModelConfig inner = config;
    inner.dropout = 0;
    return {std::make_unique<Around>(
        experts(name, inner, init, layers),
        [run, dropout = layers.dropout(config.dropout)](
            AnyModule& own, const Tensor& x) mutable {
          return dropout(run(own, x));
        })};
  };
}

LayerFactory factory_of(const ModelConfig& config, std::int64_t seq,
                        const HybridOptions& setup, ProcessGroup& tp,
                        ProcessGroup& cp, ProcessGroup* ep,
                        std::shared_ptr<moe::MoeRecord> record) {
  LayerFactory made = dense_layers(config, seq, setup, tp, cp);
  // A Mixtral's take the tokens of this rank alone; without ep it has all
  if (setup.has_own_experts && ep != nullptr) {
    made.mlp = moe::spread_experts(*ep, std::move(record));
  }
  if (!setup.has_experts()) return made;
  if (cp.size() > 1) {
    record->part =
        part_of_samples(seq, setup.sequence().layout, cp.rank(), cp.size());
  }
  made.mlp = moe::moe_mlp(setup.moe(), {ep, &tp}, std::move(record));
  if (setup.sequence_parallel) {
    // The ranks of tp gather their tokens, route all of them alike, and keep
    // their own results
    made.mlp = wrapped(made.mlp, [&tp](AnyModule& experts, const Tensor& x) {
      constexpr tensor_parallel::Cut kTokens{1};
      const Tensor all = tensor_parallel::gather_from(x, tp, kTokens);
      return tensor_parallel::scatter_to(experts(all), tp, kTokens);
    });
  }
  return made;
}

// --- Recomputation -----------------------------------------------------------

/// The layers of a list, whose blocks run forward again before their backward.
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

/// Whole parts of which each rank of tp has a gradient of its own: norms over
/// its heads, and where tokens are cut, the routers of a Mixtral and the products
/// into latent vectors.
std::vector<BlockPart> parts_of_own_tokens(const ModelConfig& config,
                                           const HybridOptions& setup) {
  const BlockTable dense = block_table(config);
  std::vector<BlockPart> parts = dense.head_norms;
  for (const BlockPart& part : dense.latent) {
    const bool is_whole =
        part.kind == PartKind::kProduct && part.cut == Cut::kWhole;
    if (setup.sequence_parallel && is_whole) parts.push_back(part);
  }
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    if (!config.llama.has_experts_in(i)) continue;
    const BlockTable block = block_table(config, i);
    parts.insert(parts.end(), block.router.begin(), block.router.end());
    break;
  }
  return parts;
}

}  // namespace

Groups groups_of(DeviceMesh& mesh, const HybridOptions& setup) {
  const bool cuts_slots =
      setup.tp > 1 &&
      (setup.has_own_experts || (setup.has_experts() && !setup.expert_tp));
  const bool has_ep = setup.ep > 1;
  const std::string copies = has_ep ? "edp-cp" : "dp-cp";
  return {mesh.group(has_ep ? "edp-ep-cp" : "dp-cp"),
          mesh.group("tp"),
          mesh.group("cp"),
          mesh.group("pp"),
          has_ep ? &mesh.group("ep") : nullptr,
          mesh.group(copies),
          mesh.group(cuts_slots ? copies + "-tp" : copies),
          mesh.group(has_ep ? "ep-tp" : "tp")};
}

OverTp over_tp(const ModelConfig& config, const HybridOptions& setup) {
  OverTp kinds;
  const int t = setup.tp;
  kinds.is_whole = [=](const std::string& name) {
    if (t == 1) return false;
    if (!moe::is_expert(name)) {
      return tensor_parallel::layout(config, name, 0, t) ==
             tensor_parallel::layout(config, name, 1, t);
    }
    // Where tp cuts slots, its ranks are replicas with other tokens
    return setup.expert_tp && moe::expert_layout(name, 0, 1, 0, t) ==
                                  moe::expert_layout(name, 0, 1, 1, t);
  };
  kinds.is_partial =
      [is_whole = kinds.is_whole, cuts_tokens = setup.sequence_parallel,
       own = parts_of_own_tokens(config, setup)](const std::string& name) {
        // A GPT's experts and their gates see all tokens on every rank of tp
        if (!is_whole(name) || moe::is_expert(name)) return false;
        const auto is_of = [&](const BlockPart& part) {
          return name.ends_with("." + part.name + ".weight");
        };
        return (cuts_tokens && sequence_parallel::has_partial_gradient(name)) ||
               std::any_of(own.begin(), own.end(), is_of);
      };
  return kinds;
}

RankLayers rank_layers(const ModelConfig& config, std::int64_t seq,
                       const HybridOptions& setup, const Groups& groups) {
  RankLayers made;
  ProcessGroup &tp = groups.tp, &cp = groups.cp;
  made.tp_shapes = std::make_shared<ShapeGroup>(tp.rank(), tp.size(), "tp");
  made.cp_shapes = std::make_shared<ShapeGroup>(cp.rank(), cp.size(), "cp");
  if (groups.ep != nullptr) {
    made.ep_shapes = std::make_shared<ShapeGroup>(groups.ep->rank(),
                                                  groups.ep->size(), "ep");
  }
  made.record = std::make_shared<moe::MoeRecord>();
  made.padded = config;
  const auto recomputed = [&](std::shared_ptr<const LayerList> list) {
    return setup.recompute == "blocks"
               ? std::make_shared<RecomputingBlocks>(list)
               : list;
  };
  if (config.is_image()) {
    // Whole layers: replicas and stages cut none
    made.list = recomputed(layers_of(config));
    made.layout = [](const std::string&, int) { return Shards(); };
    made.is_whole = made.is_partial = [](const std::string&) { return false; };
    return made;
  }
  made.factory = factory_of(config, seq, setup, tp, cp, groups.ep, made.record);
  // For runs on shapes: nobody receives their messages
  LayerFactory on_shapes =
      factory_of(config, seq, setup, *made.tp_shapes, *made.cp_shapes,
                 made.ep_shapes.get(), std::make_shared<moe::MoeRecord>());
  if (setup.recompute == "attention") {
    made.factory = sequence_parallel::recomputing_attention(made.factory);
    on_shapes = sequence_parallel::recomputing_attention(on_shapes);
  }
  made.padded.vocab_size = padded_vocabulary(config.vocab_size, tp.size());
  made.list = recomputed(layers_of(made.padded, made.factory, on_shapes));
  const int t = setup.tp, expert_t = setup.expert_tp ? t : 1;
  made.layout = [=, grid = parts_topology(setup)](const std::string& name,
                                                  int rank) {
    const int tp_rank = grid.coordinate(rank, "tp");
    if (!moe::is_expert(name)) {
      return tensor_parallel::layout(config, name, tp_rank, t);
    }
    return moe::expert_layout(name, grid.coordinate(rank, "ep"), setup.ep,
                              tp_rank, expert_t);
  };
  static_cast<OverTp&>(made) = over_tp(config, setup);
  return made;
}

LayerFactory reference_layers(const HybridOptions& setup,
                              std::shared_ptr<moe::MoeRecord> record) {
  LayerFactory made;
  made.mlp = moe::moe_mlp(setup.moe(), {}, record);
  if (setup.cp == 1) return made;
  const Layout layout = setup.sequence().layout;
  made.mlp = wrapped(made.mlp, [layout, c = setup.cp, record](
                                   AnyModule& experts, const Tensor& x) {
    Tensors parts;
    for (int rank = 0; rank < c; ++rank) {
      record->part = part_of_samples(x.size(1), layout, rank, c);
      parts.push_back(experts(cut_sequence(x, 1, layout, rank, c)));
    }
    return join_sequence(parts, 1, layout);
  });
  return made;
}

}  // namespace shardbook::hybrid
