#pragma once

// Shared memory that watches its readers and writers.
//
//   __shared__ SharedArray<float, 256> sums;
//   sums[threadIdx.x] = x;
//   __syncthreads();
//   const float neighbour = sums[threadIdx.x ^ 1];
//
// An element is a proxy: `const float x = sums[i]` reads, `auto x = sums[i]`
// would only name the element.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tests/cuda/emulator/block.h"

namespace emulator {

/// Who touched one element since the block began, as far as it matters to the
/// next who does: of several readers, two are enough.
struct ElementHistory {
  Moment written, read[2];
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

/// Forgets the shared arrays of the block before.
void begin_shared_memory();

enum class Access { kRead, kWrite };
/// Checks an access of the running thread and returns the element's address.
void* touch(SharedStorage& array, std::int64_t index, Access access);

template <typename T>
class SharedElement {
 public:
  SharedElement(SharedStorage* array, std::int64_t index)
      : array_(array), index_(index) {}
  SharedElement(const SharedElement&) = default;

  operator T() const { return touched(Access::kRead); }
  const SharedElement& operator=(const T& value) const {
    touched(Access::kWrite) = value;
    return *this;
  }
  SharedElement& operator=(const SharedElement& other) {
    touched(Access::kWrite) = static_cast<T>(other);
    return *this;
  }

 private:
  T& touched(Access access) const {
    return *static_cast<T*>(touch(*array_, index_, access));
  }

  SharedStorage* array_;
  std::int64_t index_;
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
