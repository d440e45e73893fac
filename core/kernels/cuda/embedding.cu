// Rows of a table by index, and gradients back into the table.
//
// A row of the table must add its gradients in increasing position i, whatever
// the order in which blocks run. Positions are therefore sorted by (row, i)
// first. No two of the 64-bit keys are equal, so every way of sorting gives the
// same result. Then one thread owns a few columns of one row and adds them in
// order.
//
// Cost for n positions: n log^2 n comparisons (n = 16384: 10 launches over 128
// KiB of keys), then every gradient is read once and every row that occurs is
// read and written once. A row that occurs k times adds k gradients one after
// the other, so a table of few rows keeps few threads busy.

#include "core/kernels/embedding.h"

#include <algorithm>
#include <cstdint>

#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

namespace {

using Word16 = AlignedVector<std::uint32_t, 4>;
using Key = std::uint64_t;

// No position: sorts behind all others.
constexpr Key kNoKey = ~Key{0};

// The table's row for position i, or -1 for a row of another shard and for an
// index that is reported as wrong.
struct Rows {
  const void* indices;
  bool is_wide;
  TableShape shape;
  DeviceError* error;

  __device__ std::int64_t operator()(std::int64_t i, bool reports) const {
    const std::int64_t index =
        is_wide ? static_cast<const std::int64_t*>(indices)[i]
                : static_cast<const std::int32_t*>(indices)[i];
    const std::int64_t row = index - shape.first_row;
    if (row >= 0 && row < shape.rows) return row;
    if (reports && !(shape.skip_foreign && index >= 0)) {
      report(error, DeviceError::kIndexOutside, index, shape.first_row,
             shape.first_row + shape.rows);
    }
    return -1;
  }
};

Rows make_rows(KernelContext& context, const char* kernel,
               const TableShape& shape, DType dtype, const void* indices) {
  SB_CHECK(dtype == DType::kI64 || dtype == DType::kI32, kernel,
           ": indices of dtype ", dtype_name(dtype), "; give i64 or i32");
  return {indices, dtype == DType::kI64, shape, cuda_state(context).error};
}

// A warp owns a row of `words` words.
template <typename Word>
__global__ void gather_kernel(Rows rows, std::int64_t n, std::int64_t words,
                              const Word* table, Word* out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t i = first_index() / kWarp; i < n;
       i += index_step() / kWarp) {
    const std::int64_t row = rows(i, lane == 0);
    Word* to = out + i * words;
    if (row < 0) {
      for (std::int64_t w = lane; w < words; w += kWarp) to[w] = Word{};
    } else {
      const Word* from = table + row * words;
#pragma unroll 4
      for (std::int64_t w = lane; w < words; w += kWarp) to[w] = from[w];
    }
  }
}

template <typename Word>
void gather(KernelContext& context, const Rows& rows, std::int64_t n,
            std::int64_t row_bytes, const void* table, void* out) {
  launch(context, "gather_rows", blocks_for(n, kBlock / kWarp), kBlock,
         gather_kernel<Word>, rows, n,
         row_bytes / static_cast<std::int64_t>(sizeof(Word)),
         static_cast<const Word*>(table), static_cast<Word*>(out));
}

// --- Sorting: Batcher's bitonic network. Every step compares pairs that lie
// `distance` apart; distances within a tile are done in shared memory.

constexpr int kTile = 2048;

// The i-th pair at this distance: its lower place.
__device__ inline std::int64_t lower_place(std::int64_t i,
                                           std::int64_t distance) {
  return i / distance * 2 * distance + i % distance;
}

// Runs of `size` keys are sorted upwards and downwards in turn.
__device__ inline bool is_upward(std::int64_t place, std::int64_t size) {
  return place / size % 2 == 0;
}

// keys[i] = (row of position i, i).
__global__ void key_kernel(Rows rows, std::int64_t n, std::int64_t padded,
                           Key* keys) {
  for (std::int64_t i = first_index(); i < padded; i += index_step()) {
    const std::int64_t row = i < n ? rows(i, true) : -1;
    keys[i] =
        row < 0 ? kNoKey : static_cast<Key>(row) << 32 | static_cast<Key>(i);
  }
}

// A block owns a tile: all steps of the sizes from `first_size` to `last_size`
// whose distances fit it.
__global__ void sort_tile_kernel(Key* keys, std::int64_t first_size,
                                 std::int64_t last_size) {
  __shared__ SharedArray<Key, kTile> tile;
  const std::int64_t start = std::int64_t{blockIdx.x} * kTile;
  for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kBlock) {
    tile[i] = keys[start + i];
  }
  __syncthreads();
  for (std::int64_t size = first_size; size <= last_size; size *= 2) {
    for (auto distance = static_cast<int>(min(size, std::int64_t{kTile}) / 2);
         distance > 0; distance /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < kTile / 2; i += kBlock) {
        const int low = static_cast<int>(lower_place(i, distance));
        const Key a = tile[low], b = tile[low + distance];
        if ((a > b) == is_upward(start + low, size)) {
          tile[low] = b;
          tile[low + distance] = a;
        }
      }
      __syncthreads();
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kBlock) {
    keys[start + i] = tile[i];
  }
}

// One step of the sort, for keys that are a tile or more apart.
__global__ void sort_step_kernel(Key* keys, std::int64_t pairs,
                                 std::int64_t size, std::int64_t distance) {
  for (std::int64_t i = first_index(); i < pairs; i += index_step()) {
    const std::int64_t low = lower_place(i, distance);
    const Key a = keys[low], b = keys[low + distance];
    if ((a > b) == is_upward(low, size)) {
      keys[low] = b;
      keys[low + distance] = a;
    }
  }
}

