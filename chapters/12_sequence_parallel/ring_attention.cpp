#include "chapters/12_sequence_parallel/ring_attention.h"

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/inplace.h"

namespace shardbook::sequence_parallel {
namespace {

constexpr int kKeysTag = 0;       // and values: 1
constexpr int kGradientsTag = 2;  // of keys; of values: 3

/// One call of ring attention: the state that its backward needs.
class RingAttention {
 public:
  RingAttention(const RingOptions& options, ProcessGroup& cp, const Tensor& q)
      : options_(options.attention),
        layout_(options.layout),
        cp_(cp),
        batch_(q.size(0)),
        rows_(q.size(1)),
        sum_dtype_(q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32) {
    check_sequence(layout_, cp.size(), rows_ * cp.size());
    random_ = RankContext::current().random;
    if (options_.dropout > 0) draws_ = next_attention_draws();
  }

  Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v) {
    AttentionSums sums;
    Tensors here = {k, v};
    for (int step = 0; step < cp_.size(); ++step) {
      Hop hop = pass_on(here, step);
      for (const AttentionBlock& block : blocks_at(step)) {
        merge(q, sums, block,
              attention_block(q, here[0], here[1], block,
                              options_at(step, block), draws_));
      }
      here = hop.wait();
    }
    complete_ = {to_dtype(sums.out, q.dtype()), sums.logsumexp};
    return complete_.out;
  }

  /// The gradients of q, k and v. Without `of_keys`, k's and v's are undefined
  /// and do not travel.
  Tensors backward(const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& dout, bool of_keys) {
    // A pipeline may have begun other micro-batches since the forward: repeat
    // the dropout of these rows
    const ContextValue<RandomState> replay(&RankContext::random, random_);
    const Tensor dq = zeros_like(q);
    Tensors here = {k, v};
    Hop gradients;
    for (int step = 0; step < cp_.size(); ++step) {
      Hop hop = pass_on(here, step);
      // This rank's part of the gradients of the block that is here
      const std::vector<AttentionBlock> blocks = blocks_at(step);
      Tensors own;
      if (!blocks.empty()) {
        const MemoryScope kind(MemoryKind::kCommunication);
        own = {zeros_like(k), zeros_like(v)};
      }
      for (const AttentionBlock& block : blocks) {
        attention_block_backward(q, here[0], here[1], complete_, dout, block,
                                 options_at(step, block), draws_, dq, own[0],
                                 own[1]);
      }
      if (of_keys) gradients = send_gradients(std::move(gradients), own, step);
      here = hop.wait();
    }
    if (!of_keys) return {to_dtype(dq, q.dtype()), Tensor(), Tensor()};
    // The last hop has brought our own block's gradients home
    const Tensors home = gradients.wait();
    return {to_dtype(dq, q.dtype()), to_dtype(home[0], k.dtype()),
            to_dtype(home[1], v.dtype())};
  }

 private:
  int source_at_step(int step) const {
    return source_at(cp_.rank(), step, cp_.size());
  }
  std::vector<AttentionBlock> blocks_at(int step) const {
    return visible_blocks(layout_, cp_.rank(), source_at_step(step), cp_.size(),
                          rows_, options_.causal, options_.dropout > 0);
  }
  AttentionOptions options_at(int step, const AttentionBlock& block) const {
    AttentionOptions options = options_;
    if (options.dropout > 0) {
      options.shard =
          shard_of(block, layout_, cp_.rank(), source_at_step(step), cp_.size(),
                   batch_, options.heads, rows_ * cp_.size());
    }
    return options;
  }
  Tensor zeros_like(const Tensor& x) const {
    return Tensor::zeros(x.shape(), {sum_dtype_, x.device()});
  }

  /// Keys and values leave for the next rank, unless they have visited all.
  Hop pass_on(const Tensors& here, int step) const {
    if (step + 1 == cp_.size()) return {};
    return Hop(cp_, here, kKeysTag, "K, V");
  }

  /// The first block is the result so far; others merge into it.
  void merge(const Tensor& q, AttentionSums& sums, const AttentionBlock& block,
             const AttentionSums& added) const {
    if (!sums.out.defined() && block.queries.size() == rows_) {
      sums = {to_dtype(added.out, sum_dtype_), added.logsumexp};
      return;
    }
    if (!sums.out.defined()) {
      sums.out = zeros_like(q);
      sums.logsumexp = Tensor::full({batch_, options_.heads, rows_},
                                    -std::numeric_limits<double>::infinity(),
                                    {sum_dtype_, q.device()});
    }
    merge_attention(sums, block.queries.begin, added);
  }

  /// Adds earlier ranks' gradients for the current block, which arrive while
  /// this rank computes, and sends the sum after the block.
  Hop send_gradients(Hop before, Tensors own, int step) const {
    if (step > 0) {
      const Tensors earlier = before.wait();
      if (own.empty()) {
        own = earlier;
      } else {
        add_into(own[0], earlier[0]);
        add_into(own[1], earlier[1]);
      }
    }
    return Hop(cp_, own, kGradientsTag, "dK, dV");
  }

  AttentionOptions options_;
  Layout layout_;
  ProcessGroup& cp_;
  std::int64_t batch_, rows_;
  DType sum_dtype_;
  RandomState random_;
  AttentionDraws draws_;
  AttentionSums complete_;
};

}  // namespace

Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                      const RingOptions& options, ProcessGroup& cp) {
  if (cp.size() == 1) return attention(q, k, v, options.attention);
  auto ring = std::make_shared<RingAttention>(options, cp, q);
  const bool of_keys = k.requires_grad() || v.requires_grad();
  return autograd::custom_function(
      "ring_attention", {q, k, v},
      [ring](const Tensors& in) {
        return Tensors{ring->forward(in[0], in[1], in[2])};
      },
      [ring, q = q.detach(), k = k.detach(), v = v.detach(),
       of_keys](const Tensors& grads) {
        return ring->backward(q, k, v, grads[0], of_keys);
      })[0];
}

}  // namespace shardbook::sequence_parallel
