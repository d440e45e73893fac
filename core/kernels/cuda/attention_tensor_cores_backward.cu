// The backward of attention on tensor cores, for bf16 and f16.
//
// Two kernels, each of which adds what it owns in a fixed order, without
// atomics: the first owns queries and walks over keys, the second owns keys and
// walks over the queries of all heads that share them. Both compute the
// weights anew from logsumexp.
//
//   P = exp2(scale Q K^T - logsumexp)   dS = P (dO V^T - delta)
//   first:   dQ = scale dS K
//   second:  dV = P^T dO, dK = scale dS^T Q, with tiles transposed (rows are
//            keys), so that P^T and dS^T are left factors as they lie
//
// A block of four warps owns 64 rows; a warp keeps its 16 rows of both left
// factors and its sums in registers, and the other rows pass through shared
// memory in two places by turns.
//
// Cost: 14 q_rows k_rows head_dim flops per head (7 products; one kernel with
// atomics would take 5), half of it when causal. It should reach two fifths of
// an A100's peak rate per product (not measured).

#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/attention_tensor_cores.h"
#include "core/kernels/cuda/mma_tiles.h"

namespace shardbook::kernels::cuda {

namespace {

// logsumexp in powers of two. A row that sees no key has -inf; with +inf its
// weights become zero.
[[maybe_unused]] __device__ inline float shift_of(float logsumexp) {
  return logsumexp == minus_infinity<float>()
             ? -minus_infinity<float>()
             : logsumexp * static_cast<float>(kLog2E);
}

template <typename T, int kDim, int kKeys>
__global__ void __launch_bounds__(kMmaThreads)
    attention_mma_dq_kernel(AttentionShape s, DropoutMask mask,
                            AttentionGrads<T> grads, std::int64_t tiles,
                            const T* q, const T* k, const T* v,
                            const float* logsumexp, const float* delta) {
#if SHARDBOOK_HAS_MMA
  __shared__ RowTile<2 * kKeys, kDim> keys;
  __shared__ RowTile<2 * kKeys, kDim> values;
  const std::int64_t tile = tiles - 1 - blockIdx.x % tiles;  // long ones first
  const std::int64_t h = blockIdx.x / tiles % s.heads;
  const std::int64_t b = blockIdx.x / tiles / s.heads;
  const std::int64_t block_first = tile * kMmaWarps * 16;
  const std::int64_t first = block_first + warp_of_block() * 16;
  const T* const head_keys = head_at(k, s.k, b, s.kv_head(h));
  const T* const head_values = head_at(v, s.v, b, s.kv_head(h));

  Word queries[1][kDim / 16][4], douts[1][kDim / 16][4];
  load_left<kDim>(head_at(q, s.q, b, h), s.q.row, first, s.q_rows, queries[0]);
  load_left<kDim>(head_at(grads.dout, grads.dout_strides, b, h),
                  grads.dout_strides.row, first, s.q_rows, douts[0]);
  float shift[2], mean[2];
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = first + row_of_lane() + 8 * half;
    const std::int64_t at = (b * s.heads + h) * s.q_rows + row;
    shift[half] =
        row < s.q_rows ? shift_of(logsumexp[at]) : -minus_infinity<float>();
    mean[half] = row < s.q_rows ? delta[at] : 0.0f;
  }
  const auto scale2 = static_cast<float>(s.scale * kLog2E);
  const auto factor = static_cast<float>(mask.factor);
  float sums[1][kDim / 8][4] = {};

