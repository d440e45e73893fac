#include <algorithm>
#include <limits>

#include "core/kernels/attention.h"
#include "core/kernels/attention_args.h"
#include "core/kernels/cpu/attention_block.h"
#include "core/kernels/cpu/attention_dropout.h"
#include "core/kernels/cpu/attention_heads.h"
#include "core/kernels/cpu/reduce_rows.h"

namespace shardbook::kernels::cpu {

namespace {

// Products over queries keep their sums in registers for a block of queries, so
// blocks are higher than in the forward, and lower in keys: L1 holds both tiles.
constexpr std::int64_t kQueryRows = 4 * kTileRows;
constexpr std::int64_t kKeyRows = kKeyBlock / 2;

// The backward of one thread.
//
//   P = exp(scale Q K^T - logsumexp)    dP = dO V^T
//   dS = P (dP - rowsum(dO O))          dQ = scale dS K
//   dV = P^T dO                         dK = dS^T (scale Q)
template <typename T>
class Backward {
 public:
  using S = Compute<T>;

  static std::int64_t scratch_size(const AttentionArgs& args) {
    const Sizes<S> sizes(args);
    return sizes.padded_keys * (sizes.dim + sizes.values) +
           sizes.padded_dim * sizes.keys +
           sizes.padded_keys * (sizes.padded_dim + sizes.padded_values) +
           kQueryRows *
               (3 * sizes.padded_dim + sizes.padded_values + 2 * kScoreLd);
  }

  Backward(const AttentionArgs& args, const Dropout& dropout, S* scratch)
      : args_(args), dropout_(dropout), sizes_(args) {
    const auto take = [&scratch](std::int64_t n) {
      S* const taken = scratch;
      scratch += n;
      return taken;
    };
    keys_across_ = take(sizes_.padded_keys * sizes_.dim);
    values_across_ = take(sizes_.padded_keys * sizes_.values);
    keys_along_ = take(sizes_.padded_dim * sizes_.keys);
    dk_ = take(sizes_.padded_keys * sizes_.padded_dim);
    dv_ = take(sizes_.padded_keys * sizes_.padded_values);
    queries_ = take(kQueryRows * sizes_.padded_dim);
    scaled_queries_ = take(kQueryRows * sizes_.padded_dim);
    dout_ = take(kQueryRows * sizes_.padded_values);
    dq_ = take(kQueryRows * sizes_.padded_dim);
    weights_ = take(kQueryRows * kScoreLd);
    slopes_ = take(kQueryRows * kScoreLd);
  }

  void load_keys(const HeadRows<const T>& k, const HeadRows<const T>& v) {
    pack_across(k, sizes_.keys, sizes_.dim, keys_across_);
    pack_across(v, sizes_.keys, sizes_.values, values_across_);
    pack_along(k, sizes_.keys, sizes_.dim, keys_along_);
    std::fill(dk_, dk_ + sizes_.padded_keys * sizes_.padded_dim, S(0));
    std::fill(dv_, dv_ + sizes_.padded_keys * sizes_.padded_values, S(0));
  }

  void run(std::int64_t b, std::int64_t h, const HeadRows<const T>& q,
           const HeadRows<const T>& out, const HeadRows<const T>& dout,
           const S* logsumexp, const HeadRows<T>& dq, bool accumulate) {
    const S scale = static_cast<S>(args_.scale);
    const std::int64_t ld = sizes_.padded_dim;
    for (std::int64_t i = 0; i < args_.q_rows; i += kQueryRows) {
      const std::int64_t rows = std::min(kQueryRows, args_.q_rows - i);
      const HeadRows<const T> these{q[i], q.row}, those{dout[i], dout.row};
      copy_rows<T>(these, rows, sizes_.dim, S(1), queries_, ld);
      copy_rows<T>(these, rows, sizes_.dim, scale, scaled_queries_, ld);
      copy_rows<T>(those, rows, sizes_.values, S(1), dout_,
                   sizes_.padded_values);
      for (std::int64_t r = 0; r < rows; ++r) {
        delta_[r] = dot_row(out[i + r], dout[i + r], sizes_.values);
        // A row without visible keys has no weights: exp(score - inf) = 0.
        const S total = logsumexp[i + r];
        shift_[r] =
            total == -std::numeric_limits<S>::infinity() ? -total : total;
      }
      const bool any = run_block(b, h, i, rows);
      write_rows(dq_, ld, rows, sizes_.dim, any ? scale : S(0), {dq[i], dq.row},
                 accumulate);
    }
  }

  void store_keys(const HeadRows<T>& dk, const HeadRows<T>& dv,
                  bool accumulate) {
    write_rows(dk_, sizes_.padded_dim, sizes_.keys, sizes_.dim,
               static_cast<S>(args_.scale), dk, accumulate);
    write_rows(dv_, sizes_.padded_values, sizes_.keys, sizes_.values, S(1), dv,
               accumulate);
  }

