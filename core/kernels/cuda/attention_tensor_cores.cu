// The forward of attention on tensor cores, for bf16 and f16: FlashAttention-2
// (Dao 2023), algorithm 1, and the choice of the version.
//
// A block of four warps owns 64 or 128 queries; each warp owns 16 or 32 of
// them, and keeps them, the sums of its output and the statistics of the
// softmax in registers. Tiles of keys and values pass through shared memory:
// while one is worked on, the next is copied.
//
//   scores = Q K^T            A from registers, B = K^T from shared memory
//   P = exp2(scores - max)    in the registers that hold the scores
//   out += P V                P rounded to 16 bits is A as it lies, B = V
//
// The barrier at the head of the loop does both: it makes the new tile visible
// to all warps, and ensures that no warp still reads the tile before it, which
// the next copy overwrites. A lane holds the columns 2t, 2t + 1 of each block
// of eight. So four neighbouring lanes hold a row.
//
// Cost: 4 q_rows k_rows head_dim flops per head, half of it when causal, and
// 2 (2 q_rows + 2 k_rows * tiles) head_dim bytes, mostly from the L2 cache.
// With head_dim 64, each fragment of K and V that is read from shared memory
// serves two products. mma.sync should reach half of an A100's peak and less of
// an H100's, which needs wgmma (not measured).

#include <cuda_runtime.h>

#include <cmath>

#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/attention_tensor_cores.h"
#include "core/kernels/cuda/mma_tiles.h"

namespace shardbook::kernels::cuda {

namespace {

// Queries [first, first + 16) of a warp: scores of a tile of keys become
// weights, and earlier sums are scaled down. A lane has two rows.
struct Softmax {
  // In powers of two; total is the lane's share.
  float largest[2] = {-HUGE_VALF, -HUGE_VALF}, total[2] = {};

  template <int kCols>
  __device__ void soften(const int (&seen)[2], float scale2,
                         float (&scores)[kCols / 8][4], float (&fade)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = largest[half];
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n][2 * half + e];
          const bool visible = 8 * n + column_of_lane() + e < seen[half];
          score = visible ? score * scale2 : minus_infinity<float>();
          now = score > now ? score : now;
        }
      }
      now = join_lanes<4>(now, LargerScore());
      // Rows that have seen nothing yet keep weights of exp2(-inf) = 0.
      const float base = now == minus_infinity<float>() ? 0.0f : now;
      fade[half] = exp2f(largest[half] - base);
      largest[half] = now;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n][2 * half + e];
          score = exp2f(score - base);
          sum += score;
        }
      }
      total[half] = total[half] * fade[half] + sum;
    }
  }
};

template <typename T, int kDim, int kBlocks, int kKeys>
__global__ void __launch_bounds__(kMmaThreads)
    attention_mma_kernel(AttentionShape s, DropoutMask mask, std::int64_t tiles,
                         const T* q, const T* k, const T* v, T* out,
                         float* logsumexp) {
#if SHARDBOOK_HAS_MMA
  constexpr int kWarpRows = 16 * kBlocks;
  __shared__ RowTile<2 * kKeys, kDim> keys;
  __shared__ RowTile<2 * kKeys, kDim> values;
  const std::int64_t tile = tiles - 1 - blockIdx.x % tiles;  // long ones first
  const std::int64_t h = blockIdx.x / tiles % s.heads;
  const std::int64_t b = blockIdx.x / tiles / s.heads;
  const std::int64_t block_first = tile * kMmaWarps * kWarpRows;
  const std::int64_t first = block_first + warp_of_block() * kWarpRows;
  const T* const head_keys = head_at(k, s.k, b, s.kv_head(h));
  const T* const head_values = head_at(v, s.v, b, s.kv_head(h));

  Word queries[kBlocks][kDim / 16][4];
  Softmax softmax[kBlocks];
  float sums[kBlocks][kDim / 8][4] = {};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    load_left<kDim>(head_at(q, s.q, b, h), s.q.row, first + 16 * i, s.q_rows,
                    queries[i]);
  }

  const auto copy = [&](std::int64_t n) {
    const int to = static_cast<int>(n % 2) * kKeys;
    copy_rows<kKeys, kDim, kMmaThreads>(head_keys, s.k.row, n * kKeys, s.k_rows,
                                        keys, to);
    copy_rows<kKeys, kDim, kMmaThreads>(head_values, s.v.row, n * kKeys,
                                        s.k_rows, values, to);
  };
  const std::int64_t last = block_first + kMmaWarps * kWarpRows - 1;
  const std::int64_t end =
      ceil_div(s.visible_keys(last < s.q_rows ? last : s.q_rows - 1), kKeys);
  if (end > 0) copy(0);
  for (std::int64_t n = 0; n < end; ++n) {
    wait_for_copies();
    __syncthreads();
    if (n + 1 < end) copy(n + 1);
    const int at = static_cast<int>(n % 2) * kKeys;
    float scores[kBlocks][kKeys / 8][4] = {};
    multiply_across<T, kDim, kKeys>(queries, keys, at, scores);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const std::int64_t row = first + 16 * i + row_of_lane();
      const int seen[2] = {seen_of_tile<kKeys>(s, row, n * kKeys),
                           seen_of_tile<kKeys>(s, row + 8, n * kKeys)};
      float fade[2];
      softmax[i].template soften<kKeys>(
          seen, static_cast<float>(s.scale * kLog2E), scores[i], fade);
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][d][e] *= fade[e / 2];
      }
      if (mask.active) drop_keys<kKeys>(mask, b, h, row, n * kKeys, scores[i]);
    }
    multiply_along<T, kDim, kKeys>(scores, values, at, sums);
  }