  const auto copy = [&](std::int64_t n) {
    const int to = static_cast<int>(n % 2) * kKeys;
    copy_rows<kKeys, kDim, kMmaThreads>(head_keys, s.k.row, n * kKeys, s.k_rows,
                                        keys, to);
    copy_rows<kKeys, kDim, kMmaThreads>(head_values, s.v.row, n * kKeys,
                                        s.k_rows, values, to);
  };
  const std::int64_t last = block_first + kMmaWarps * 16 - 1;
  const std::int64_t end =
      ceil_div(s.visible_keys(last < s.q_rows ? last : s.q_rows - 1), kKeys);
  if (end > 0) copy(0);
  for (std::int64_t n = 0; n < end; ++n) {
    wait_for_copies();
    __syncthreads();  // see attention_tensor_cores.cu
    if (n + 1 < end) copy(n + 1);
    const int at = static_cast<int>(n % 2) * kKeys;
    float scores[1][kKeys / 8][4] = {}, slopes[1][kKeys / 8][4] = {};
    multiply_across<T, kDim, kKeys>(queries, keys, at, scores);
    multiply_across<T, kDim, kKeys>(douts, values, at, slopes);
    const std::int64_t row = first + row_of_lane();
    if (mask.active) drop_keys<kKeys>(mask, b, h, row, n * kKeys, slopes[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int seen = seen_of_tile<kKeys>(s, row + 8 * half, n * kKeys);
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& slope = slopes[0][i][2 * half + e];
          const float score = scores[0][i][2 * half + e];
          const bool visible = 8 * i + column_of_lane() + e < seen;
          const float weight =
              visible ? exp2f(score * scale2 - shift[half]) : 0.0f;
          slope = weight * (slope * factor - mean[half]);
        }
      }
    }
    multiply_along<T, kDim, kKeys>(slopes, keys, at, sums);
  }
  const auto scale = static_cast<float>(s.scale);
  const float scales[2] = {scale, scale};
  store_rows<kDim>(sums[0], scales, head_at(grads.dq, grads.dq_strides, b, h),
                   grads.dq_strides.row, first, s.q_rows, grads.accumulate);
#endif
}

template <typename T, int kDim, int kQueries>
__global__ void __launch_bounds__(kMmaThreads)
    attention_mma_dkv_kernel(AttentionShape s, DropoutMask mask,
                             AttentionGrads<T> grads, std::int64_t tiles,
                             const T* q, const T* k, const T* v,
                             const float* logsumexp, const float* delta) {
#if SHARDBOOK_HAS_MMA
  __shared__ RowTile<2 * kQueries, kDim> queries;
  __shared__ RowTile<2 * kQueries, kDim> douts;
  __shared__ SharedArray<float, 2 * kQueries> shift;
  __shared__ SharedArray<float, 2 * kQueries> mean;
  const std::int64_t kv = blockIdx.x / tiles % s.kv_heads;
  const std::int64_t b = blockIdx.x / tiles / s.kv_heads;
  const std::int64_t block_first = blockIdx.x % tiles * kMmaWarps * 16;
  const std::int64_t first = block_first + warp_of_block() * 16;

  Word keys[1][kDim / 16][4], values[1][kDim / 16][4];
  load_left<kDim>(head_at(k, s.k, b, kv), s.k.row, first, s.k_rows, keys[0]);
  load_left<kDim>(head_at(v, s.v, b, kv), s.v.row, first, s.k_rows, values[0]);
  const auto scale2 = static_cast<float>(s.scale * kLog2E);
  const auto factor = static_cast<float>(mask.factor);
  float dk[1][kDim / 8][4] = {}, dv[1][kDim / 8][4] = {};

  // Step n works on a tile of queries of one of the heads that share the keys.
  const std::int64_t group = s.heads / s.kv_heads;
  const std::int64_t start = s.first_query(block_first) / kQueries;
  const std::int64_t per_head = ceil_div(s.q_rows, kQueries) - start;
  const std::int64_t end = per_head * group;
  const auto head_of = [&](std::int64_t n) {
    return kv * group + n / per_head;
  };
  const auto query_of = [&](std::int64_t n) {
    return (start + n % per_head) * kQueries;
  };
  const auto copy = [&](std::int64_t n) {
    const int to = static_cast<int>(n % 2) * kQueries;
    const std::int64_t h = head_of(n), from = query_of(n);
    copy_rows<kQueries, kDim, kMmaThreads>(head_at(q, s.q, b, h), s.q.row, from,
                                           s.q_rows, queries, to);
    copy_rows<kQueries, kDim, kMmaThreads>(
        head_at(grads.dout, grads.dout_strides, b, h), grads.dout_strides.row,
        from, s.q_rows, douts, to);
    const int i = static_cast<int>(threadIdx.x);
    if (i < kQueries) {
      const std::int64_t at = (b * s.heads + h) * s.q_rows + from + i;
      const bool inside = from + i < s.q_rows;
      shift[to + i] =
          inside ? shift_of(logsumexp[at]) : -minus_infinity<float>();
      mean[to + i] = inside ? delta[at] : 0.0f;
    }
  };
  if (end > 0) copy(0);
  for (std::int64_t n = 0; n < end; ++n) {
    wait_for_copies();
    __syncthreads();  // see attention_tensor_cores.cu
    if (n + 1 < end) copy(n + 1);
    const int at = static_cast<int>(n % 2) * kQueries;
    float weights[1][kQueries / 8][4] = {}, slopes[1][kQueries / 8][4] = {};
    multiply_across<T, kDim, kQueries>(keys, queries, at, weights);
    multiply_across<T, kDim, kQueries>(values, douts, at, slopes);
    // Element e of block c is query column(c, e) of the tile, and key `key` or
    // key + 8.
    const auto column = [](int c, int e) {
      return 8 * c + column_of_lane() + e % 2;
    };
    const std::int64_t key = first + row_of_lane();
    std::uint32_t kept = ~0u;  // a bit for each element
    if (mask.active) {
      kept = 0;
#pragma unroll 1
      for (int i = 0; i < kQueries / 2; ++i) {
        const std::uint64_t at = mask.index(
            b, head_of(n), query_of(n) + column(i / 4, i), key + i % 4 / 2 * 8);
        kept |= static_cast<std::uint32_t>(mask.keeps(at)) << i;
      }
    }
#pragma unroll
    for (int c = 0; c < kQueries / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = column(c, e);
        const bool seen = key + e / 2 * 8 < s.visible_keys(query_of(n) + i);
        float& weight = weights[0][c][e];
        float& slope = slopes[0][c][e];
        weight = seen ? exp2f(weight * scale2 - shift[at + i]) : 0.0f;
        const bool is_kept = (kept >> (4 * c + e) & 1) != 0;
        slope = weight * ((is_kept ? slope * factor : 0.0f) - mean[at + i]);
        if (!is_kept) weight = 0.0f;
      }
    }
    multiply_along<T, kDim, kQueries>(weights, douts, at, dv);
    multiply_along<T, kDim, kQueries>(slopes, queries, at, dk);
  }
  const auto scale = static_cast<float>(s.scale);
  const float scales[2] = {scale, scale}, factors[2] = {factor, factor};
  store_rows<kDim>(dk[0], scales, head_at(grads.dk, grads.dk_strides, b, kv),
                   grads.dk_strides.row, first, s.k_rows, grads.accumulate);
  store_rows<kDim>(dv[0], factors, head_at(grads.dv, grads.dv_strides, b, kv),
                   grads.dv_strides.row, first, s.k_rows, grads.accumulate);
