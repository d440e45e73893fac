#pragma once

// What device code calls: barriers, shuffles, an atomic, minima and maxima.

#include <math.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/cuda/emulator/block.h"
#include "tests/cuda/emulator/shared_array.h"

#define EMULATOR_SITE \
  const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_SITE) { emulator::barrier({file, line}); }

namespace emulator {

struct Shuffle {
  std::uint64_t value, result;
  int from;  // a lane of the warp
};
inline void complete_shuffle(const Lanes& lanes) {
  for (void* lane : lanes) {
    auto* mine = static_cast<Shuffle*>(lane);
    mine->result = static_cast<const Shuffle*>(lanes[mine->from])->value;
  }
}

}  // namespace emulator

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, EMULATOR_SITE) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  if (mask != 0xffffffffu) emulator::fail("shuffle: give the full mask");
  emulator::Shuffle mine{0, 0, emulator::lane() ^ bits};
  std::memcpy(&mine.value, &value, sizeof(T));
  emulator::warp_operation("__shfl_xor_sync", &mine,
                           &emulator::complete_shuffle, {file, line});
  std::memcpy(&value, &mine.result, sizeof(T));
  return value;
}

// Threads change only where they wait, so nothing comes between reading and
// writing.
inline int atomicCAS(int* address, int expected, int value) {
  const int before = *address;
  if (before == expected) *address = value;
  return before;
}

// Device code finds min and max without a namespace.
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