#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    float share[2];
    for (int half = 0; half < 2; ++half) {
      const float total = join_lanes<4>(softmax[i].total[half], Sum());
      const bool nothing = total == 0.0f;
      // Dropout's factor of the kept probabilities is applied here.
      share[half] = nothing ? 0.0f : static_cast<float>(mask.factor) / total;
      const std::int64_t row = first + 16 * i + row_of_lane() + 8 * half;
      if (column_of_lane() == 0 && row < s.q_rows) {
        logsumexp[(b * s.heads + h) * s.q_rows + row] =
            nothing ? minus_infinity<float>()
                    : (softmax[i].largest[half] + log2f(total)) /
                          static_cast<float>(kLog2E);
      }
    }
    store_rows<kDim>(sums[i], share, head_at(out, s.out, b, h), s.out.row,
                     first + 16 * i, s.q_rows, false);
  }
#endif
}

bool has_tensor_cores() {
  int device = 0, major = 0;
  SHARDBOOK_CUDA(cudaGetDevice(&device));
  SHARDBOOK_CUDA(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
      "device ", device);
  if (major < 8) return false;
#ifdef SHARDBOOK_CUDA_EMULATOR
  return true;
#else
  // Kernels of older PTX, which the driver compiles for this GPU, are empty.
  cudaFuncAttributes made{};
  SHARDBOOK_CUDA(
      cudaFuncGetAttributes(&made, attention_mma_kernel<__half, 64, 2, 64>));
  return made.ptxVersion >= 80;
#endif
}

}  // namespace

bool attention_fits_tensor_cores(DType dtype, const AttentionArgs& args,
                                 const HeadStrides* others, int num_others,
                                 const void* const* pointers,
                                 int num_pointers) {
  if (dtype != DType::kBF16 && dtype != DType::kF16) return false;
  if (args.head_dim == 0 || args.head_dim % 32 != 0 || args.head_dim > 128) {
    return false;
  }
  const auto aligned = [](const HeadStrides& x) {
    return (x.batch | x.head | x.row) % 8 == 0;
  };
  bool fits = aligned(args.q) && aligned(args.k) && aligned(args.v) &&
              aligned(args.out);
  for (int i = 0; i < num_others; ++i) fits = fits && aligned(others[i]);
  for (int i = 0; i < num_pointers; ++i) {
    fits = fits && reinterpret_cast<std::uintptr_t>(pointers[i]) % 16 == 0;
  }
  return fits && has_tensor_cores();
}

template <typename T>
void attention_on_tensor_cores(KernelContext& context, const AttentionShape& s,
                               const DropoutMask& mask, const T* q, const T* k,
                               const T* v, T* out, float* logsumexp) {
  with_head_dim(s.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kBlocks = kDim <= 64 ? 2 : 1;
    constexpr int kKeys = kDim <= 64 ? 64 : 32;
    constexpr int kQueries = kMmaWarps * 16 * kBlocks;
    const std::int64_t tiles = ceil_div(s.q_rows, kQueries);
    launch(context, "attention_mma", blocks_of(tiles * s.batch * s.heads),
           kMmaThreads, attention_mma_kernel<T, kDim, kBlocks, kKeys>, s, mask,
           tiles, q, k, v, out, logsumexp);
  });
}

template void attention_on_tensor_cores(KernelContext&, const AttentionShape&,
                                        const DropoutMask&, const __half*,
                                        const __half*, const __half*, __half*,
                                        float*);
template void attention_on_tensor_cores(KernelContext&, const AttentionShape&,
                                        const DropoutMask&,
                                        const __nv_bfloat16*,
                                        const __nv_bfloat16*,
                                        const __nv_bfloat16*, __nv_bfloat16*,
                                        float*);

}  // namespace shardbook::kernels::cuda
