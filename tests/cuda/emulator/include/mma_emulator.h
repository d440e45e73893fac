#pragma once

// The warp's instructions of core/kernels/cuda/mma.h on the host: products of
// 16 x 16 and 16 x 8 blocks, and the loads and copies that feed them. Which
// lane holds which element is written there.

#include <cstdint>
#include <cstring>

#include "tests/cuda/emulator/block.h"

namespace emulator {

/// One lane's part of C += A B.
struct BlockProduct {
  const std::uint32_t* a;  // 4 words
  std::uint32_t b[2];
  float* c;  // 4 elements
};

template <typename T>
float element_of_word(std::uint32_t word, int half) {
  const auto bits = static_cast<std::uint16_t>(word >> (16 * half));
  T x;
  std::memcpy(&x, &bits, sizeof(x));
  return static_cast<float>(x);
}

/// Runs once, when all lanes have come.
template <typename T>
void complete_product(const Lanes& lanes) {
  const auto lane = [&](int l) -> const BlockProduct& {
    return *static_cast<const BlockProduct*>(lanes[l]);
  };
  float a[16][16], b[16][8];
  for (int k = 0; k < 16; ++k) {
    const int t = k % 8 / 2;  // of the lane that holds it
    for (int row = 0; row < 16; ++row) {
      a[row][k] = element_of_word<T>(
          lane(row % 8 * 4 + t).a[row / 8 + k / 8 * 2], k % 2);
    }
    for (int column = 0; column < 8; ++column) {
      b[k][column] = element_of_word<T>(lane(column * 4 + t).b[k / 8], k % 2);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float& c = lane(row % 8 * 4 + column / 2).c[row / 8 * 2 + column % 2];
      for (int k = 0; k < 16; ++k) c += a[row][k] * b[k][column];
    }
  }
}

}  // namespace emulator

namespace shardbook::kernels::cuda {

template <typename T>
void multiply_block(float (&c)[4], const std::uint32_t (&a)[4],
                    std::uint32_t b0, std::uint32_t b1) {
  emulator::BlockProduct mine{a, {b0, b1}, c};
  emulator::warp_operation("mma", &mine, &emulator::complete_product<T>,
                           {__FILE__, __LINE__});
}

// Words of a row of a tile: see kRowWords.
template <int kDim, typename Tile>
void load_across(Tile& tile, int row, int column, std::uint32_t (&b)[4]) {
  const int lane = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    b[i] =
        tile[(row + lane / 4) * (kDim / 2 + 4) + column / 2 + 4 * i + lane % 4];
  }
}

template <int kDim, typename Tile>
void load_along(Tile& tile, int row, int column, std::uint32_t (&b)[4]) {
  const int lane = emulator::lane();
  const auto element = [&](int r, int c) -> std::uint32_t {
    return tile[r * (kDim / 2 + 4) + c / 2] >> (16 * (c % 2)) & 0xffff;
  };
  for (int i = 0; i < 4; ++i) {
    const int r = row + i % 2 * 8 + lane % 4 * 2;
    const int c = column + i / 2 * 8 + lane / 4;
    b[i] = element(r, c) | element(r + 1, c) << 16;
  }
}

// The copy is done at once; that a barrier is missing shows all the same.
template <typename Tile>
void copy_16_bytes(Tile& tile, int word, const void* from, bool inside) {
  if (word % 4 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    emulator::fail("cp.async: an address that 16 does not divide");
  }
  std::uint32_t words[4] = {};
  if (inside) std::memcpy(words, from, sizeof(words));
  for (int i = 0; i < 4; ++i) tile[word + i] = words[i];
}
inline void wait_for_copies() {}

}  // namespace shardbook::kernels::cuda
