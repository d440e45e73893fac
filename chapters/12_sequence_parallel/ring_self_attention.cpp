#include "chapters/12_sequence_parallel/ring_self_attention.h"

#include <cmath>
#include <functional>
#include <vector>

#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"

namespace shardbook::sequence_parallel {
namespace {

/// Calls `visit` with each rank's block, this rank's own first. The next one is
/// on its way meanwhile.
void around_ring(
    ProcessGroup& cp, const Tensor& own, const std::string& label,
    const std::function<void(int source, const Tensor& block)>& visit) {
  Tensor here = own;
  for (int step = 0; step < cp.size(); ++step) {
    const bool is_last = step + 1 == cp.size();
    Hop hop = is_last ? Hop() : Hop(cp, {here}, 0, label);
    visit(source_at(cp.rank(), step, cp.size()), here);
    if (!is_last) here = hop.wait()[0];
  }
}

/// Columns of rank `source` in rows over all keys.
Tensor columns_of(const Tensor& rows, int source, std::int64_t n) {
  return slice(rows, 2, source * n, (source + 1) * n);
}

/// Rows of the heads that share keys, one head below the other: [b heads, s/c, w]
/// -> [b kv_heads, heads / kv_heads s/c, w].
Tensor by_keys(const Tensor& x, std::int64_t keys) {
  return reshape(x, {keys, x.size(0) / keys * x.size(1), x.size(2)});
}

/// sum over sources of weights[:, columns of source] block.
Tensor weigh_around_ring(ProcessGroup& cp, const Tensor& weights,
                         const Tensor& own, const std::string& label) {
  const std::int64_t n = own.size(1);
  const Tensor rows = by_keys(weights, own.size(0));
  Tensor sum;
  around_ring(cp, own, label, [&](int source, const Tensor& block) {
    const Tensor part = matmul(columns_of(rows, source, n), block);
    if (!sum.defined()) {
      sum = part;
    } else {
      add_into(sum, part);
    }
  });
  return reshape(sum, {weights.size(0), weights.size(1), own.size(2)});
}

/// Scores of own rows with every rank's block: [b heads, s/c, s].
Tensor products_around_ring(ProcessGroup& cp, const Tensor& rows,
                            const Tensor& own, const std::string& label) {
  const Tensor grouped = by_keys(rows, own.size(0));
  Tensors blocks(static_cast<std::size_t>(cp.size()));
  around_ring(cp, own, label, [&](int source, const Tensor& block) {
    blocks[static_cast<std::size_t>(source)] =
        matmul(grouped, block, false, /*trans_b=*/true);
  });
  const Tensor all = cp.size() == 1 ? blocks[0] : concat(blocks, 2);
  return reshape(all, {rows.size(0), rows.size(1), all.size(2)});
}

/// This rank's rows of the sum over ranks of weights^T rows: like `own`.
Tensor sum_for_owner(ProcessGroup& cp, const Tensor& weights,
                     const Tensor& rows, const Tensor& own, bool use_all_reduce,
                     const std::string& label) {
  const std::int64_t c = cp.size(), keys = own.size(0), n = own.size(1);
  // [b kv_heads, s, d]
  const Tensor all =
      matmul(by_keys(weights, keys), by_keys(rows, keys), /*trans_a=*/true);
  if (c == 1) return all;
  if (use_all_reduce) {
    cp.all_reduce(all, ReduceOp::kSum, label).wait();
    return slice(all, 1, cp.rank() * n, (cp.rank() + 1) * n);
  }
  // A reduce-scatter cuts dim 0: the owner's rank comes first
  Tensor by_owner;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    by_owner = permute(reshape(all, {keys, c, n, own.size(2)}), {1, 0, 2, 3});
  }
  const Tensor mine = own.empty_like();
  cp.reduce_scatter(mine, by_owner, ReduceOp::kSum, label).wait();
  return mine;
}

}  // namespace

Tensor causal_rows(std::int64_t first, std::int64_t n, std::int64_t s,
                   const TensorOptions& like) {
  const NoGrad no_grad;
  // Key position minus query position: 0 or less where the key is seen
  const TensorOptions f32{DType::kF32, like.device};
  const Tensor queries =
      add_scalar(Tensor::arange(n, f32), static_cast<double>(first));
  const Tensor distance = sub(Tensor::arange(s, f32), reshape(queries, {n, 1}));
  return to_dtype(scale(relu(distance), -1e30), like.dtype);
}

