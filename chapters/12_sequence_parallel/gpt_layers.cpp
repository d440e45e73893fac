#include "chapters/12_sequence_parallel/gpt_layers.h"

#include <memory>
#include <utility>

#include "chapters/12_sequence_parallel/ring_attention.h"
#include "chapters/12_sequence_parallel/ring_self_attention.h"
#include "chapters/12_sequence_parallel/ulysses.h"
#include "chapters/common/sharded/loss.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/tensor_storage.h"

namespace shardbook::sequence_parallel {
namespace {

/// Where this rank's tokens are.
struct Place {
  Layout layout;
  int rank, c;
};

Tensor cut_ids(const Tensor& ids, const Place& place) {
  return sequence_parallel::cut_ids(ids, place.layout, place.rank, place.c);
}

/// Takes the ids of all tokens, and looks up this rank's.
class CutEmbedding : public ModuleOf<CutEmbedding, Embedding> {
 public:
  CutEmbedding(const std::string& name, std::int64_t rows, std::int64_t width,
               const InitOptions& init, double stddev, Place place)
      : ModuleOf(name, rows, width, init, stddev), place_(place) {}
  Tensor forward(const Tensor& tokens) override {
    return Embedding::forward(cut_ids(tokens, place_));
  }

 private:
  Place place_;
};

/// Dropout of x [n, s/c, h] with one device's mask of [n, s, h].
class CutDropout : public ModuleOf<CutDropout> {
 public:
  CutDropout(double p, Place place) : p_(p), place_(place) {}
  Tensor forward(const Tensor& x) override {
    if (!is_training() || p_ == 0) return x;
    const std::int64_t s = x.size(1) * place_.c;
    // All runs of tokens are one operation, with one stream of numbers
    RandomState& random = RankContext::current().random;
    const std::uint64_t op = random.next_op;
    Tensors parts;
    std::int64_t begin = 0;
    for (const TokenRun& run :
         token_runs(place_.layout, place_.rank, place_.c, s)) {
      random.next_op = op;
      const Tensor part =
          run.count == x.size(1) ? x : slice(x, 1, begin, begin + run.count);
      parts.push_back(dropout(
          part, p_,
          {{x.size(0), s, x.size(2)}, {0, run.first, 0}, {1, run.step, 1}}));
      begin += run.count;
    }
    return parts.size() == 1 ? parts[0] : concat(parts, 1);
  }
  void members(MemberVisitor&) override {}
  std::string type_name() const override { return "Dropout"; }

 private:
  double p_;
  Place place_;
};

}  // namespace

Kind kind_of(const std::string& name) {
  if (name == "ring") return Kind::kRing;
  if (name == "rsa") return Kind::kRsa;
  SB_CHECK(name == "ulysses", "--kind ", name, ": give ring, rsa or ulysses");
  return Kind::kUlysses;
}

void check_sizes(const SequenceOptions& setup, int c, std::int64_t s,
                 std::int64_t heads) {
  check_sequence(setup.layout, c, s);
  SB_CHECK(setup.kind == Kind::kRing || setup.layout == Layout::kContiguous,
           "--layout ", layout_name(setup.layout),
           ": only --kind ring computes blocks that a layout can balance; give "
           "contiguous");
  SB_CHECK(setup.kind != Kind::kUlysses || heads % c == 0, "--world-size ", c,
           ": Ulysses gives each rank equally many of ", heads,
           " heads; give a number of ranks that divides them");
}

Tensors split_qkv(const Tensor& qkv, std::int64_t queries_per_key) {
  const std::int64_t row = qkv.size(2), w = row / (queries_per_key + 2);
  return autograd::custom_function(
      "split_qkv", {qkv},
      [row, w](const Tensors& in) {
        return Tensors{slice(in[0], 2, 0, row - 2 * w),
                       slice(in[0], 2, row - 2 * w, row - w),
                       slice(in[0], 2, row - w, row)};
      },
      [](const Tensors& grads) { return Tensors{concat(grads, 2)}; });
}

Tensor cut_ids(const Tensor& ids, Layout layout, int rank, int c) {
  const MemoryScope kind(MemoryKind::kInput);
  return cut_sequence(ids, 1, layout, rank, c);
}

LayerFactory recomputing_attention(LayerFactory layers) {
  layers.attention = [whole = layers.attention](
                         const Tensor& qkv, const AttentionOptions& options) {
    return autograd::recompute(
        [=](const Tensors& in) { return Tensors{whole(in[0], options)}; },
        {qkv})[0];
  };
  return layers;
}

AnyModule cut_dropout(double p, Layout layout, int rank, int c) {
  return {std::make_unique<CutDropout>(p, Place{layout, rank, c})};
}

LayerFactory sequence_layers(const SequenceOptions& setup, std::int64_t s,
                             ProcessGroup& cp) {
  LayerFactory layers;
  if (cp.size() == 1) return layers;
  const Place place{setup.layout, cp.rank(), cp.size()};

  // Cut ids, positions and targets in the same way
  layers.embedding = [place](const std::string& name, std::int64_t rows,
                             std::int64_t width, double stddev,
                             const InitOptions& init) -> AnyModule {
    return {
        std::make_unique<CutEmbedding>(name, rows, width, init, stddev, place)};
  };
  layers.positions = [place, whole = layers.positions](AnyModule& wpe,
                                                       const Tensor& tokens) {
    return cut_sequence(whole(wpe, tokens), 0, place.layout, place.rank,
                        place.c);
  };
  layers.rope_table = rope_tables([place](std::int64_t own) {
    return positions(place.layout, place.rank, place.c, own * place.c);
  });
  layers.dropout = [place](double p) {
    return cut_dropout(p, place.layout, place.rank, place.c);
  };
  layers.loss = [place, &cp](const Tensor& logits, const Tensor& targets) {
    return mean_loss_over_ranks(logits, cut_ids(targets, place), cp);
  };

  // Let every query meet every key. RSA: one mask for all layers of a device, made
  // before the first step
  layers.attention = [setup, s, &cp, mask = std::make_shared<Tensor>()](
                         const Tensor& qkv, const AttentionOptions& options) {
    const std::int64_t n = s / cp.size();
    const bool has_mask = mask->defined() && mask->device() == qkv.device();
    if (setup.kind == Kind::kRsa && options.causal && !has_mask) {
      *mask = causal_rows(cp.rank() * n, n, s, qkv.options());
      set_memory_kind(*mask, MemoryKind::kInput);
    }
    const std::int64_t kv_heads =
        options.kv_heads == 0 ? options.heads : options.kv_heads;
    const Tensors parts = split_qkv(qkv, options.heads / kv_heads);
    const Tensor &q = parts[0], &k = parts[1], &v = parts[2];
    switch (setup.kind) {
      case Kind::kRing:
        return ring_attention(q, k, v, {options, setup.layout}, cp);
      case Kind::kUlysses:
        return ulysses_attention(q, k, v, options, cp);
      default:
        return ring_self_attention(q, k, v, {options, setup.all_reduce, *mask},
                                   cp);
    }
  };
  return layers;
}

}  // namespace shardbook::sequence_parallel
