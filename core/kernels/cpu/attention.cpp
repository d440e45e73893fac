#include "core/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/kernels/cpu/gemm.h"
#include "core/kernels/cpu/random_runs.h"
#include "core/kernels/cpu/reduce_rows.h"

// One head at a time, all in cache:
//
//              keys: blocks of kKeyBlock
//             +-------+-------+---
//   queries:  | tile  |  ...           a tile of scores, then of
//   kQuery-   |       |                probabilities, lives in L1
//   Block     +-------+-------+---
//
// Keys and values are repacked once per head, so that every product runs on
// the panels of gemm.h. Queries carry the scale.
//
// Under a causal mask each register tile (kTileRows queries) has its own end:
//
//   keys  0 ........ 16 ...... 32            x computed, . left out
//         x x x x x x x x . . . . . .
//         x x x x x x x x x x x x . .

namespace shardbook::kernels {

namespace {

constexpr std::int64_t kQueryBlock = 2 * kTileRows;
constexpr std::int64_t kKeyBlock = 256;
// Rows of a tile of scores start in different sets of L1.
constexpr std::int64_t kScoreLd = kKeyBlock + 16;

std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

// What a head needs of its sizes.
template <typename S>
struct Sizes {
  explicit Sizes(const AttentionArgs& args)
      : dim(args.head_dim),
        padded_dim(round_up(args.head_dim, kTileCols<S>)),
        keys(args.k_rows),
        padded_keys(round_up(args.k_rows, kTileCols<S>)) {}
  std::int64_t dim, padded_dim, keys, padded_keys;
};

// A head's rows as they lie in memory.
template <typename T>
struct HeadRows {
  T* data;
  std::int64_t row;
  T* operator[](std::int64_t i) const { return data + i * row; }
};
template <typename T>
HeadRows<T> head_rows(T* data, const HeadStrides& strides, std::int64_t b,
                      std::int64_t h) {
  return {data + b * strides.batch + h * strides.head, strides.row};
}

// Columns are rows of x: out has panels [rows / kTileCols][dim][kTileCols].
template <typename T>
void pack_across(const HeadRows<const T>& x, std::int64_t rows,
                 std::int64_t dim, Compute<T>* out) {
  pack_panels<kTileCols<Compute<T>>>(x.data, x.row, 1, rows, dim, out);
}

// Columns are dims of x: out has panels [dim / kTileCols][rows][kTileCols].
template <typename T>
void pack_along(const HeadRows<const T>& x, std::int64_t rows, std::int64_t dim,
                Compute<T>* out) {
  pack_panels<kTileCols<Compute<T>>>(x.data, 1, x.row, dim, rows, out);
}

// Rows of x as the left side of a product: [rows / kTileRows][dim][kTileRows].
template <typename T>
void pack_left(const HeadRows<const T>& x, std::int64_t rows, std::int64_t dim,
               Compute<T> scale, Compute<T>* out) {
  pack_panels<kTileRows>(x.data, x.row, 1, rows, dim, out);
  if (scale != Compute<T>(1)) {
    const std::int64_t n = round_up(rows, kTileRows) * dim;
    map_range(n, out, out, [scale](const Vec<Compute<T>>& v) {
      return v * Vec<Compute<T>>(scale);
    });
  }
}

// Which part of a block of scores the mask leaves: queries [first, first +
// rows), keys [from, from + count). The others are not computed.
struct Block {
  const AttentionArgs& args;
  std::int64_t first, rows, from, count;

