// The gradients of attention on the ordinary cores.
//
//   P = exp(scale Q K^T - logsumexp)    dP = dO V^T
//   dS = P (dP - rowsum(dO O))          dQ = scale dS K
//   dV = P^T dO                         dK = scale dS^T Q

#include "core/kernels/attention.h"
#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/attention_tile.h"
#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

namespace {

// A row without visible keys has logsumexp -inf and no weights.
template <typename S>
__device__ S weight_of(S score, S logsumexp) {
  return logsumexp == minus_infinity<S>() ? S(0) : exp_of(score - logsumexp);
}

// dq = scale dS K. A block owns queries.
template <int kChunks, typename T>
__global__ void __launch_bounds__(kThreads)
    attention_dq_kernel(AttentionShape s, DropoutMask mask,
                        AttentionGrads<T> grads, std::int64_t tiles,
                        std::int64_t chunks, const T* q, const T* k, const T* v,
                        const Compute<T>* logsumexp, const Compute<T>* delta) {
  using S = Compute<T>;
  __shared__ Tile<S> left;
  __shared__ Tile<S> right;
  __shared__ Tile<S> slopes;
  const Place at = place_of_block(tiles, chunks, kChunks, s.heads, s.causal);
  const T* const keys = head_at(k, s.k, at.b, s.kv_head(at.h));
  const T* const values = head_at(v, s.v, at.b, s.kv_head(at.h));
  const auto queries =
      rows_from(head_at(q, s.q, at.b, at.h), s.q.row, at.first, s.q_rows);
  const auto douts =
      rows_from(head_at(grads.dout, grads.dout_strides, at.b, at.h),
                grads.dout_strides.row, at.first, s.q_rows);
  const std::int64_t stats = (at.b * s.heads + at.h) * s.q_rows;
  S sums[kChunks][kRows] = {};
  const std::int64_t end = s.visible_keys(at.first + kTile - 1);
  for (std::int64_t from = 0; from < end; from += kTile) {
    const auto some_keys = rows_from(keys, s.k.row, from, s.k_rows);
    S scores[kRows] = {}, dweights[kRows] = {};
    add_products(queries, some_keys, s.head_dim, left, right, scores);
    add_products(douts, rows_from(values, s.v.row, from, s.k_rows), s.head_dim,
                 left, right, dweights);
    const std::int64_t j = from + lane();
    const unsigned kept = kept_rows(mask, [&](int r) {
      return mask.index(at.b, at.h, at.first + first_row() + r, j);
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t i = at.first + first_row() + r;
      const bool seen = i < s.q_rows && j < s.visible_keys(i);
      S slope = 0;
      if (seen) {
        const S factor =
            (kept >> r & 1) != 0 ? static_cast<S>(mask.factor) : S(0);
        slope = weight_of(scores[r] * static_cast<S>(s.scale),
                          logsumexp[stats + i]) *
                (factor * dweights[r] - delta[stats + i]);
      }
      slopes[(first_row() + r) * kLd + lane()] = slope;
    }
    add_weighted<kChunks>(slopes, some_keys, at.column, s.head_dim, right,
                          sums);
  }
  T* const dq = head_at(grads.dq, grads.dq_strides, at.b, at.h);
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t i = at.first + first_row() + r;
    if (i >= s.q_rows) continue;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const std::int64_t d = at.column + c * kTile + lane();
      if (d < s.head_dim) {
        store(dq + i * grads.dq_strides.row + d,
              sums[c][r] * static_cast<S>(s.scale), grads.accumulate);
      }
    }
  }
}

