#pragma once

// Starting kernels, and the few things that all of them use.
//
// Kernels that need no tensor cores are also compiled for the host and run by
// an emulator (tests/cuda/), which knows threads, blocks, barriers, warps and
// atomics. Such a kernel
// - is started by launch(), never by <<< >>>,
// - declares shared memory as `__shared__ SharedArray<float, 256> sums;`, so
//   that the emulator sees races,
// - uses __syncthreads(), __shfl_xor_sync with a full mask, and atomicCAS.
// The emulator has no others (device_functions.h).

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/kernels/cuda/status_check.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels::cuda {

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

#ifdef SHARDBOOK_CUDA_EMULATOR
using emulator::SharedArray;
#else
template <typename T, int N>
struct alignas(16) SharedArray {
  T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};
#endif

/// Starts `kernel` on the context's stream. `name` appears in error messages.
template <typename... Params, typename... Args>
void launch(KernelContext& context, const char* name, dim3 grid, dim3 block,
            void (*kernel)(Params...), Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const auto stream = stream_of(context.stream);
#ifdef SHARDBOOK_CUDA_EMULATOR
  emulator::launch(name, grid, block, stream, kernel,
                   static_cast<Params>(std::forward<Args>(args))...);
#else
  // clang-format off
  kernel<<<grid, block, 0, stream>>>(
      static_cast<Params>(std::forward<Args>(args))...);
  // clang-format on
#endif
  SHARDBOOK_CUDA(cudaGetLastError(), name, " with ", grid.x, " x ", grid.y,
                 " x ", grid.z, " blocks of ", block.x, " x ", block.y,
                 " threads");
}

/// Threads of a block for work on single elements.
constexpr int kBlock = 256;

__host__ __device__ inline std::int64_t ceil_div(std::int64_t a,
                                                 std::int64_t b) {
  return (a + b - 1) / b;
}
/// A block for each `per_block` of n.
inline unsigned blocks_of(std::int64_t n, std::int64_t per_block = 1) {
  return static_cast<unsigned>(ceil_div(n, per_block));
}

/// Blocks for n elements whose threads loop (first_index, index_step). Of many
/// elements each thread has several.
inline dim3 blocks_for(std::int64_t n, int per_block = kBlock) {
  constexpr std::int64_t kMost = 4096;
  return dim3(blocks_of(std::min(kMost, ceil_div(n, per_block))));
}

/// for (i = first_index(); i < n; i += index_step())
__device__ inline std::int64_t first_index() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t index_step() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

/// The type that a dtype is computed in: f64 in f64, integers in themselves,
/// all others in f32.
template <typename T>
struct ComputeOf {
  using type = T;
};
template <>
struct ComputeOf<__half> {
  using type = float;
};
template <>
struct ComputeOf<__nv_bfloat16> {
  using type = float;
};
template <typename T>
using Compute = typename ComputeOf<T>::type;

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ T widen(T x) {
  return x;
}

template <typename T>
__device__ double as_double(T x) {
  return static_cast<double>(widen(x));
}

/// Rounds to nearest even.
template <typename T>
__device__ T narrow(Compute<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

/// Calls body(T{}) with the C++ type of a floating dtype.
template <typename Body>
void with_floating(const char* name, DType dtype, Body body) {
  switch (dtype) {
    case DType::kF64:
      return body(double{});
    case DType::kF32:
      return body(float{});
    case DType::kBF16:
      return body(__nv_bfloat16{});
    case DType::kF16:
      return body(__half{});
    default:
      SB_FAIL(name, ": dtype ", dtype_name(dtype),
              "; give f64, f32, bf16 or f16");
  }
}

/// The same for every dtype.
template <typename Body>
void with_any(const char* name, DType dtype, Body body) {
  switch (dtype) {
    case DType::kI64:
      return body(std::int64_t{});
    case DType::kI32:
      return body(std::int32_t{});
    default:
      return with_floating(name, dtype, body);
  }
}

}  // namespace shardbook::kernels::cuda
