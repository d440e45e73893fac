#pragma once

// Shared memory that watches its readers and writers.
//
//   __shared__ SharedArray<float, 256> sums;
//   sums[threadIdx.x] = x;
//   __syncthreads();
//   const float neighbour = sums[threadIdx.x ^ 1];
//
// An element is a proxy: `const float x = sums[i]` reads, `auto x = sums[i]`
// would only name the element. &sums[i] is a SharedPointer, for atomics and for
// loads of tiles.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tests/cuda/emulator/block.h"

namespace emulator {

/// Who touched one element since the block began, as far as it matters to the
/// next who does: of several readers (or atomics), two are enough.
struct ElementHistory {
  Moment written, read[2], updated[2];
};

/// An array of the block that runs now, without its type.
struct SharedStorage {
  Site declared;
  std::int64_t size;
  std::size_t element_bytes;
  char* values = nullptr;
  ElementHistory* history = nullptr;
  std::uint32_t valid_from = 0;  ///< the block that it belongs to
};

enum class Access { kRead, kWrite, kAtomic };
/// Checks an access of the running thread and returns the element's address.
void* touch(SharedStorage& array, std::int64_t index, Access access);

template <typename T>
class SharedElement;

/// The address of an element.
template <typename T>
class SharedPointer {
 public:
  SharedPointer(SharedStorage* array, std::int64_t index)
      : array_(array), index_(index) {}
  SharedElement<T> operator*() const { return {array_, index_}; }
  SharedElement<T> operator[](std::int64_t i) const {
    return {array_, index_ + i};
  }
  SharedPointer operator+(std::int64_t n) const { return {array_, index_ + n}; }
  SharedPointer operator-(std::int64_t n) const { return {array_, index_ - n}; }
  SharedPointer& operator+=(std::int64_t n) {
    index_ += n;
    return *this;
  }
  T& touched(Access access) const {
    return *static_cast<T*>(touch(*array_, index_, access));
  }

 private:
  SharedStorage* array_;
  std::int64_t index_;
};

template <typename T>
class SharedElement {
 public:
  SharedElement(SharedStorage* array, std::int64_t index) : at_(array, index) {}
  SharedElement(const SharedElement&) = default;

  operator T() const { return at_.touched(Access::kRead); }
  SharedPointer<T> operator&() const { return at_; }

  const SharedElement& operator=(const T& value) const {
    at_.touched(Access::kWrite) = value;
    return *this;
  }
  SharedElement& operator=(const SharedElement& other) {
    at_.touched(Access::kWrite) = static_cast<T>(other);
    return *this;
  }
#define EMULATOR_ASSIGN(assign)                                \
  template <typename U>                                        \
  const SharedElement& operator assign(const U& value) const { \
    T changed = *this;                                         \
    changed assign value;                                      \
    return *this = changed;                                    \
  }
  EMULATOR_ASSIGN(+=)
  EMULATOR_ASSIGN(-=)
  EMULATOR_ASSIGN(*=)
  EMULATOR_ASSIGN(/=)
  EMULATOR_ASSIGN(&=)
  EMULATOR_ASSIGN(|=)
  EMULATOR_ASSIGN(^=)
#undef EMULATOR_ASSIGN
  const SharedElement& operator++() const { return *this += T(1); }
  const SharedElement& operator--() const { return *this -= T(1); }
  T operator++(int) const {
    const T before = *this;
    *this = static_cast<T>(before + T(1));
    return before;
  }

 private:
  SharedPointer<T> at_;
};

template <typename T, int N>
class SharedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  constexpr SharedArray(const char* file = __builtin_FILE(),
                        int line = __builtin_LINE())
      : storage_{{file, line}, N, sizeof(T)} {}
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  SharedElement<T> operator[](std::int64_t i) const { return {&storage_, i}; }

 private:
  mutable SharedStorage storage_;
};

}  // namespace emulator