  /// Keys that query `row` of the block sees.
  std::int64_t seen_by(std::int64_t row) const {
    if (!args.causal) return count;
    const std::int64_t end =
        args.q_position + first + row - args.k_position + 1 - from;
    return std::clamp<std::int64_t>(end, 0, count);
  }
  /// Keys that some query of the tile sees whose first row is `row`.
  std::int64_t seen_by_tile(std::int64_t row) const {
    return seen_by(std::min<std::int64_t>(row + kTileRows, rows) - 1);
  }
  /// The first query that sees `key` of the block.
  std::int64_t first_to_see(std::int64_t key) const {
    if (!args.causal) return 0;
    return std::clamp<std::int64_t>(
        from + key + args.k_position - args.q_position - first, 0, rows);
  }
  /// Where weights that tiles read end for a query that sees `seen` keys: a
  /// tile's last query sees at most this many. Those past `seen` are zero.
  std::int64_t end_of_row(std::int64_t seen) const {
    return std::min<std::int64_t>(count, seen + kTileRows - 1);
  }
};

// Dot products of packed rows with packed columns.
template <typename S>
void multiply_scores(const Block& block, std::int64_t dim, const S* left,
                     const S* panels, S* scores) {
  constexpr std::int64_t kCols = kTileCols<S>;
  for (std::int64_t j = 0; j < block.count; j += kCols) {
    for (std::int64_t i = 0; i < block.rows; i += kTileRows) {
      const std::int64_t seen = block.seen_by_tile(i) - j;
      if (seen <= 0) continue;
      multiply_panel<1>(std::min<std::int64_t>(kTileRows, block.rows - i),
                        seen > kLanes<S> ? kCols : kLanes<S>, dim,
                        left + i * dim, kTileRows,
                        panels + (block.from + j) * dim, kCols, TileEnds<S>(),
                        scores + i * kScoreLd + j, kScoreLd);
    }
  }
}

// out[rows, dim] (+)= weights[rows, count] times the block's keys' rows of a
// matrix packed along its dims; the first block of keys is not added.
template <typename S>
void multiply_weights(const Block& block, const S* weights, const S* panels,
                      std::int64_t panel_rows, std::int64_t dim, S* out,
                      std::int64_t ld) {
  constexpr std::int64_t kCols = kTileCols<S>;
  const bool add = block.from != 0;
  for (std::int64_t c = 0; c < dim; c += kCols) {
    for (std::int64_t i = 0; i < block.rows; i += kTileRows) {
      S* const to = out + i * ld + c;
      TileEnds<S> ends;
      if (add) ends.partial = to, ends.partial_ld = ld;
      multiply_panel<kScoreLd>(
          std::min<std::int64_t>(kTileRows, block.rows - i), kCols,
          block.seen_by_tile(i), weights + i * kScoreLd, 1,
          panels + c * panel_rows + block.from * kCols, kCols, ends, to, ld);
    }
  }
}

// out[count, dim] += weights[rows, count]^T times the queries' rows packed
// along their dims.
template <typename S>
void multiply_transposed(const Block& block, const S* weights, const S* panels,
                         std::int64_t dim, S* out, std::int64_t ld) {
  constexpr std::int64_t kCols = kTileCols<S>;
  for (std::int64_t c = 0; c < dim; c += kCols) {
    for (std::int64_t j = 0; j < block.count; j += kTileRows) {
      const std::int64_t row = block.first_to_see(j);
      if (row == block.rows) continue;
      S* const to = out + j * ld + c;
      TileEnds<S> ends;
      ends.partial = to, ends.partial_ld = ld;
      multiply_panel<1>(std::min<std::int64_t>(kTileRows, block.count - j),
                        kCols, block.rows - row, weights + row * kScoreLd + j,
                        kScoreLd, panels + c * block.rows + row * kCols, kCols,
                        ends, to, ld);
    }
  }
}

// 0, 1, 2, ... for masks of the last vector of a row.
template <typename S>
Vec<S> lane_numbers() {
  alignas(64) S lanes[kLanes<S>];
  for (std::int64_t i = 0; i < kLanes<S>; ++i) lanes[i] = static_cast<S>(i);
  return Vec<S>::load_aligned(lanes);
}

// Applies fn(i, vector) to the first n elements of a padded row: lanes past n
// hold `rest`.
template <typename S, typename Fn>
void for_padded(std::int64_t n, const S* x, S rest, const Fn& fn) {
  std::int64_t i = 0;
  for (; i + kLanes<S> <= n; i += kLanes<S>) fn(i, load(x + i));
  if (i < n) {
    const auto inside = lane_numbers<S>() < Vec<S>(static_cast<S>(n - i));
    fn(i, xsimd::select(inside, load(x + i), Vec<S>(rest)));
  }
}

template <typename S>
S max_padded(const S* x, std::int64_t n) {
  constexpr S kLowest = -std::numeric_limits<S>::infinity();
  Vec<S> best(kLowest);
  for_padded(n, x, kLowest, [&](std::int64_t, const Vec<S>& v) {
    best = xsimd::max(best, v);
  });
  return max_lanes(best);
}

// x[i] = exp(x[i] - shift) for i < n, zeros up to `end`; returns the sum.
template <typename S>
S exp_padded(S* x, std::int64_t n, std::int64_t end, S shift) {
  Vec<S> sum(S(0));
  const Vec<S> by(shift);
  for_padded(n, x, -std::numeric_limits<S>::infinity(),
             [&](std::int64_t i, const Vec<S>& v) {
               const Vec<S> e = exp_vec(v - by);
               store(x + i, e);
               sum = sum + e;
             });
  for (std::int64_t i = round_up(n, kLanes<S>); i < end; i += kLanes<S>) {
    store(x + i, Vec<S>(S(0)));
  }
  return sum_lanes(sum);
}

// Which numbers the mask of dropout draws.
class Dropout {
 public:
  explicit Dropout(const AttentionArgs& args)
      : args_(args), threshold_(keep_threshold(args.dropout)) {
    if (args.dropout == 0.0) return;
    const GlobalView& view = args.dropout_view;
    SB_CHECK(args.dropout > 0.0 && args.dropout < 1.0, "attention: dropout ",
             args.dropout, "; it lies in [0, 1)");
    const Dims shape = {args.batch, args.heads, args.q_rows, args.k_rows};
    SB_CHECK(view.shape == shape && view.global_shape.size() == 4,
             "attention: the view of dropout must be [batch, heads, q_rows, "
             "k_rows], here ",
             args.batch, ", ", args.heads, ", ", args.q_rows, ", ",
             args.k_rows);
    for (std::size_t d = 0; d < 4; ++d) {
      offset_[d] = view.offset.empty() ? 0 : view.offset[d];
      step_[d] = view.step.empty() ? 1 : view.step[d];
      SB_CHECK(offset_[d] >= 0 && step_[d] >= 1 &&
                   (shape[d] == 0 || offset_[d] + (shape[d] - 1) * step_[d] <
                                         view.global_shape[d]),
               "attention: dim ", d,
               " of the view of dropout leaves the "
               "global size ",
               view.global_shape[d]);
    }
  }

