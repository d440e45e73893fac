#pragma once

// Several neighbouring elements in one load or store. A GPU moves memory
// fastest when each thread moves 16 bytes at once.

#include <cstdint>
#include <type_traits>

#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

template <typename T, int N>
struct alignas(N * sizeof(T)) AlignedVector {
  T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};

constexpr int kVectorBytes = 16;
/// Elements in one vector.
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

/// Whether vectors of `bytes` may be loaded from all the pointers.
template <typename... Pointers>
bool is_aligned(int bytes, const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % bytes == 0) && ...);
}

/// x[0 .. N), where x is aligned to N elements.
template <int N, typename T>
__device__ AlignedVector<T, N> load_vector(const T* x) {
  return *reinterpret_cast<const AlignedVector<T, N>*>(x);
}
template <int N, typename T>
__device__ void store_vector(T* x, const AlignedVector<T, N>& v) {
  *reinterpret_cast<AlignedVector<T, N>*>(x) = v;
}

/// The same where x may be unaligned or fewer than N elements are left:
/// elements from `count` on are `rest`. Which element lies where does not
/// depend on `aligned`, so a sum over vectors does not either.
template <int N, typename T>
__device__ AlignedVector<T, N> load_vector(const T* x, bool aligned,
                                           std::int64_t count, T rest = T{}) {
  if (aligned && count >= N) return load_vector<N>(x);
  AlignedVector<T, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = j < count ? x[j] : rest;
  return v;
}
template <int N, typename T>
__device__ void store_vector(T* x, const AlignedVector<T, N>& v, bool aligned,
                             std::int64_t count) {
  if (aligned && count >= N) return store_vector<N>(x, v);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j < count) x[j] = v[j];
  }
}

/// Calls body(width) with the constant number of neighbouring columns that one
/// thread works on; `aligned` says that all arrays begin at whole vectors.
template <typename T, typename Body>
void with_width(std::int64_t cols, bool aligned, Body body) {
  if (aligned && cols % kLanes<T> == 0) {
    body(std::integral_constant<int, kLanes<T>>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

}  // namespace shardbook::kernels::cuda