#endif
}

}  // namespace

template <typename T>
void attention_backward_on_tensor_cores(
    KernelContext& context, const AttentionShape& s, const DropoutMask& mask,
    const AttentionGrads<T>& grads, const T* q, const T* k, const T* v,
    const float* logsumexp, const float* delta) {
  with_head_dim(s.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kKeys = kDim <= 64 ? 64 : 32;
    constexpr int kQueries = kDim <= 64 ? 32 : 16;
    constexpr int kOwned = kMmaWarps * 16;
    const std::int64_t q_tiles = ceil_div(s.q_rows, kOwned);
    launch(context, "attention_mma_dq", blocks_of(q_tiles * s.batch * s.heads),
           kMmaThreads, attention_mma_dq_kernel<T, kDim, kKeys>, s, mask, grads,
           q_tiles, q, k, v, logsumexp, delta);
    const std::int64_t k_tiles = ceil_div(s.k_rows, kOwned);
    launch(context, "attention_mma_dkv",
           blocks_of(k_tiles * s.batch * s.kv_heads), kMmaThreads,
           attention_mma_dkv_kernel<T, kDim, kQueries>, s, mask, grads, k_tiles,
           q, k, v, logsumexp, delta);
  });
}

template void attention_backward_on_tensor_cores(
    KernelContext&, const AttentionShape&, const DropoutMask&,
    const AttentionGrads<__half>&, const __half*, const __half*, const __half*,
    const float*, const float*);
template void attention_backward_on_tensor_cores(
    KernelContext&, const AttentionShape&, const DropoutMask&,
    const AttentionGrads<__nv_bfloat16>&, const __nv_bfloat16*,
    const __nv_bfloat16*, const __nv_bfloat16*, const float*, const float*);

}  // namespace shardbook::kernels::cuda