 private:
  // False when the queries see no key; then dq_ is not written.
  bool run_block(std::int64_t b, std::int64_t h, std::int64_t first,
                 std::int64_t rows) {
    const std::int64_t ld = sizes_.padded_dim, value_ld = sizes_.padded_values;
    const std::int64_t end = visible(args_, first + rows - 1, sizes_.keys);
    for (std::int64_t from = 0; from < end; from += kKeyRows) {
      const Block block{args_, first, rows, from,
                        std::min(kKeyRows, end - from)};
      multiply_scores(block, sizes_.dim, scaled_queries_, ld, keys_across_,
                      weights_);
      multiply_scores(block, sizes_.values, dout_, value_ld, values_across_,
                      slopes_);
      for (std::int64_t i = 0; i < rows; ++i) differentiate_row(b, h, block, i);
      multiply_transposed(block, weights_, dout_, sizes_.values,
                          dv_ + from * value_ld, value_ld);
      multiply_transposed(block, slopes_, queries_, sizes_.dim, dk_ + from * ld,
                          ld);
      multiply_weights(block, slopes_, keys_along_, sizes_.keys, sizes_.dim,
                       dq_, ld);
    }
    if (end == 0) std::fill(dq_, dq_ + rows * sizes_.padded_dim, S(0));
    return end > 0;
  }

  // Turns scores into weights, and gradients of weights into those of scores.
  void differentiate_row(std::int64_t b, std::int64_t h, const Block& block,
                         std::int64_t i) {
    S* const weights = weights_ + i * kScoreLd;
    S* const slopes = slopes_ + i * kScoreLd;
    const std::int64_t seen = block.seen_by(i);
    const std::int64_t end = block.end_of_row(seen);
    const Vec<S> delta(delta_[i]), shift(shift_[i]);
    if (!dropout_.active()) {
      for_padded(seen, weights, -std::numeric_limits<S>::infinity(),
                 [&](std::int64_t j, const Vec<S>& v) {
                   const Vec<S> p = exp_vec_small(v - shift);
                   store(weights + j, p);
                   store(slopes + j, p * (load(slopes + j) - delta));
                 });
    } else {
      exp_padded(weights, seen, end, shift_[i]);
      S mask[kKeyRows];
      dropout_.mask(b, h, block.first + i, block.from, seen, mask);
      for (std::int64_t j = 0; j < seen; ++j) {
        slopes[j] = weights[j] * (mask[j] * slopes[j] - delta_[i]);
        weights[j] *= mask[j];
      }
    }
    for (std::int64_t j = seen; j < end && j % kLanes<S> != 0; ++j) {
      slopes[j] = S(0);
    }
    for (std::int64_t j = round_up(seen, kLanes<S>); j < end; j += kLanes<S>) {
      store(weights + j, Vec<S>(S(0)));
      store(slopes + j, Vec<S>(S(0)));
    }
  }

  // to = x * scale, or += when `accumulate`; rows of x are `ld` apart.
  void write_rows(const S* x, std::int64_t ld, std::int64_t rows,
                  std::int64_t dim, S scale, const HeadRows<T>& to,
                  bool accumulate) {
    const Vec<S> by(scale);
    for (std::int64_t r = 0; r < rows; ++r) {
      const S* const from = x + r * ld;
      T* const row = to[r];
      for (std::int64_t c = 0; c < dim; c += kLanes<S>) {
        const std::int64_t n = std::min(kLanes<S>, dim - c);
        Vec<S> v = load(from + c) * by;
        if (accumulate) v = load_up_to(row + c, n) + v;
        store_up_to(row + c, v, n);
      }
    }
  }

  const AttentionArgs& args_;
  const Dropout& dropout_;
  Sizes<S> sizes_;
  S *keys_across_, *values_across_, *keys_along_, *dk_, *dv_;
  S *queries_, *scaled_queries_, *dout_, *dq_;
  S *weights_, *slopes_;
  S delta_[kQueryRows], shift_[kQueryRows];
};

}  // namespace

void attention_backward(KernelContext& context, DType dtype,
                        const AttentionArgs& args,
                        const AttentionGradStrides& strides, const void* q,
                        const void* k, const void* v, const void* out,
                        const void* dout, const void* logsumexp, void* dq,
                        void* dk, void* dv, bool accumulate) {
  const Dropout dropout(args);
  dispatch_floating("attention_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    if (args.batch * args.heads == 0) return;
    const std::int64_t group = args.heads / args.kv_heads;
    for_key_heads<Backward<T>>(
        context, args, dropout,
        [&](Backward<T>& head, std::int64_t b, std::int64_t kv) {
          head.load_keys(head_rows(static_cast<const T*>(k), args.k, b, kv),
                         head_rows(static_cast<const T*>(v), args.v, b, kv));
          for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
            head.run(b, h, head_rows(static_cast<const T*>(q), args.q, b, h),
                     head_rows(static_cast<const T*>(out), args.out, b, h),
                     head_rows(static_cast<const T*>(dout), strides.dout, b, h),
                     static_cast<const S*>(logsumexp) +
                         (b * args.heads + h) * args.q_rows,
                     head_rows(static_cast<T*>(dq), strides.dq, b, h),
                     accumulate);
          }
          head.store_keys(head_rows(static_cast<T*>(dk), strides.dk, b, kv),
                          head_rows(static_cast<T*>(dv), strides.dv, b, kv),
                          accumulate);
        });
  });
}

}  // namespace shardbook::kernels::cpu
