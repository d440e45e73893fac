#include "chapters/12_sequence_parallel/ulysses.h"

#include <numeric>
#include <vector>

#include "core/autograd.h"
#include "core/check.h"

namespace shardbook::sequence_parallel {
namespace {

/// Permutes x, and exchanges its dim 0 by all_to_all. The result has the shape of
/// the permuted x.
Tensor exchange(const Tensor& x, const std::vector<std::int64_t>& order,
                ProcessGroup& cp, const std::string& label) {
  const MemoryScope kind(MemoryKind::kCommunication);
  const Tensor leaving = permute(x, order);
  const Tensor arrived = leaving.empty_like();
  cp.all_to_all(arrived, leaving, label).wait();
  return arrived;
}

Tensor exchange_to_heads(const Tensor& x, ProcessGroup& cp,
                         const std::string& label) {
  const std::int64_t c = cp.size(), b = x.size(0), n = x.size(1);
  SB_CHECK(x.ndim() == 3 && x.size(2) % c == 0, "scatter_heads: shape ",
           shape_text(x.shape()), " over ", c,
           " ranks; give [b, s/c, width] of a width that they divide");
  const std::int64_t width = x.size(2) / c;
  // Blocks of heads first: all_to_all cuts dim 0
  const Tensor by_source =
      exchange(reshape(x, {b, n, c, width}), {2, 0, 1, 3}, cp, label);
  return reshape(permute(by_source, {1, 0, 2, 3}), {b, c * n, width});
}

Tensor exchange_to_tokens(const Tensor& x, ProcessGroup& cp,
                          const std::string& label) {
  const std::int64_t c = cp.size(), b = x.size(0), width = x.size(2);
  SB_CHECK(x.ndim() == 3 && x.size(1) % c == 0, "gather_heads: shape ",
           shape_text(x.shape()), " over ", c,
           " ranks; give [b, s, width] of a length that they divide");
  const std::int64_t n = x.size(1) / c;
  const Tensor by_heads =
      exchange(reshape(x, {b, c, n, width}), {1, 0, 2, 3}, cp, label);
  return reshape(permute(by_heads, {1, 2, 0, 3}), {b, n, c * width});
}

using Exchange = Tensor (*)(const Tensor& x, ProcessGroup& cp,
                            const std::string& label);

/// An exchange whose backward is the other one.
Tensor exchanged(const char* name, const Tensor& x, ProcessGroup& cp,
                 const std::string& label, Exchange forward,
                 Exchange backward) {
  if (cp.size() == 1) return x;
  return autograd::custom_function(
      name, {x},
      [&](const Tensors& in) { return Tensors{forward(in[0], cp, label)}; },
      [&cp, label, backward](const Tensors& grads) {
        return Tensors{backward(grads[0], cp, "d" + label)};
      })[0];
}

/// Each head `times` times in a row; backward sums the gradients of the copies.
Tensor repeat_heads(const Tensor& x, std::int64_t heads, std::int64_t times) {
  if (times == 1) return x;
  const std::int64_t b = x.size(0), n = x.size(1), d = x.size(2) / heads;
  const Tensor one = reshape(x, {b, n, heads, 1, d});
  const Tensors copies(static_cast<std::size_t>(times), one);
  return reshape(concat(copies, 3), {b, n, heads * times * d});
}

}  // namespace

Tensor scatter_heads(const Tensor& x, ProcessGroup& cp,
                     const std::string& label) {
  return exchanged("scatter_heads", x, cp, label, exchange_to_heads,
                   exchange_to_tokens);
}

Tensor gather_heads(const Tensor& x, ProcessGroup& cp,
                    const std::string& label) {
  return exchanged("gather_heads", x, cp, label, exchange_to_tokens,
                   exchange_to_heads);
}

Tensor ulysses_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                         const AttentionOptions& options, ProcessGroup& cp) {
  const std::int64_t c = cp.size(), heads = options.heads;
  const std::int64_t kv_heads =
      options.kv_heads == 0 ? heads : options.kv_heads;
  SB_CHECK(heads % c == 0, "ulysses: ", heads, " heads over ", c,
           " ranks; give a number of ranks that divides the heads");
  SB_CHECK(heads % kv_heads == 0, "ulysses: ", kv_heads,
           " key heads do not divide ", heads, " heads");
  const std::int64_t sent_kv_heads = std::lcm(kv_heads, c);
  const std::int64_t times = sent_kv_heads / kv_heads;

  const Tensor all_q = scatter_heads(q, cp, "Q");
  const Tensor all_k = scatter_heads(repeat_heads(k, kv_heads, times), cp, "K");
  const Tensor all_v = scatter_heads(repeat_heads(v, kv_heads, times), cp, "V");

  AttentionOptions own = options;
  own.heads = heads / c;
  own.kv_heads = sent_kv_heads / c;
  // Dropout draws where one device would, for these heads
  const std::int64_t s = all_q.size(1);
  own.shard = {{q.size(0), heads, s, s}, {0, cp.rank() * own.heads, 0, 0}, {}};
  return gather_heads(attention(all_q, all_k, all_v, own), cp, "O");
}

}  // namespace shardbook::sequence_parallel
