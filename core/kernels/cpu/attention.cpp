#include "core/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/kernels/attention_args.h"
#include "core/kernels/cpu/attention_block.h"
#include "core/kernels/cpu/attention_dropout.h"
#include "core/kernels/cpu/attention_heads.h"

namespace shardbook::kernels::cpu {

namespace {

// The forward of one thread: scratch, and a head at a time.
template <typename T>
class Forward {
 public:
  using S = Compute<T>;

  static std::int64_t scratch_size(const AttentionArgs& args) {
    const Sizes<S> sizes(args);
    return sizes.padded_keys * sizes.dim + sizes.padded_values * sizes.keys +
           kQueryBlock * (kScoreLd + sizes.padded_dim + sizes.padded_values);
  }

  Forward(const AttentionArgs& args, const Dropout& dropout, S* scratch)
      : args_(args), dropout_(dropout), sizes_(args) {
    keys_ = scratch;
    values_ = keys_ + sizes_.padded_keys * sizes_.dim;
    queries_ = values_ + sizes_.padded_values * sizes_.keys;
    scores_ = queries_ + kQueryBlock * sizes_.padded_dim;
    sums_ = scores_ + kQueryBlock * kScoreLd;
  }

  void load_keys(const HeadRows<const T>& k, const HeadRows<const T>& v) {
    pack_across(k, sizes_.keys, sizes_.dim, keys_);
    pack_along(v, sizes_.keys, sizes_.values, values_);
  }

  void run(std::int64_t b, std::int64_t h, const HeadRows<const T>& q,
           const HeadRows<T>& out, S* logsumexp) {
    for (std::int64_t i = 0; i < args_.q_rows; i += kQueryBlock) {
      const std::int64_t rows = std::min(kQueryBlock, args_.q_rows - i);
      copy_rows<T>({q[i], q.row}, rows, sizes_.dim, static_cast<S>(args_.scale),
                   queries_, sizes_.padded_dim);
      run_block(b, h, i, rows);
      write_block(i, rows, out, logsumexp);
    }
  }

 private:
  void run_block(std::int64_t b, std::int64_t h, std::int64_t first,
                 std::int64_t rows) {
    std::fill(max_, max_ + rows, -std::numeric_limits<S>::infinity());
    std::fill(total_, total_ + rows, S(0));
    const std::int64_t end = visible(args_, first + rows - 1, sizes_.keys);
    for (std::int64_t from = 0; from < end; from += kKeyBlock) {
      const Block block{args_, first, rows, from,
                        std::min(kKeyBlock, end - from)};
      multiply_scores(block, sizes_.dim, queries_, sizes_.padded_dim, keys_,
                      scores_);
      for (std::int64_t i = 0; i < rows; ++i) soften_row(b, h, block, i);
      multiply_weights(block, scores_, values_, sizes_.keys, sizes_.values,
                       sums_, sizes_.padded_values);
    }
  }

  // Scores become weights relative to the largest score so far.
  void soften_row(std::int64_t b, std::int64_t h, const Block& block,
                  std::int64_t i) {
    S* const scores = scores_ + i * kScoreLd;
    const std::int64_t seen = block.seen_by(i);
    const std::int64_t end = block.end_of_row(seen);
    const S old = max_[i];
    const S max = std::max(old, max_padded(scores, seen));
    // A row without visible keys so far keeps weights of zero.
    const bool nothing = max == -std::numeric_limits<S>::infinity();
    const S sum = exp_padded(scores, nothing ? 0 : seen, end, max);
    if (block.from != 0 && max != old && !nothing) {
      const S fade = std::exp(old - max);
      total_[i] *= fade;
      S* const sums = sums_ + i * sizes_.padded_values;
      map_range(sizes_.padded_values, sums, sums,
                [fade](const Vec<S>& v) { return v * Vec<S>(fade); });
    }
    max_[i] = max;
    total_[i] += sum;
    if (dropout_.active()) {
      S mask[kKeyBlock];
      dropout_.mask(b, h, block.first + i, block.from, seen, mask);
      for (std::int64_t j = 0; j < seen; ++j) scores[j] *= mask[j];
    }
  }