  bool active() const { return args_.dropout != 0.0; }

  // mask[j] = 0 or 1 / (1 - p) for keys [from, from + n) of a row.
  template <typename S>
  void mask(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t from,
            std::int64_t n, S* mask) const {
    const Dims& global = args_.dropout_view.global_shape;
    const std::int64_t at[4] = {b, h, row, from};
    std::uint64_t index = 0;
    for (std::size_t d = 0; d < 4; ++d) {
      index = index * static_cast<std::uint64_t>(global[d]) +
              static_cast<std::uint64_t>(offset_[d] + step_[d] * at[d]);
    }
    std::uint32_t words[kKeyBlock];
    random_run(args_.dropout_key, index, static_cast<std::uint64_t>(step_[3]),
               n, words);
    const S kept = static_cast<S>(1.0 / (1.0 - args_.dropout));
    for (std::int64_t j = 0; j < n; ++j) {
      mask[j] = words[j] >= threshold_ ? kept : S(0);
    }
  }

 private:
  const AttentionArgs& args_;
  std::uint32_t threshold_;
  std::int64_t offset_[4] = {};
  std::int64_t step_[4] = {};
};

// How many of `keys` keys the query `row` of a head sees.
std::int64_t visible(const AttentionArgs& args, std::int64_t row,
                     std::int64_t keys) {
  return Block{args, row, 1, 0, keys}.seen_by(0);
}

void check_args(const char* kernel, AttentionArgs* args) {
  if (args->kv_heads == 0) args->kv_heads = args->heads;
  SB_CHECK(args->batch >= 0 && args->heads >= 0 && args->q_rows >= 0 &&
               args->k_rows >= 0 && args->head_dim >= 0,
           kernel, ": batch ", args->batch, ", heads ", args->heads,
           ", q_rows ", args->q_rows, ", k_rows ", args->k_rows, ", head_dim ",
           args->head_dim, "; none may be negative");
  SB_CHECK(args->heads == 0 || args->heads % args->kv_heads == 0, kernel, ": ",
           args->kv_heads, " key heads do not divide ", args->heads,
           " query heads");
}

// The forward of one thread: scratch, and a head at a time.
template <typename T>
class Forward {
 public:
  using S = Compute<T>;