Tensor ring_qk(const Tensor& q, const Tensor& k, ProcessGroup& cp,
               bool use_all_reduce) {
  const bool of_q = q.requires_grad(), of_k = k.requires_grad();
  return autograd::custom_function(
      "ring_qk", {q, k},
      [&cp](const Tensors& in) {
        return Tensors{products_around_ring(cp, in[0], in[1], "K")};
      },
      [&cp, q = q.detach(), k = k.detach(), of_q, of_k,
       use_all_reduce](const Tensors& grads) {
        Tensor dq, dk;
        if (of_q) dq = weigh_around_ring(cp, grads[0], k, "K for dQ");
        if (of_k) dk = sum_for_owner(cp, grads[0], q, k, use_all_reduce, "dK");
        return Tensors{dq, dk};
      })[0];
}

Tensor ring_av(const Tensor& weights, const Tensor& v, ProcessGroup& cp,
               bool use_all_reduce) {
  const bool of_weights = weights.requires_grad(), of_v = v.requires_grad();
  return autograd::custom_function(
      "ring_av", {weights, v},
      [&cp](const Tensors& in) {
        return Tensors{weigh_around_ring(cp, in[0], in[1], "V")};
      },
      [&cp, weights = weights.detach(), v = v.detach(), of_weights, of_v,
       use_all_reduce](const Tensors& grads) {
        Tensor dweights, dv;
        if (of_weights) {
          dweights = products_around_ring(cp, grads[0], v, "V for dP");
        }
        if (of_v)
          dv = sum_for_owner(cp, weights, grads[0], v, use_all_reduce, "dV");
        return Tensors{dweights, dv};
      })[0];
}

Tensor ring_self_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const RsaOptions& options, ProcessGroup& cp) {
  const AttentionOptions& setup = options.attention;
  const std::int64_t a = setup.heads;
  const std::int64_t keys = setup.kv_heads == 0 ? a : setup.kv_heads;
  SB_CHECK(k.shape() == v.shape() && q.ndim() == 3 && k.ndim() == 3 &&
               q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
               a % keys == 0 && q.size(2) % a == 0 &&
               k.size(2) == q.size(2) / a * keys,
           "ring_self_attention: shapes q ", shape_text(q.shape()), ", k ",
           shape_text(k.shape()), ", v ", shape_text(v.shape()), " with ", a,
           " heads and ", keys,
           " of keys; give [b, s/c, heads d] and two of [b, s/c, kv_heads d]");
  if (cp.size() == 1) return attention(q, k, v, setup);
  const std::int64_t b = q.size(0), n = q.size(1);
  const std::int64_t d = q.size(2) / a, s = n * cp.size();
  const auto by_head = [&](const Tensor& x) {
    return reshape(permute(reshape(x, {b, n, -1, d}), {0, 2, 1, 3}),
                   {-1, n, d});
  };

  // Fill the rows of scores
  Tensor scores = ring_qk(by_head(q), by_head(k), cp, options.all_reduce);
  scores =
      scale(scores, setup.scale != 0 ? setup.scale
                                     : 1 / std::sqrt(static_cast<double>(d)));
  if (setup.causal) {
    scores =
        add(scores, options.mask.defined()
                        ? options.mask
                        : causal_rows(cp.rank() * n, n, s, scores.options()));
  }

  // Softmax and dropout over full rows
  Tensor weights = softmax(scores);
  if (setup.dropout > 0) {
    weights = dropout(reshape(weights, {b, a, n, s}), setup.dropout,
                      {{b, a, s, s}, {0, 0, cp.rank() * n, 0}, {}});
    weights = reshape(weights, {b * a, n, s});
  }

  // Weigh the values
  const Tensor out = ring_av(weights, by_head(v), cp, options.all_reduce);
  return reshape(permute(reshape(out, {b, a, n, d}), {0, 2, 1, 3}),
                 {b, n, a * d});
}

}  // namespace shardbook::sequence_parallel
