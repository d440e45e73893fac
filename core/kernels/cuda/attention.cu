// Attention for every dtype, head size and layout, on the ordinary cores; and
// the choice between it and the version for tensor cores.

#include "core/kernels/attention.h"

#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/attention_tile.h"
#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

namespace {

template <int kChunks, typename T>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(AttentionShape s, DropoutMask mask, std::int64_t tiles,
                     std::int64_t chunks, const T* q, const T* k, const T* v,
                     T* out, Compute<T>* logsumexp) {
  using S = Compute<T>;
  __shared__ Tile<S> left;
  __shared__ Tile<S> right;
  __shared__ Tile<S> weights;
  const Place at = place_of_block(tiles, chunks, kChunks, s.heads, s.causal);
  const T* const keys = head_at(k, s.k, at.b, s.kv_head(at.h));
  const T* const values = head_at(v, s.v, at.b, s.kv_head(at.h));
  const auto queries =
      rows_from(head_at(q, s.q, at.b, at.h), s.q.row, at.first, s.q_rows);
  S sums[kChunks][kRows] = {};
  S largest[kRows], total[kRows];
  for (int r = 0; r < kRows; ++r) {
    largest[r] = minus_infinity<S>(), total[r] = 0;
  }
  const std::int64_t end = s.visible_keys(at.first + kTile - 1);
  for (std::int64_t from = 0; from < end; from += kTile) {
    S scores[kRows] = {};
    add_products(queries, rows_from(keys, s.k.row, from, s.k_rows), s.head_dim,
                 left, right, scores);
    const std::int64_t j = from + lane();
    const unsigned kept = kept_rows(mask, [&](int r) {
      return mask.index(at.b, at.h, at.first + first_row() + r, j);
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t i = at.first + first_row() + r;
      const bool seen = i < s.q_rows && j < s.visible_keys(i);
      const S score =
          seen ? scores[r] * static_cast<S>(s.scale) : minus_infinity<S>();
      const S old = largest[r];
      const S tile_largest = join_lanes(score, LargerScore());
      const S now = tile_largest > old ? tile_largest : old;
      const bool nothing = now == minus_infinity<S>();
      S weight = seen ? exp_of(score - now) : S(0);
      const S fade = nothing ? S(1) : exp_of(old - now);
      largest[r] = now;
      total[r] = total[r] * fade + join_lanes(weight, Sum());
#pragma unroll
      for (int c = 0; c < kChunks; ++c) sums[c][r] *= fade;
      weight =
          (kept >> r & 1) != 0 ? weight * static_cast<S>(mask.factor) : S(0);
      weights[(first_row() + r) * kLd + lane()] = weight;
    }
    add_weighted<kChunks>(weights, rows_from(values, s.v.row, from, s.k_rows),
                          at.column, s.head_dim, right, sums);
  }
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t i = at.first + first_row() + r;
    if (i >= s.q_rows) continue;
    const S share = total[r] == S(0) ? S(0) : S(1) / total[r];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const std::int64_t d = at.column + c * kTile + lane();
      if (d < s.head_dim) {
        head_at(out, s.out, at.b, at.h)[i * s.out.row + d] =
            narrow<T>(sums[c][r] * share);
      }
    }
    if (at.column == 0 && lane() == 0) {
      logsumexp[(at.b * s.heads + at.h) * s.q_rows + i] =
          total[r] == S(0) ? minus_infinity<S>()
                           : largest[r] + log_of(total[r]);
    }
  }
}

}  // namespace

void attention(KernelContext& context, DType dtype, const AttentionArgs& args,
               const void* q, const void* k, const void* v, void* out,
               void* logsumexp) {
  const DropoutMask mask(args);
  const AttentionShape s(args);
  const void* const pointers[] = {q, k, v, out};
  const bool tensor_cores =
      attention_fits_tensor_cores(dtype, args, nullptr, 0, pointers, 4);
  with_floating("attention", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const auto* const queries = static_cast<const T*>(q);
    const auto* const keys = static_cast<const T*>(k);
    const auto* const values = static_cast<const T*>(v);
    if constexpr (sizeof(T) == 2) {
      if (tensor_cores) {
        return attention_on_tensor_cores(context, s, mask, queries, keys,
                                         values, static_cast<T*>(out),
                                         static_cast<float*>(logsumexp));
      }
    }
    with_chunks(s.head_dim, [&](auto chunk, std::int64_t chunks) {
      const std::int64_t tiles = ceil_div(s.q_rows, kTile);
      launch(context, "attention",
             blocks_of(tiles * chunks * s.batch * s.heads), kThreads,
             attention_kernel<chunk.value, T>, s, mask, tiles, chunks, queries,
             keys, values, static_cast<T*>(out), static_cast<S*>(logsumexp));
    });
  });
}

SHARDBOOK_CUDA_KERNEL(attention);

}  // namespace shardbook::kernels::cuda
