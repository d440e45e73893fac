#include "chapters/common/models/latent_attention.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/autograd.h"
#include "core/copy_runs.h"
#include "core/ops.h"

namespace shardbook {
namespace {

/// Columns of a row of [q | k | v], and where they come from.
struct Move {
  std::size_t input;  ///< of q, kv, turns
  std::int64_t to, from, n;
};

/// Those of all heads. The columns of `turns` come with each head's key; `each`:
/// from a place of its own, as their gradients do.
std::vector<Move> moves_of(const LatentHeads& z, bool each) {
  const std::int64_t a = z.heads, d = z.rope + z.nope;
  std::vector<Move> moves;
  for (std::int64_t i = 0; i < a; ++i) {
    const std::int64_t q = i * d, k = (a + i) * d, v = 2 * a * d + i * z.value;
    moves.push_back({0, q, i * z.rope, z.rope});
    moves.push_back({0, q + z.rope, a * z.rope + i * z.nope, z.nope});
    moves.push_back({1, k + z.rope, i * z.nope, z.nope});
    moves.push_back({1, v, a * z.nope + i * z.value, z.value});
    moves.push_back({2, k, each ? i * z.rope : 0, z.rope});
  }
  return moves;
}

/// From column `begin` of every row on, in memory.
Tensor from_column(const Tensor& x, std::int64_t begin) {
  return x.flat_view(begin, {x.numel() - begin});
}

void move(const std::vector<Move>& moves, const Tensor& row, const Tensors& in,
          bool is_backward) {
  std::vector<CopyRun> runs;
  for (const Move& each : moves) {
    const Tensor& other = in[each.input];
    CopyRun run;
    run.target = from_column(row, each.to);
    run.source = from_column(other, each.from);
    run.target_stride = row.size(2);
    run.source_stride = other.size(2);
    if (is_backward) {
      std::swap(run.target, run.source);
      std::swap(run.target_stride, run.source_stride);
    }
    run.count = row.size(0) * row.size(1);
    run.numel = each.n;
    runs.push_back(run);
  }
  copy_runs(runs);
}

/// The first `n` columns, and the others.
Tensors split_at(const Tensor& x, std::int64_t n) {
  return autograd::custom_function(
      "split_latent", {x},
      [n](const Tensors& in) {
        return Tensors{slice(in[0], 2, 0, n),
                       slice(in[0], 2, n, in[0].size(2))};
      },
      [](const Tensors& grads) { return Tensors{concat(grads, 2)}; });
}

class LatentProducts : public ModuleOf<LatentProducts> {
 public:
  LatentProducts(const std::string& name, const BlockTable& block,
                 const ModelConfig& config, const InitOptions& init,
                 const LayerFactory& layers)
      : sizes_{config.n_head / layers.head_ranks, config.llama.rope_dim,
               config.llama.head_dim - config.llama.rope_dim,
               config.llama.value_dim},
        for_heads_(layers.for_heads),
        rope_table_([config, table = layers.rope_table](
                        std::int64_t s, const TensorOptions& options) {
          return table(config, s, options);
        }) {
    for (const BlockPart& part : block.latent) {
      const std::string path = name + "." + part.leaf();
      leaves_.push_back(part.leaf());
      products_.push_back(part.is_norm()
                              ? AnyModule{std::make_unique<RmsNorm>(
                                    part.out, init, config.layer_norm_epsilon)}
                              : layers.linear(path, part, init));
    }
  }

  Tensor forward(const Tensor& x) override {
    // q_a, its norm and q_b, or q alone; then kv_a, its norm and kv_b
    const std::size_t of_kv = products_.size() - 3;
    Tensor q = x;
    for (std::size_t i = 0; i < of_kv; ++i) q = products_[i](q);
    const Tensors parts = split_at(products_[of_kv](x), sizes_.rope);
    const Tensor kv = products_[of_kv + 2](products_[of_kv + 1](parts[1]));
    const Tensor turns = for_heads_(parts[0]);
    const Tensor table = rope_table_(q.size(1), q.options());
    return lay_out_heads(rope(q, table, sizes_.heads, sizes_.rope), kv,
                         rope(turns, table, 1, sizes_.rope), sizes_);
  }

  void members(MemberVisitor& visit) override {
    for (std::size_t i = 0; i < products_.size(); ++i) {
      visit.module(leaves_[i], *products_[i]);
    }
  }
  std::string type_name() const override { return "LatentProducts"; }

 private:
  LatentHeads sizes_;
  std::function<Tensor(const Tensor&)> for_heads_;
  std::function<Tensor(std::int64_t s, const TensorOptions&)> rope_table_;
  std::vector<std::string> leaves_;
  std::vector<AnyModule> products_;
};

}  // namespace

Tensor lay_out_heads(const Tensor& q, const Tensor& kv, const Tensor& turns,
                     const LatentHeads& sizes) {
  return autograd::custom_function(
      "latent_heads", {q, kv, turns},
      [&sizes](const Tensors& in) {
        const Tensor row = Tensor::empty(
            {in[0].size(0), in[0].size(1), sizes.row()}, in[0].options());
        move(moves_of(sizes, false), row, in, false);
        return Tensors{row};
      },
      [sizes, of_q = q.shape(), of_kv = kv.shape()](const Tensors& grads) {
        const TensorOptions options = grads[0].options();
        const std::int64_t n = of_q[0], s = of_q[1];
        const Tensors parts = {
            Tensor::empty(of_q, options), Tensor::empty(of_kv, options),
            Tensor::empty({n, s, sizes.heads * sizes.rope}, options)};
        move(moves_of(sizes, true), grads[0], parts, true);
        return Tensors{
            parts[0], parts[1],
            sum(reshape(parts[2], {n, s, sizes.heads, sizes.rope}), 2)};
      })[0];
}

AnyModule latent_products(const std::string& name, const BlockTable& block,
                          const ModelConfig& config, const InitOptions& init,
                          const LayerFactory& layers) {
  return {std::make_unique<LatentProducts>(name, block, config, init, layers)};
}

}  // namespace shardbook