  static std::int64_t scratch_size(const AttentionArgs& args) {
    const Sizes<S> sizes(args);
    return sizes.padded_keys * sizes.dim + sizes.padded_dim * sizes.keys +
           kQueryBlock * (sizes.dim + kScoreLd + sizes.padded_dim);
  }

  Forward(const AttentionArgs& args, const Dropout& dropout, S* scratch)
      : args_(args), dropout_(dropout), sizes_(args) {
    keys_ = scratch;
    values_ = keys_ + sizes_.padded_keys * sizes_.dim;
    queries_ = values_ + sizes_.padded_dim * sizes_.keys;
    scores_ = queries_ + kQueryBlock * sizes_.dim;
    sums_ = scores_ + kQueryBlock * kScoreLd;
  }

  void load_keys(const HeadRows<const T>& k, const HeadRows<const T>& v) {
    pack_across(k, sizes_.keys, sizes_.dim, keys_);
    pack_along(v, sizes_.keys, sizes_.dim, values_);
  }

  void run(std::int64_t b, std::int64_t h, const HeadRows<const T>& q,
           const HeadRows<T>& out, S* logsumexp) {
    for (std::int64_t i = 0; i < args_.q_rows; i += kQueryBlock) {
      const std::int64_t rows = std::min(kQueryBlock, args_.q_rows - i);
      pack_left<T>({q[i], q.row}, rows, sizes_.dim, static_cast<S>(args_.scale),
                   queries_);
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
      multiply_scores(block, sizes_.dim, queries_, keys_, scores_);
      for (std::int64_t i = 0; i < rows; ++i) soften_row(b, h, block, i);
      multiply_weights(block, scores_, values_, sizes_.keys, sizes_.dim, sums_,
                       sizes_.padded_dim);
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
    // A row that has seen nothing keeps weights of zero.
    const bool nothing = max == -std::numeric_limits<S>::infinity();
    const S sum = exp_padded(scores, nothing ? 0 : seen, end, max);
    if (block.from != 0 && max != old && !nothing) {
      const S fade = std::exp(old - max);
      total_[i] *= fade;
      S* const sums = sums_ + i * sizes_.padded_dim;
      map_range(sizes_.padded_dim, sums, sums,
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
      const S* const sums = sums_ + i * sizes_.padded_dim;
      T* const to = out[first + i];
      if (total_[i] == S(0)) {
        std::fill(to, to + sizes_.dim, narrow<T>(S(0)));
        continue;
      }
      const Vec<S> share(S(1) / total_[i]);
      std::int64_t c = 0;
      for (; c + kLanes<S> <= sizes_.dim; c += kLanes<S>) {
        store(to + c, load(sums + c) * share);
      }
      if (c < sizes_.dim) {
        store_part(to + c, load(sums + c) * share, sizes_.dim - c);
      }
    }
  }

  const AttentionArgs& args_;
  const Dropout& dropout_;
  Sizes<S> sizes_;
  S *keys_, *values_, *queries_, *scores_, *sums_;
  S max_[kQueryBlock], total_[kQueryBlock];
};

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
    return 2 * sizes.padded_keys * sizes.dim + sizes.padded_dim * sizes.keys +
           2 * sizes.padded_keys * sizes.padded_dim +
           kQueryBlock * (2 * sizes.dim + 3 * sizes.padded_dim + 2 * kScoreLd);
  }

  Backward(const AttentionArgs& args, const Dropout& dropout, S* scratch)
      : args_(args), dropout_(dropout), sizes_(args) {
    const auto take = [&scratch](std::int64_t n) {
      S* const taken = scratch;
      scratch += n;
      return taken;
    };
    keys_across_ = take(sizes_.padded_keys * sizes_.dim);
    values_across_ = take(sizes_.padded_keys * sizes_.dim);
    keys_along_ = take(sizes_.padded_dim * sizes_.keys);
    dk_ = take(sizes_.padded_keys * sizes_.padded_dim);
    dv_ = take(sizes_.padded_keys * sizes_.padded_dim);
    queries_left_ = take(kQueryBlock * sizes_.dim);
    dout_left_ = take(kQueryBlock * sizes_.dim);
    queries_along_ = take(kQueryBlock * sizes_.padded_dim);
    dout_along_ = take(kQueryBlock * sizes_.padded_dim);
    dq_ = take(kQueryBlock * sizes_.padded_dim);
    weights_ = take(kQueryBlock * kScoreLd);
    slopes_ = take(kQueryBlock * kScoreLd);
  }

