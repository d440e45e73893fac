#pragma once

// What device code calls: barriers, warps, atomics, bits and mathematics.

#include <math.h>

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/cuda/emulator/block.h"
#include "tests/cuda/emulator/shared_array.h"

#define EMULATOR_SITE \
  const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- Barriers.

inline void __syncthreads(EMULATOR_SITE) { emulator::barrier({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
  emulator::warp_operation("__syncwarp", mask, nullptr, nullptr, true,
                           {file, line});
}
// One thread runs at a time, and sees what all others wrote.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
[[noreturn]] inline void __trap() { emulator::fail("__trap()"); }

// ---- Warps.

namespace emulator {

struct Shuffle {
  std::uint64_t value, result;
  int from;  // a lane of the warp
};
inline void complete_shuffle(const Lanes& lanes) {
  for (int l = 0; l < kWarpSize; ++l) {
    auto* mine = static_cast<Shuffle*>(lanes.data[l]);
    if (mine == nullptr) continue;
    const auto* other = static_cast<const Shuffle*>(lanes.data[mine->from]);
    if (other == nullptr) {
      fail("shuffle: lane " + std::to_string(l) + " reads lane " +
           std::to_string(mine->from) + ", which the mask leaves out");
    }
    mine->result = other->value;
  }
}
// An element of a SharedArray is passed by its value.
template <typename T>
struct Plain {
  using type = T;
};
template <typename T>
struct Plain<SharedElement<T>> {
  using type = T;
};
template <typename Given, typename T = typename Plain<Given>::type>
T shuffle(const char* what, unsigned mask, const Given& given, int from,
          Site site) {
  T value = given;
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  Shuffle mine{0, 0, from};
  std::memcpy(&mine.value, &value, sizeof(T));
  warp_operation(what, mask, &mine, &complete_shuffle, false, site);
  std::memcpy(&value, &mine.result, sizeof(T));
  return value;
}
// The first lane of the part of `width` lanes that this lane is in.
inline int first_lane(int width) { return lane() & ~(width - 1); }

struct Vote {
  bool mine;
  unsigned votes;
};
inline void complete_vote(const Lanes& lanes) {
  unsigned votes = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    const auto* vote = static_cast<const Vote*>(lanes.data[l]);
    if (vote != nullptr && vote->mine) votes |= 1u << l;
  }
  for (void* vote : lanes.data) {
    if (vote != nullptr) static_cast<Vote*>(vote)->votes = votes;
  }
}
inline unsigned vote(const char* what, unsigned mask, bool mine, Site site) {
  Vote votes{mine, 0};
  warp_operation(what, mask, &votes, &complete_vote, false, site);
  return votes.votes;
}

}  // namespace emulator

template <typename T>
auto __shfl_sync(unsigned mask, const T& value, int source, int width = 32,
                 EMULATOR_SITE) {
  return emulator::shuffle("__shfl_sync", mask, value,
                           emulator::first_lane(width) + (source & (width - 1)),
                           {file, line});
}
template <typename T>
auto __shfl_xor_sync(unsigned mask, const T& value, int bits, int width = 32,
                     EMULATOR_SITE) {
  const int from = emulator::lane() ^ bits;
  const bool is_inside = from < emulator::first_lane(width) + width;
  return emulator::shuffle("__shfl_xor_sync", mask, value,
                           is_inside ? from : emulator::lane(), {file, line});
}
template <typename T>
auto __shfl_up_sync(unsigned mask, const T& value, unsigned distance,
                    int width = 32, EMULATOR_SITE) {
  const int from = emulator::lane() - static_cast<int>(distance);
  const bool is_inside = from >= emulator::first_lane(width);
  return emulator::shuffle("__shfl_up_sync", mask, value,
                           is_inside ? from : emulator::lane(), {file, line});
}
template <typename T>
auto __shfl_down_sync(unsigned mask, const T& value, unsigned distance,
                      int width = 32, EMULATOR_SITE) {
  const int from = emulator::lane() + static_cast<int>(distance);
  const bool is_inside = from < emulator::first_lane(width) + width;
  return emulator::shuffle("__shfl_down_sync", mask, value,
                           is_inside ? from : emulator::lane(), {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote("__ballot_sync", mask, predicate != 0, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote("__any_sync", mask, predicate != 0, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote("__all_sync", mask, predicate != 0, {file, line}) ==
         mask;
}

// ---- Atomics, on global and on shared memory. Threads change only where they
// ---- wait, so nothing comes between reading and writing.

namespace emulator {

template <typename T, typename... Ts>
concept OneOf = (std::same_as<T, Ts> || ...);
template <typename T>
concept Addable = OneOf<T, int, unsigned, unsigned long long, float, double>;
template <typename T>
concept Comparable = OneOf<T, int, unsigned, unsigned long long, long long>;
template <typename T>
concept Exchangeable = OneOf<T, int, unsigned, unsigned long long, float>;
template <typename T>
concept Swappable = OneOf<T, int, unsigned, unsigned long long, unsigned short>;

template <typename T>
T& target(T* address) {
  return *address;
}
template <typename T>
T& target(const SharedPointer<T>& address) {
  return address.touched(Access::kAtomic);
}
template <typename T, typename Change>
T update(T& at, Change change) {
  const T before = at;
  at = change(before);
  return before;
}

}  // namespace emulator

#define EMULATOR_ATOMIC(name, Concept, expression)                            \
  template <emulator::Concept T>                                              \
  T name(T* address, std::type_identity_t<T> value) {                         \
    return emulator::update(emulator::target(address),                        \
                            [value](T old) -> T { return expression; });      \
  }                                                                           \
  template <emulator::Concept T>                                              \
  T name(emulator::SharedPointer<T> address, std::type_identity_t<T> value) { \
    return emulator::update(emulator::target(address),                        \
                            [value](T old) -> T { return expression; });      \
  }
EMULATOR_ATOMIC(atomicAdd, Addable, old + value)
EMULATOR_ATOMIC(atomicMax, Comparable, old < value ? value : old)
EMULATOR_ATOMIC(atomicMin, Comparable, value < old ? value : old)
EMULATOR_ATOMIC(atomicAnd, Comparable, old& value)
EMULATOR_ATOMIC(atomicOr, Comparable, old | value)
EMULATOR_ATOMIC(atomicExch, Exchangeable, value)
#undef EMULATOR_ATOMIC
inline int atomicSub(int* address, int value) {
  return atomicAdd(address, -value);
}
template <emulator::Swappable T>
T atomicCAS(T* address, std::type_identity_t<T> expected,
            std::type_identity_t<T> value) {
  return emulator::update(*address,
                          [=](T old) { return old == expected ? value : old; });
}
template <emulator::Swappable T>
T atomicCAS(emulator::SharedPointer<T> address,
            std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return emulator::update(emulator::target(address),
                          [=](T old) { return old == expected ? value : old; });
}

#include "tests/cuda/emulator/device_math.h"