  void write_block(std::int64_t first, std::int64_t rows,
                   const HeadRows<T>& out, S* logsumexp) {
    for (std::int64_t i = 0; i < rows; ++i) {
      logsumexp[first + i] = max_[i] + std::log(total_[i]);
      const S* const sums = sums_ + i * sizes_.padded_values;
      T* const to = out[first + i];
      if (total_[i] == S(0)) {
        std::fill(to, to + sizes_.values, narrow<T>(S(0)));
        continue;
      }
      const Vec<S> share(S(1) / total_[i]);
      std::int64_t c = 0;
      for (; c + kLanes<S> <= sizes_.values; c += kLanes<S>) {
        store(to + c, load(sums + c) * share);
      }
      if (c < sizes_.values) {
        store_part(to + c, load(sums + c) * share, sizes_.values - c);
      }
    }
  }

  const AttentionArgs& args_;
  const Dropout& dropout_;
  Sizes<S> sizes_;
  S *keys_, *values_, *queries_, *scores_, *sums_;
  S max_[kQueryBlock], total_[kQueryBlock];
};

// Merges one row; returns its new logsumexp.
template <typename T, typename S>
S merge_row(std::int64_t dim, const T* block, S block_total, S* out, S total) {
  constexpr S kNothing = -std::numeric_limits<S>::infinity();
  if (block_total == kNothing) return total;
  const bool is_first = total == kNothing;
  const S share =
      is_first ? S(1) : S(1) / (S(1) + std::exp(total - block_total));
  for (std::int64_t d = 0; d < dim; ++d) {
    const S x = widen(block[d]);
    out[d] = is_first ? x : out[d] - share * (out[d] - x);
  }
  if (is_first) return block_total;
  // -log sigmoid(x) = max(-x, 0) + log(1 + exp(-|x|)), which cannot overflow
  const S x = total - block_total;
  return total + std::max(-x, S(0)) + std::log1p(std::exp(-std::fabs(x)));
}

}  // namespace

void attention(KernelContext& context, DType dtype, const AttentionArgs& args,
               const void* q, const void* k, const void* v, void* out,
               void* logsumexp) {
  const Dropout dropout(args);
  dispatch_floating("attention", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    if (args.batch * args.heads * args.q_rows == 0) return;
    const std::int64_t group = args.heads / args.kv_heads;
    for_key_heads<Forward<T>>(
        context, args, dropout,
        [&](Forward<T>& head, std::int64_t b, std::int64_t kv) {
          head.load_keys(head_rows(static_cast<const T*>(k), args.k, b, kv),
                         head_rows(static_cast<const T*>(v), args.v, b, kv));
          for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
            head.run(b, h, head_rows(static_cast<const T*>(q), args.q, b, h),
                     head_rows(static_cast<T*>(out), args.out, b, h),
                     static_cast<S*>(logsumexp) +
                         (b * args.heads + h) * args.q_rows);
          }
        });
  });
}

void attention_merge(KernelContext&, DType dtype,
                     const AttentionMergeArgs& args, const void* block_out,
                     const void* block_logsumexp, void* out, void* logsumexp) {
  dispatch_floating("attention_merge", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const std::int64_t work = args.rows * args.head_dim;
    for_rows(args.batch * args.heads, work, [&](std::int64_t i) {
      const std::int64_t b = i / args.heads, h = i % args.heads;
      const auto block =
          head_rows(static_cast<const T*>(block_out), args.block_out, b, h);
      const auto sums = head_rows(static_cast<S*>(out), args.out, b, h);
      const S* const block_totals =
          static_cast<const S*>(block_logsumexp) + i * args.rows;
      S* const totals = static_cast<S*>(logsumexp) + i * args.logsumexp_head;
      for (std::int64_t r = 0; r < args.rows; ++r) {
        totals[r] = merge_row(args.head_dim, block[r], block_totals[r], sums[r],
                              totals[r]);
      }
    });
  });
}

}  // namespace shardbook::kernels::cpu