  void load_keys(const HeadRows<const T>& k, const HeadRows<const T>& v) {
    pack_across(k, sizes_.keys, sizes_.dim, keys_across_);
    pack_across(v, sizes_.keys, sizes_.dim, values_across_);
    pack_along(k, sizes_.keys, sizes_.dim, keys_along_);
    const std::int64_t n = sizes_.padded_keys * sizes_.padded_dim;
    std::fill(dk_, dk_ + n, S(0));
    std::fill(dv_, dv_ + n, S(0));
  }

  void run(std::int64_t b, std::int64_t h, const HeadRows<const T>& q,
           const HeadRows<const T>& out, const HeadRows<const T>& dout,
           const S* logsumexp, const HeadRows<T>& dq, bool accumulate) {
    const S scale = static_cast<S>(args_.scale);
    for (std::int64_t i = 0; i < args_.q_rows; i += kQueryBlock) {
      const std::int64_t rows = std::min(kQueryBlock, args_.q_rows - i);
      pack_left<T>({q[i], q.row}, rows, sizes_.dim, scale, queries_left_);
      pack_left<T>({dout[i], dout.row}, rows, sizes_.dim, S(1), dout_left_);
      pack_along<T>({q[i], q.row}, rows, sizes_.dim, queries_along_);
      pack_along<T>({dout[i], dout.row}, rows, sizes_.dim, dout_along_);
      for (std::int64_t r = 0; r < rows; ++r) {
        delta_[r] = dot_row(out[i + r], dout[i + r], sizes_.dim);
        // A row that saw nothing has no weights: exp(score - inf) = 0.
        const S total = logsumexp[i + r];
        shift_[r] =
            total == -std::numeric_limits<S>::infinity() ? -total : total;
      }
      const bool any = run_block(b, h, i, rows);
      write_rows(dq_, rows, any ? scale : S(0), {dq[i], dq.row}, accumulate);
    }
  }

  void store_keys(const HeadRows<T>& dk, const HeadRows<T>& dv,
                  bool accumulate) {
    write_rows(dk_, sizes_.keys, static_cast<S>(args_.scale), dk, accumulate);
    write_rows(dv_, sizes_.keys, S(1), dv, accumulate);
  }

 private:
  // False when the queries see no key; then dq_ is not written.
  bool run_block(std::int64_t b, std::int64_t h, std::int64_t first,
                 std::int64_t rows) {
    const std::int64_t end = visible(args_, first + rows - 1, sizes_.keys);
    for (std::int64_t from = 0; from < end; from += kKeyBlock) {
      const Block block{args_, first, rows, from,
                        std::min(kKeyBlock, end - from)};
      multiply_scores(block, sizes_.dim, queries_left_, keys_across_, weights_);
      multiply_scores(block, sizes_.dim, dout_left_, values_across_, slopes_);
      for (std::int64_t i = 0; i < rows; ++i) differentiate_row(b, h, block, i);
      multiply_transposed(block, weights_, dout_along_, sizes_.dim,
                          dv_ + from * sizes_.padded_dim, sizes_.padded_dim);
      multiply_transposed(block, slopes_, queries_along_, sizes_.dim,
                          dk_ + from * sizes_.padded_dim, sizes_.padded_dim);
      multiply_weights(block, slopes_, keys_along_, sizes_.keys, sizes_.dim,
                       dq_, sizes_.padded_dim);
    }
    if (end == 0) std::fill(dq_, dq_ + rows * sizes_.padded_dim, S(0));
    return end > 0;
  }

