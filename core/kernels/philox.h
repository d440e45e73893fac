#pragma once

// The random bits of an element: Philox4x32-10 (Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3"), compiled for the host and for CUDA.

#include <array>
#include <cstdint>

#ifdef __CUDACC__
#define SHARDBOOK_HOST_DEVICE __host__ __device__
#else
#define SHARDBOOK_HOST_DEVICE
#endif

namespace shardbook::kernels {

/// Names a sequence: `seed` of the run, `stream` of the tensor or layer.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};

constexpr int kPhiloxRounds = 10;
constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr std::uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr std::uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

/// The block function: 4 x 32 random bits for a counter and a key.
SHARDBOOK_HOST_DEVICE constexpr std::array<std::uint32_t, 4> philox4x32(
    std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{kPhiloxMultiplier0} * c[0];
    const std::uint64_t p1 = std::uint64_t{kPhiloxMultiplier1} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ key[0],
         static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ key[1],
         static_cast<std::uint32_t>(p0)};
    key[0] += kPhiloxWeyl0;
    key[1] += kPhiloxWeyl1;
  }
  return c;
}

/// The bits of elements 4 * block .. 4 * block + 3.
SHARDBOOK_HOST_DEVICE constexpr std::array<std::uint32_t, 4> random_block(
    RandomKey key, std::uint64_t block) {
  return philox4x32({static_cast<std::uint32_t>(block),
                     static_cast<std::uint32_t>(block >> 32),
                     static_cast<std::uint32_t>(key.stream),
                     static_cast<std::uint32_t>(key.stream >> 32)},
                    {static_cast<std::uint32_t>(key.seed),
                     static_cast<std::uint32_t>(key.seed >> 32)});
}

/// The 32 random bits of one element.
SHARDBOOK_HOST_DEVICE constexpr std::uint32_t random_bits(
    RandomKey key, std::uint64_t element) {
  return random_block(key, element / 4)[element % 4];
}

}  // namespace shardbook::kernels