// `count` is a power of two, at least kTile.
void sort(KernelContext& context, Key* keys, std::int64_t count) {
  const char* name = "scatter_add_rows";
  const unsigned tiles = blocks_of(count, kTile);
  launch(context, name, tiles, kBlock, sort_tile_kernel, keys, 2, kTile);
  for (std::int64_t size = 2 * kTile; size <= count; size *= 2) {
    for (std::int64_t distance = size / 2; distance >= kTile; distance /= 2) {
      launch(context, name, blocks_for(count / 2), kBlock, sort_step_kernel,
             keys, count / 2, size, distance);
    }
    launch(context, name, tiles, kBlock, sort_tile_kernel, keys, size, size);
  }
}

// --- Adding

// Block (k, part) owns the row of sorted key k, if that is the row's first key,
// and kBlock vectors of its columns.
constexpr int kAddBlock = 128;

template <int N, typename T>
__global__ void add_kernel(const Key* keys, std::int64_t n, std::int64_t cols,
                           const T* values, T* table) {
  using S = Compute<T>;
  constexpr int kAhead = 4;  // Gradients loaded before they are added
  const std::int64_t col =
      (std::int64_t{blockIdx.y} * kAddBlock + threadIdx.x) * N;
  if (col >= cols) return;
  for (std::int64_t k = blockIdx.x; k < n; k += gridDim.x) {
    const Key key = keys[k];
    const Key row = key >> 32;
    if (key == kNoKey || (k > 0 && keys[k - 1] >> 32 == row)) continue;
    T* const to = table + static_cast<std::int64_t>(row) * cols + col;
    const AlignedVector<T, N> old = load_vector<N>(to);
    S sum[N];
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = widen(old[j]);
    for (std::int64_t next = k; next < n && keys[next] >> 32 == row;) {
      AlignedVector<T, N> ahead[kAhead];
      int count = 0;
#pragma unroll
      for (int m = 0; m < kAhead; ++m) {
        if (next + m < n && keys[next + m] >> 32 == row) {
          const auto i = static_cast<std::int64_t>(keys[next + m] & 0xffffffff);
          ahead[m] = load_vector<N>(values + i * cols + col);
          count = m + 1;
        }
      }
#pragma unroll
      for (int m = 0; m < kAhead; ++m) {
        if (m >= count) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += widen(ahead[m][j]);
      }
      next += count;
    }
    AlignedVector<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = narrow<T>(sum[j]);
    store_vector(to, result);
  }
}

template <int N, typename T>
void launch_add(KernelContext& context, const Key* keys, std::int64_t n,
                std::int64_t cols, const T* values, T* table) {
  const dim3 grid(blocks_of(std::min<std::int64_t>(n, 1 << 20)),
                  blocks_of(cols, kAddBlock * N));
  launch(context, "scatter_add_rows", grid, kAddBlock, add_kernel<N, T>, keys,
         n, cols, values, table);
}

}  // namespace

void gather_rows(KernelContext& context, DType dtype, const TableShape& shape,
                 const void* table, DType index_dtype, const void* indices,
                 std::int64_t n, void* out) {
  const Rows rows =
      make_rows(context, "gather_rows", shape, index_dtype, indices);
  const auto element = static_cast<std::int64_t>(dtype_bytes(dtype));
  const std::int64_t bytes = shape.cols * element;
  const auto fits = [&](int word) {
    return bytes % word == 0 && is_aligned(word, table, out);
  };
  if (fits(16)) return gather<Word16>(context, rows, n, bytes, table, out);
  if (fits(8))
    return gather<std::uint64_t>(context, rows, n, bytes, table, out);
  if (fits(4))
    return gather<std::uint32_t>(context, rows, n, bytes, table, out);
  gather<std::uint16_t>(context, rows, n, bytes, table, out);
}

void scatter_add_rows(KernelContext& context, DType dtype,
                      const TableShape& shape, void* table, DType index_dtype,
                      const void* indices, std::int64_t n, const void* values) {
  const Rows rows =
      make_rows(context, "scatter_add_rows", shape, index_dtype, indices);
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  SB_CHECK(n <= kMost && shape.rows <= kMost, "scatter_add_rows: ", n,
           " indices into ", shape.rows, " rows; at most 2^31 of each on CUDA");
  if (n == 0) return;
  std::int64_t padded = kTile;
  while (padded < n) padded *= 2;
  Scratch scratch(context, padded * sizeof(Key));
  Key* const keys = scratch.as<Key>();
  launch(context, "scatter_add_rows", blocks_for(padded), kBlock, key_kernel,
         rows, n, padded, keys);
  sort(context, keys, padded);
  with_floating("scatter_add_rows", dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kLanes<T>;
    const auto* from = static_cast<const T*>(values);
    auto* to = static_cast<T*>(table);
    if (shape.cols % N == 0 && is_aligned(kVectorBytes, values, table)) {
      launch_add<N>(context, keys, n, shape.cols, from, to);
    } else {
      launch_add<1>(context, keys, n, shape.cols, from, to);
    }
  });
}

SHARDBOOK_CUDA_KERNEL(gather_rows);
SHARDBOOK_CUDA_KERNEL(scatter_add_rows);

}  // namespace shardbook::kernels::cuda