  // Scores become weights, and gradients of weights those of scores.
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
                   const Vec<S> p = exp_vec(v - shift);
                   store(weights + j, p);
                   store(slopes + j, p * (load(slopes + j) - delta));
                 });
    } else {
      exp_padded(weights, seen, end, shift_[i]);
      S mask[kKeyBlock];
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

  // to = x * scale, or added to it.
  void write_rows(const S* x, std::int64_t rows, S scale, const HeadRows<T>& to,
                  bool accumulate) {
    const Vec<S> by(scale);
    for (std::int64_t r = 0; r < rows; ++r) {
      const S* const from = x + r * sizes_.padded_dim;
      T* const row = to[r];
      for (std::int64_t c = 0; c < sizes_.dim; c += kLanes<S>) {
        const std::int64_t n = std::min(kLanes<S>, sizes_.dim - c);
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
  S *queries_left_, *dout_left_, *queries_along_, *dout_along_, *dq_;
  S *weights_, *slopes_;
  S delta_[kQueryBlock], shift_[kQueryBlock];
};

// Heads of keys that one thread takes at least.
std::int64_t head_grain(const AttentionArgs& args) {
  const std::int64_t work =
      args.q_rows * args.k_rows * (args.heads / args.kv_heads) * args.head_dim;
  return std::max<std::int64_t>(1, 500000 / std::max<std::int64_t>(work, 1));
}

// Scratch for the threads that may run.
template <typename Head>
struct HeadScratch {
  using S = typename Head::S;
  HeadScratch(KernelContext& context, const AttentionArgs& args)
      : each(round_up(Head::scratch_size(args), 16)),
        scratch(context, each * sizeof(S) * max_threads()) {}
  S* at(int piece) const { return scratch.template as<S>() + piece * each; }
  std::int64_t each;
  Scratch scratch;
};

}  // namespace

void attention(KernelContext& context, DType dtype,
               const AttentionArgs& original, const void* q, const void* k,
               const void* v, void* out, void* logsumexp) {
  AttentionArgs args = original;
  check_args("attention", &args);
  const Dropout dropout(args);
  dispatch_floating("attention", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    if (args.batch * args.heads * args.q_rows == 0) return;
    const HeadScratch<Forward<T>> scratch(context, args);
    const std::int64_t group = args.heads / args.kv_heads;
    parallel_pieces(
        0, args.batch * args.kv_heads, head_grain(args),
        [&](int piece, std::int64_t from, std::int64_t to) {
          Forward<T> head(args, dropout, scratch.at(piece));
          for (std::int64_t i = from; i < to; ++i) {
            const std::int64_t b = i / args.kv_heads, kv = i % args.kv_heads;
            head.load_keys(head_rows(static_cast<const T*>(k), args.k, b, kv),
                           head_rows(static_cast<const T*>(v), args.v, b, kv));
            for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
              head.run(b, h, head_rows(static_cast<const T*>(q), args.q, b, h),
                       head_rows(static_cast<T*>(out), args.out, b, h),
                       static_cast<S*>(logsumexp) +
                           (b * args.heads + h) * args.q_rows);
            }
          }
        });
  });
}

void attention_backward(KernelContext& context, DType dtype,
                        const AttentionArgs& original,
                        const AttentionGradStrides& strides, const void* q,
                        const void* k, const void* v, const void* out,
                        const void* dout, const void* logsumexp, void* dq,
                        void* dk, void* dv, bool accumulate) {
  AttentionArgs args = original;
  check_args("attention_backward", &args);
  const Dropout dropout(args);
  dispatch_floating("attention_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    if (args.batch * args.heads == 0) return;
    const HeadScratch<Backward<T>> scratch(context, args);
    const std::int64_t group = args.heads / args.kv_heads;
    parallel_pieces(
        0, args.batch * args.kv_heads, head_grain(args),
        [&](int piece, std::int64_t from, std::int64_t to) {
          Backward<T> head(args, dropout, scratch.at(piece));
          for (std::int64_t i = from; i < to; ++i) {
            const std::int64_t b = i / args.kv_heads, kv = i % args.kv_heads;
            head.load_keys(head_rows(static_cast<const T*>(k), args.k, b, kv),
                           head_rows(static_cast<const T*>(v), args.v, b, kv));
            for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
              head.run(
                  b, h, head_rows(static_cast<const T*>(q), args.q, b, h),
                  head_rows(static_cast<const T*>(out), args.out, b, h),
                  head_rows(static_cast<const T*>(dout), strides.dout, b, h),
                  static_cast<const S*>(logsumexp) +
                      (b * args.heads + h) * args.q_rows,
                  head_rows(static_cast<T*>(dq), strides.dq, b, h), accumulate);
            }
            head.store_keys(head_rows(static_cast<T*>(dk), strides.dk, b, kv),
                            head_rows(static_cast<T*>(dv), strides.dv, b, kv),
                            accumulate);
          }
        });
  });
}

}  // namespace shardbook::kernels