// dk = scale dS^T Q and dv = P^T dO. A block owns keys, and walks over the
// query heads that share them. Tiles are transposed: rows are keys.
template <int kChunks, typename T>
__global__ void __launch_bounds__(kThreads)
    attention_dkv_kernel(AttentionShape s, DropoutMask mask,
                         AttentionGrads<T> grads, std::int64_t tiles,
                         std::int64_t chunks, const T* q, const T* k,
                         const T* v, const Compute<T>* logsumexp,
                         const Compute<T>* delta) {
  using S = Compute<T>;
  __shared__ Tile<S> left;
  __shared__ Tile<S> right;
  __shared__ Tile<S> weights;
  __shared__ Tile<S> slopes;
  const Place at = place_of_block(tiles, chunks, kChunks, s.kv_heads, false);
  const auto keys =
      rows_from(head_at(k, s.k, at.b, at.h), s.k.row, at.first, s.k_rows);
  const auto values =
      rows_from(head_at(v, s.v, at.b, at.h), s.v.row, at.first, s.k_rows);
  S dk_sums[kChunks][kRows] = {}, dv_sums[kChunks][kRows] = {};
  const std::int64_t group = s.heads / s.kv_heads;
  for (std::int64_t h = at.h * group; h < (at.h + 1) * group; ++h) {
    const std::int64_t stats = (at.b * s.heads + h) * s.q_rows;
    for (std::int64_t from = s.first_query(at.first) / kTile * kTile;
         from < s.q_rows; from += kTile) {
      const auto queries =
          rows_from(head_at(q, s.q, at.b, h), s.q.row, from, s.q_rows);
      const auto douts =
          rows_from(head_at(grads.dout, grads.dout_strides, at.b, h),
                    grads.dout_strides.row, from, s.q_rows);
      S scores[kRows] = {}, dweights[kRows] = {};
      add_products(keys, queries, s.head_dim, left, right, scores);
      add_products(values, douts, s.head_dim, left, right, dweights);
      const std::int64_t i = from + lane();
      const unsigned kept = kept_rows(mask, [&](int r) {
        return mask.index(at.b, h, i, at.first + first_row() + r);
      });
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t j = at.first + first_row() + r;
        S weight = 0, slope = 0;
        if (i < s.q_rows && j < s.visible_keys(i)) {
          weight = weight_of(scores[r] * static_cast<S>(s.scale),
                             logsumexp[stats + i]);
          const S factor =
              (kept >> r & 1) != 0 ? static_cast<S>(mask.factor) : S(0);
          slope = weight * (factor * dweights[r] - delta[stats + i]);
          weight *= factor;
        }
        weights[(first_row() + r) * kLd + lane()] = weight;
        slopes[(first_row() + r) * kLd + lane()] = slope;
      }
      add_weighted<kChunks>(weights, douts, at.column, s.head_dim, right,
                            dv_sums);
      add_weighted<kChunks>(slopes, queries, at.column, s.head_dim, right,
                            dk_sums);
    }
  }
  T* const dk = head_at(grads.dk, grads.dk_strides, at.b, at.h);
  T* const dv = head_at(grads.dv, grads.dv_strides, at.b, at.h);
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t j = at.first + first_row() + r;
    if (j >= s.k_rows) continue;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const std::int64_t d = at.column + c * kTile + lane();
      if (d < s.head_dim) {
        store(dk + j * grads.dk_strides.row + d,
              dk_sums[c][r] * static_cast<S>(s.scale), grads.accumulate);
        store(dv + j * grads.dv_strides.row + d, dv_sums[c][r],
              grads.accumulate);
      }
    }
  }
}

}  // namespace

void attention_backward(KernelContext& context, DType dtype,
                        const AttentionArgs& args,
                        const AttentionGradStrides& strides, const void* q,
                        const void* k, const void* v, const void* out,
                        const void* dout, const void* logsumexp, void* dq,
                        void* dk, void* dv, bool accumulate) {
  const DropoutMask mask(args);
  const AttentionShape s(args);
  const HeadStrides others[] = {strides.dq, strides.dk, strides.dv,
                                strides.dout};
  const void* const pointers[] = {q, k, v, out, dout, dq, dk, dv};
  const bool tensor_cores =
      attention_fits_tensor_cores(dtype, args, others, 4, pointers, 8);
  with_floating("attention_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    const auto* const queries = static_cast<const T*>(q);
    const auto* const keys = static_cast<const T*>(k);
    const auto* const values = static_cast<const T*>(v);
    const auto* const totals = static_cast<const S*>(logsumexp);
    const AttentionGrads<T> grads{strides.dq,
                                  strides.dk,
                                  strides.dv,
                                  strides.dout,
                                  static_cast<const T*>(dout),
                                  static_cast<T*>(dq),
                                  static_cast<T*>(dk),
                                  static_cast<T*>(dv),
                                  accumulate};
    Scratch scratch(context, s.batch * s.heads * s.q_rows * sizeof(S));
    S* const delta = scratch.as<S>();
    attention_delta(context, s, strides.dout, static_cast<const T*>(out),
                    grads.dout, delta);
    if constexpr (sizeof(T) == 2) {
      if (tensor_cores) {
        return attention_backward_on_tensor_cores(
            context, s, mask, grads, queries, keys, values, totals, delta);
      }
    }
    with_chunks(s.head_dim, [&](auto chunk, std::int64_t chunks) {
      const std::int64_t q_tiles = ceil_div(s.q_rows, kTile);
      launch(context, "attention_dq",
             blocks_of(q_tiles * chunks * s.batch * s.heads), kThreads,
             attention_dq_kernel<chunk.value, T>, s, mask, grads, q_tiles,
             chunks, queries, keys, values, totals, delta);
      const std::int64_t k_tiles = ceil_div(s.k_rows, kTile);
      launch(context, "attention_dkv",
             blocks_of(k_tiles * chunks * s.batch * s.kv_heads), kThreads,
             attention_dkv_kernel<chunk.value, T>, s, mask, grads, k_tiles,
             chunks, queries, keys, values, totals, delta);
    });
  });
}

SHARDBOOK_CUDA_KERNEL(attention_backward);

}  // namespace shardbook::kernels::cuda
