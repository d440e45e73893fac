#pragma once

// Shared by the attention kernels of CUDA: the shape as it is passed to the
// device, the mask of dropout, and reductions over a warp.

#include <cstdint>

#include "core/kernels/attention.h"
#include "core/kernels/attention_args.h"
#include "core/kernels/cuda/reduce_block.h"
#include "core/kernels/loops.h"
#include "core/kernels/philox.h"

namespace shardbook::kernels::cuda {

/// AttentionArgs without its vectors.
struct AttentionShape {
  explicit AttentionShape(const AttentionArgs& args)
      : batch(args.batch),
        heads(args.heads),
        kv_heads(args.kv_heads),
        q_rows(args.q_rows),
        k_rows(args.k_rows),
        head_dim(args.head_dim),
        lead(args.q_position),
        causal(args.causal),
        scale(args.scale),
        q(args.q),
        k(args.k),
        v(args.v),
        out(args.out) {}

  std::int64_t batch, heads, kv_heads, q_rows, k_rows, head_dim;
  std::int64_t lead;  ///< Position of query 0 minus that of key 0
  bool causal;
  double scale;
  HeadStrides q, k, v, out;

  /// Query i sees keys [0, visible_keys(i)).
  __host__ __device__ std::int64_t visible_keys(std::int64_t i) const {
    const std::int64_t end = causal ? i + lead + 1 : k_rows;
    return end < 0 ? 0 : end < k_rows ? end : k_rows;
  }
  /// Key j is seen by queries [first_query(j), q_rows).
  __host__ __device__ std::int64_t first_query(std::int64_t j) const {
    const std::int64_t first = causal ? j - lead : 0;
    return first < 0 ? 0 : first < q_rows ? first : q_rows;
  }
  __host__ __device__ std::int64_t kv_head(std::int64_t h) const {
    return h / (heads / kv_heads);
  }
};

/// The first row of a head.
template <typename T>
__device__ T* head_at(T* data, const HeadStrides& strides, std::int64_t b,
                      std::int64_t h) {
  return data + b * strides.batch + h * strides.head;
}

/// Which probabilities are kept: a pure function of the global index, as on the
/// CPU.
struct DropoutMask {
  explicit DropoutMask(const AttentionArgs& args)
      : active(args.dropout != 0.0),
        threshold(keep_threshold(args.dropout)),
        factor(1.0 / (1.0 - args.dropout)),
        key(args.dropout_key),
        place(checked_dropout(args)) {}

  bool active;
  std::uint32_t threshold;
  double factor;  ///< Factor of the kept probabilities
  RandomKey key;
  DropoutPlace place;

  /// The global index of element (b, h, i, j).
  __device__ std::uint64_t index(std::int64_t b, std::int64_t h, std::int64_t i,
                                 std::int64_t j) const {
    std::uint64_t at = place.offset[0] + place.step[0] * b;
    at = at * place.global[1] + place.offset[1] + place.step[1] * h;
    at = at * place.global[2] + place.offset[2] + place.step[2] * i;
    return at * place.global[3] + place.offset[3] + place.step[3] * j;
  }
  __device__ bool keeps(std::uint64_t index) const {
    return random_bits(key, index) >= threshold;
  }
};

__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline double exp_of(double x) { return ::exp(x); }
__device__ inline float log_of(float x) { return logf(x); }
__device__ inline double log_of(double x) { return ::log(x); }

/// A number below all scores.
template <typename S>
__device__ S minus_infinity() {
  return static_cast<S>(-HUGE_VAL);
}

/// The larger score; a NaN is passed over.
struct LargerScore {
  template <typename S>
  __device__ S operator()(S a, S b) const {
    return b > a ? b : a;
  }
};

/// Arguments of both versions of the backward.
template <typename T>
struct AttentionGrads {
  HeadStrides dq_strides, dk_strides, dv_strides, dout_strides;
  const T* dout;
  T* dq;
  T* dk;
  T* dv;
  bool accumulate;
};

/// delta[b, h, i] = sum over d of out * dout; a warp adds up a row.
template <typename T>
__global__ void attention_delta_kernel(AttentionShape s, HeadStrides dout_at,
                                       const T* out, const T* dout,
                                       Compute<T>* delta) {
  const std::int64_t row = first_index() / kWarp;
  if (row >= s.batch * s.heads * s.q_rows) return;  // all lanes or none
  const std::int64_t i = row % s.q_rows, h = row / s.q_rows % s.heads,
                     b = row / s.q_rows / s.heads;
  const T* const x = head_at(out, s.out, b, h) + i * s.out.row;
  const T* const y = head_at(dout, dout_at, b, h) + i * dout_at.row;
  Compute<T> sum = 0;
  for (std::int64_t d = threadIdx.x % kWarp; d < s.head_dim; d += kWarp) {
    sum += widen(x[d]) * widen(y[d]);
  }
  sum = join_lanes(sum, Sum());
  if (threadIdx.x % kWarp == 0) delta[row] = sum;
}

template <typename T>
void attention_delta(KernelContext& context, const AttentionShape& s,
                     const HeadStrides& dout_at, const T* out, const T* dout,
                     Compute<T>* delta) {
  const std::int64_t rows = s.batch * s.heads * s.q_rows;
  launch(context, "attention_delta", blocks_of(rows, kBlock / kWarp), kBlock,
         attention_delta_kernel<T>, s, dout_at, out, dout, delta);
}

// Tensor cores (attention_tensor_cores*.cu). T is __half or __nv_bfloat16.

/// Whether the device, the dtype, head_dim (32, 64, 96, 128) and the alignment
/// (16 bytes for every row) of all operands allow them.
bool attention_fits_tensor_cores(DType dtype, const AttentionArgs& args,
                                 const HeadStrides* others, int num_others,
                                 const void* const* pointers, int num_pointers);

template <typename T>
void attention_on_tensor_cores(KernelContext& context,
                               const AttentionShape& shape,
                               const DropoutMask& mask, const T* q, const T* k,
                               const T* v, T* out, float* logsumexp);

template <typename T>
void attention_backward_on_tensor_cores(
    KernelContext& context, const AttentionShape& shape,
    const DropoutMask& mask, const AttentionGrads<T>& grads, const T* q,
    const T* k, const T* v, const float* logsumexp, const float* delta);

}  // namespace shardbook::kernels::cuda
