#pragma once

// Rows that are normalised, each by a warp or by a block. A thread keeps its
// part of a short row in registers; a long row is read again for each pass.
//
//   row of 20 elements, vectors of 2, 4 threads (really 32 or 256):
//   element   0 1   2 3   4 5   6 7 | 8 9  10 11  12 13  14 15 | 16 17  18 19
//   thread     0     1     2     3  |  0     1      2      3   |   0      1
//   vector     0     0     0     0  |  1     1      1      1   |   2      2

#include <cstdint>

#include "core/kernels/cuda/reduce_block.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

/// Threads of a block: for one long row, or for 8 short ones.
constexpr int kRowBlock = 256;

/// kThreads threads share a row: a block, a warp, or a part of a warp, which then
/// has several rows. Each holds at most kItems elements of it, in
/// vectors of kWidth; with kItems = 0 any number, and none in registers.
template <int kVectorWidth, int kRowThreads, int kItems>
struct RowShape {
  static constexpr int kWidth = kVectorWidth;
  static constexpr int kThreads = kRowThreads;
  static constexpr int kVectors = kItems / kWidth;
  static constexpr bool kInRegisters = kItems > 0;
  static constexpr int kItemsPerRow = kItems * kThreads;
  static constexpr int kBlockThreads = kThreads <= kWarp ? kRowBlock : kThreads;
  static constexpr int kRowsPerBlock = kBlockThreads / kThreads;
  static constexpr int kRowsPerWarp = kThreads < kWarp ? kWarp / kThreads : 1;

  static dim3 grid(std::int64_t rows) {
    return dim3(blocks_of(rows, kRowsPerBlock));
  }
  __device__ static int thread() {
    return static_cast<int>(threadIdx.x) % kThreads;
  }
  __device__ static std::int64_t first_row() {
    return std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kThreads;
  }

  /// Calls fn(vector, column) for this thread's vectors of a row.
  template <typename Fn>
  __device__ static void for_vectors(std::int64_t cols, Fn fn) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int column = (i * kThreads + thread()) * kWidth;
        if (column < cols) fn(i, std::int64_t{column});
      }
    } else {
      for (std::int64_t column = thread() * kWidth; column < cols;
           column += kThreads * kWidth) {
        fn(0, column);
      }
    }
  }

  /// Joins one value from each thread of a row; all of them, and all of a warp,
  /// call this.
  template <typename S, typename Join>
  __device__ static S join(S value, Join how) {
    if constexpr (kThreads <= kWarp) {
      return join_lanes<kThreads>(value, how);
    } else {
      __shared__ SharedArray<S, 32> parts;
      return join_block<kThreads>(value, how, parts);
    }
  }
  template <typename S>
  __device__ static S sum(S value) {
    return join(value, Sum());
  }
  template <typename S>
  __device__ static S largest(S value) {
    return join(value, Max());
  }
  /// Adds up what the rows of a warp have at the same place.
  template <typename S>
  __device__ static S sum_of_rows(S value) {
#pragma unroll
    for (int distance = kThreads; distance < kWarp; distance *= 2) {
      value += __shfl_xor_sync(kFullMask, value, distance);
    }
    return value;
  }
};

/// This thread's part of one row.
template <typename T, typename Shape>
class RowPart {
 public:
  using Vector = AlignedVector<T, Shape::kWidth>;

  __device__ RowPart(const T* row, std::int64_t cols) : row_(row) {
    if constexpr (Shape::kInRegisters) {
      Shape::for_vectors(cols, [&](int i, std::int64_t column) {
        vectors_[i] = load_vector<Shape::kWidth>(row + column);
      });
    }
  }
  __device__ Vector at(int i, std::int64_t column) const {
    if constexpr (Shape::kInRegisters) {
      return vectors_[i];
    } else {
      return load_vector<Shape::kWidth>(row_ + column);
    }
  }

 private:
  const T* row_;
  Vector vectors_[Shape::kInRegisters ? Shape::kVectors : 1];
};

/// Elements that a thread holds of all but the shortest rows. More than a few
/// f64, or single elements, would need too many registers.
template <typename T, int kWidth>
constexpr int kRowItems = sizeof(T) == 8 || kWidth == 1 ? 8 : 32;

/// Rows of at most 128 elements, of which a warp has four.
template <int kWidth>
using NarrowRows = RowShape<kWidth, 8, 16>;

template <typename T, int kWidth, typename Body>
void with_row_width(std::int64_t cols, Body body) {
  constexpr int kFew = 8, kMany = kRowItems<T, kWidth>;
  if (cols <= kWarp * kFew) {
    body(RowShape<kWidth, kWarp, kFew>{});
  } else if (cols <= kWarp * kMany) {
    body(RowShape<kWidth, kWarp, kMany>{});
  } else if (cols <= kRowBlock * kMany) {
    body(RowShape<kWidth, kRowBlock, kMany>{});
  } else {
    body(RowShape<kWidth, kRowBlock, 0>{});
  }
}

/// Calls body(RowShape) for rows of `cols` elements of T; `aligned` says that
/// all arrays begin at multiples of kVectorBytes.
template <typename T, typename Body>
void with_row_shape(std::int64_t cols, bool aligned, Body body) {
  with_width<T>(cols, aligned,
                [&](auto width) { with_row_width<T, width()>(cols, body); });
}

/// The same for kernels that keep nothing in registers.
template <int kWidth, typename Body>
void with_walk(std::int64_t cols, Body body) {
  if (cols <= 1024) {
    body(RowShape<kWidth, kWarp, 0>{});
  } else {
    body(RowShape<kWidth, kRowBlock, 0>{});
  }
}

/// Calls fn(vector, column) for this thread's elements of a row that may begin
/// anywhere: single elements up to the first address that a vector may have,
/// whole vectors, single elements again.
template <typename Shape, typename T, typename Fn>
__device__ void walk_row(const T* row, std::int64_t cols, Fn fn) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  const int thread = Shape::thread();
  const auto past =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % kBytes);
  const std::int64_t before =
      (kBytes - past) % kBytes / static_cast<int>(sizeof(T));
  const std::int64_t head = before < cols ? before : cols;
  const std::int64_t tail = cols - (cols - head) % kWidth;
  if (thread < head) fn(load_vector<1>(row + thread), thread);
  for (std::int64_t i = head + thread * kWidth; i < tail;
       i += Shape::kThreads * kWidth) {
    fn(load_vector<kWidth>(row + i), i);
  }
  if (tail + thread < cols)
    fn(load_vector<1>(row + tail + thread), tail + thread);
}

}  // namespace shardbook::kernels::cuda
