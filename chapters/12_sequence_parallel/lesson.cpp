// Ring attention on one screen: each rank has a piece of the sequence. Keys and
// values go around a ring, until every query has met every key.
//
//   ./shardbook lesson sequence_parallel
// Needed: 07_tensor_parallel. Next: 13_moe.

#include <cmath>

#include "chapters/common/lesson.h"

namespace shardbook::sequence_parallel {

// --- the strategy
/// Sends x to the next rank of the ring and returns the x of the rank before.
/// The gradient travels the other way.
inline Tensor pass_on(const Tensor& x, ProcessGroup& cp) {
  const auto shift = [&cp](const Tensor& mine, int by) {
    const int c = cp.size(), r = cp.rank();
    const Tensor arrived = mine.empty_like();
    Work sent = cp.send(mine, (r + by + c) % c);
    cp.recv(arrived, (r - by + c) % c).wait();
    sent.wait();
    return Tensors{arrived};
  };
  return autograd::custom_function(
      "pass_on", {x}, [=](const Tensors& in) { return shift(in[0], 1); },
      [=](const Tensors& grad) { return shift(grad[0], -1); })[0];
}

/// qkv [n, S/c, 3h] of this rank's tokens -> [n, S/c, h], attending to all
/// tokens before. Here the graph keeps the pieces that came by; the library's
/// backward sends them around again.
inline Tensor ring_attention(const Tensor& qkv, std::int64_t heads,
                             ProcessGroup& cp) {
  const int c = cp.size(), r = cp.rank();
  const std::int64_t n = qkv.size(0), s = qkv.size(1), h = qkv.size(2) / 3;
  const auto by_head = [&](const Tensor& x, std::int64_t first) {
    const Shape split = {n, s, heads, h / heads};
    return reshape(
        permute(reshape(slice(x, 2, first, first + h), split), {0, 2, 1, 3}),
        {n * heads, s, h / heads});
  };
  const Tensor q = scale(by_head(qkv, 0), 1 / std::sqrt(double(h) / heads));
  Tensor kv = slice(qkv, 2, h, 3 * h), numerator, denominator;
  for (int step = 0; step < c; ++step) {
    // The keys of rank r - step: earlier tokens, our own, or hidden ones
    if (step > 0) kv = pass_on(kv, cp);
    const int owner = (r - step + c) % c;
    const Tensor scores = matmul(q, by_head(kv, 0), false, /*trans_b=*/true);
    const Tensor seen = mul(exp(scores), lesson::visible(s, r * s, owner * s));
    const Tensor values = matmul(seen, by_head(kv, h)), sums = sum(seen, 2);
    // The softmax over all keys is a quotient of two sums over the ring. (The
    // library subtracts the largest score, or exp could overflow)
    numerator = step == 0 ? values : add(numerator, values);
    denominator = step == 0 ? sums : add(denominator, sums);
  }
  const Tensor y = div(numerator, reshape(denominator, {n * heads, s, 1}));
  return reshape(permute(reshape(y, {n, heads, s, h / heads}), {0, 2, 1, 3}),
                 {n, s, h});
}
// --- end

inline lesson::Result train(ProcessGroup& cp) {
  // 1. The same weights on every rank; two layers know that tokens are cut
  LayerFactory layers;
  layers.attention = [&cp](const Tensor& qkv, const AttentionOptions& options) {
    return ring_attention(qkv, options.heads, cp);
  };
  layers.positions = [&cp](AnyModule& wpe, const Tensor& tokens) {
    const std::int64_t s = tokens.size(1), first = cp.rank() * s;
    return slice(wpe.as<Embedding>().weight, 0, first, first + s);
  };
  Gpt model(lesson::config(), lesson::init(), layers);
  const auto optimizer = lesson::sgd(model.parameters());
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. All samples, and a piece of each
    const Batch batch = lesson::batch(step);
    const std::int64_t s = lesson::sequence() / cp.size(),
                       first = cp.rank() * s;
    const Tensor inputs = slice(batch.inputs, 1, first, first + s);
    const Tensor targets = slice(batch.targets, 1, first, first + s);
    // 3. The ring turns in every block, forward and backward
    const Tensor mean = language_loss(model(inputs), targets);
    mean.backward();
    // 4. As in DDP: each rank has the gradient of its own tokens
    for (const Tensor& parameter : model.parameters()) {
      scale_into(parameter.grad(), parameter.grad(), 1.0 / cp.size());
      cp.all_reduce(parameter.grad()).wait();
    }
    optimizer->step();
    model.clear_grad();
    loss = lesson::mean_over(mean, cp);
  }
  return lesson::count(cp, loss).with(model.named_parameters());
}

/// Ten steps: keys and values travel c - 1 times per block, forward and back;
/// an all-reduce of the gradients, and of the loss.
inline double bill(int /*rank*/, int c) {
  const ModelConfig config = lesson::config();
  const double block = 2.0 * lesson::num_tokens() / c * config.n_embd;
  const double elements = 2 * config.n_layer * (c - 1) * block +
                          2.0 * (c - 1) / c * (lesson::num_parameters() + 1);
  return lesson::kSteps * elements * 8;
}

inline lesson::Lesson this_lesson() {
  return {/*ranks=*/{4, 2}, train, bill, nullptr, /*peak_bytes=*/1296008};
}

}  // namespace shardbook::sequence_parallel

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::sequence_parallel::this_lesson()); }
#endif
