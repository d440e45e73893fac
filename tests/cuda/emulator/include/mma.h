#pragma once

// Tensor cores for the emulator: products of 16 x 16 x 16 by one warp.
//
// A matrix lies spread over the lanes of a warp, eight elements in each. On a
// GPU, which lane holds which element is not said; here lane l holds elements
// 8 l .. 8 l + 7 in row-major order, and code must not rely on it. Elements that
// nobody has loaded are NaN. Products are added in f32, in increasing k.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "tests/cuda/emulator/block.h"
#include "tests/cuda/emulator/shared_array.h"

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

constexpr int kPerLane = 8;

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert(M == 16 && N == 16 && K == 16,
                "the emulator knows products of 16 x 16 x 16");
  static_assert(std::is_same_v<Use, accumulator> == std::is_void_v<Layout>);
  static constexpr int num_elements = kPerLane;
  using element_type = T;
  T x[kPerLane];

  fragment() {
    for (T& value : x) value = std::numeric_limits<float>::quiet_NaN();
  }
};

template <typename Use, int M, int N, int K, typename T, typename Layout>
void fill_fragment(fragment<Use, M, N, K, T, Layout>& f,
                   std::type_identity_t<T> value) {
  for (T& x : f.x) x = value;
}

namespace internal {
// Where element i of this lane lies in memory.
inline std::int64_t offset(int i, unsigned stride, bool row_major) {
  const int flat = emulator::lane() * kPerLane + i;
  const int row = flat / 16, col = flat % 16;
  return row_major ? std::int64_t{row} * stride + col
                   : std::int64_t{col} * stride + row;
}
// All lanes must come to each of these functions.
inline void meet(const char* what, emulator::Site site) {
  emulator::warp_operation(what, 0xffffffffu, nullptr, nullptr, false, site);
}

template <typename A, typename B>
struct Product {
  const A* a;
  const B* b;
  float c[kPerLane], d[kPerLane];

  static void complete(const emulator::Lanes& lanes) {
    const auto at = [&](int row, int col) -> Product& {
      return *static_cast<Product*>(lanes.data[(row * 16 + col) / kPerLane]);
    };
    const auto element = [](int row, int col) {
      return (row * 16 + col) % kPerLane;
    };
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) {
        float sum = at(i, j).c[element(i, j)];
        for (int k = 0; k < 16; ++k) {
          sum += static_cast<float>(at(i, k).a->x[element(i, k)]) *
                 static_cast<float>(at(k, j).b->x[element(k, j)]);
        }
        at(i, j).d[element(i, j)] = sum;
      }
    }
  }
};

template <typename F, typename Address>
void load(F& f, Address from, unsigned stride, bool row_major) {
  for (int i = 0; i < kPerLane; ++i) {
    f.x[i] = static_cast<typename F::element_type>(
        from[offset(i, stride, row_major)]);
  }
}
}  // namespace internal

// `from` and `to` are pointers to global memory, or to elements of a
// SharedArray.
template <typename Use, int M, int N, int K, typename T, typename Layout,
          typename Address>
requires(!std::is_void_v<Layout>) void load_matrix_sync(
    fragment<Use, M, N, K, T, Layout>& f, Address from, unsigned stride,
    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  internal::meet("load_matrix_sync", {file, line});
  internal::load(f, from, stride, std::is_same_v<Layout, row_major>);
}
template <int M, int N, int K, typename T, typename Address>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, Address from,
                      unsigned stride, layout_t layout,
                      const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
  internal::meet("load_matrix_sync", {file, line});
  internal::load(f, from, stride, layout == mem_row_major);
}
template <int M, int N, int K, typename T, typename Address>
void store_matrix_sync(Address to, const fragment<accumulator, M, N, K, T>& f,
                       unsigned stride, layout_t layout,
                       const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  internal::meet("store_matrix_sync", {file, line});
  for (int i = 0; i < kPerLane; ++i) {
    to[internal::offset(i, stride, layout == mem_row_major)] = f.x[i];
  }
}

/// d = a b + c; d may be c.
template <typename T, typename LayoutA, typename LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
              const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b,
              const fragment<accumulator, 16, 16, 16, float>& c,
              const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
  using Product =
      internal::Product<std::decay_t<decltype(a)>, std::decay_t<decltype(b)>>;
  Product product{&a, &b, {}, {}};
  for (int i = 0; i < kPerLane; ++i) product.c[i] = c.x[i];
  emulator::warp_operation("mma_sync", 0xffffffffu, &product,
                           &Product::complete, false, {file, line});
  for (int i = 0; i < kPerLane; ++i) d.x[i] = product.d[i];
}

}  // namespace nvcuda::wmma
