#pragma once

// Products on tensor cores: what one warp does with 16 x 16 blocks of 16-bit
// elements, in the layout that PTX documents for mma.m16n8k16, and the copies
// that feed it. A word holds two neighbouring elements, the first in its low
// half. With g = lane / 4 and t = lane % 4, a lane holds
//
//   A [16 x 16]  a[0] (g, 2t..)   a[1] (g+8, 2t..)   a[2] (g, 2t+8..)
//                a[3] (g+8, 2t+8..)
//   B [16 x 8]   b0 (2t.., g)     b1 (2t+8.., g)
//   C [16 x 8]   c[0..1] (g, 2t..)   c[2..3] (g+8, 2t..)        in f32
//
// Two neighbouring blocks of C, rounded to 16 bits, are a block of A: the
// probabilities of attention never leave the registers.
//
// The instructions need sm_80. The emulator (tests/cuda/) has functions of its
// own for them, with the same layout.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/kernels/cuda/kernel_launch.h"

#ifdef SHARDBOOK_CUDA_EMULATOR
#include <mma_emulator.h>
#endif

#if defined(SHARDBOOK_CUDA_EMULATOR) || !defined(__CUDA_ARCH__) || \
    __CUDA_ARCH__ >= 800
#define SHARDBOOK_HAS_MMA 1
#else
#define SHARDBOOK_HAS_MMA 0
#endif

namespace shardbook::kernels::cuda {

using Word = std::uint32_t;

/// Rows of kDim 16-bit elements in shared memory. Four words more per row put
/// the eight rows of a block into different banks.
template <int kDim>
constexpr int kRowWords = kDim / 2 + 4;
template <int kRows, int kDim>
using RowTile = SharedArray<Word, kRows * kRowWords<kDim>>;

template <typename T>
__device__ std::uint16_t bits_of(T x) {
  std::uint16_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
/// Two elements as a word.
template <typename T>
__device__ Word pack(float low, float high) {
#ifdef __CUDA_ARCH__  // one instruction
  Word word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    std::memcpy(&word, &pair, sizeof(word));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    std::memcpy(&word, &pair, sizeof(word));
  }
  return word;
#else
  return bits_of(narrow<T>(low)) | Word{bits_of(narrow<T>(high))} << 16;
#endif
}
/// Two elements of global memory, at an address divisible by 4.
template <typename T>
__device__ Word load_word(const T* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const Word*>(from);
#else
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
#endif
}
template <typename T>
__device__ void store_word(T* to, Word word) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<Word*>(to) = word;
#else
  std::memcpy(to, &word, sizeof(word));
#endif
}

/// The elements of a word.
template <typename T>
__device__ float unpack(Word word, int half) {
  const auto bits = static_cast<std::uint16_t>(word >> (16 * half));
  T x;
  std::memcpy(&x, &bits, sizeof(x));
  return widen(x);
}

#if !defined(SHARDBOOK_CUDA_EMULATOR) && SHARDBOOK_HAS_MMA

/// C += A B by one warp; T is __half or __nv_bfloat16.
template <typename T>
__device__ void multiply_block(float (&c)[4], const Word (&a)[4], Word b0,
                               Word b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ inline unsigned shared_address(const Word& word) {
  return static_cast<unsigned>(__cvta_generic_to_shared(&word));
}

/// B = X^T for 8 rows of X and 32 of its columns: {b[0], b[1]} for the first 16
/// columns, {b[2], b[3]} for the others.
template <int kDim, typename Tile>
__device__ void load_across(Tile& tile, int row, int column, Word (&b)[4]) {
  const int lane = threadIdx.x % kWarp;
  const unsigned address = shared_address(
      tile[(row + lane % 8) * kRowWords<kDim> + column / 2 + lane / 8 * 4]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address)
               : "memory");
}

/// B = X for 16 rows of X and 16 of its columns: {b[0], b[1]} for the first 8
/// columns, {b[2], b[3]} for the others.
template <int kDim, typename Tile>
__device__ void load_along(Tile& tile, int row, int column, Word (&b)[4]) {
  const int lane = threadIdx.x % kWarp;
  const unsigned address = shared_address(
      tile[(row + lane % 16) * kRowWords<kDim> + column / 2 + lane / 16 * 4]);
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
      : "r"(address)
      : "memory");
}

/// Starts the copy of 16 bytes, or of zeros when not `inside`.
template <typename Tile>
__device__ void copy_16_bytes(Tile& tile, int word, const void* from,
                              bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   shared_address(tile[word])),
               "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
               : "memory");
}

/// Waits for all copies that this thread has started.
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif

}  // namespace shardbook::kernels::cuda
