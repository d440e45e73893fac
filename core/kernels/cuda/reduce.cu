// Reductions of rows and columns. Which thread adds which elements, and in which order their sums
// meet, depends on the shape only: results repeat bit for bit.

#include "core/kernels/reduce.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/kernels/cuda/reduce_block.h"
#include "core/kernels/cuda/vector.h"
#include "core/kernels/sum_passes.h"

namespace shardbook::kernels::cuda {

namespace {

// About this many blocks keep every multiprocessor busy.
constexpr std::int64_t kEnoughBlocks = 1024;

// --- Sums over rows

constexpr int kRowLanes = kBlock / kWarp;

// Rows of an array [outer, rows, cols], summed in chunks.
struct ColumnPlan {
  std::int64_t outer, rows, cols;
  std::int64_t tiles = 0;       // Groups of columns that one block sums
  std::int64_t chunk_rows = 0;  // Rows that one block sums
  std::int64_t chunks = 1;
};

template <typename T>
ColumnPlan plan_columns(std::int64_t outer, std::int64_t rows,
                        std::int64_t cols, bool in_chunks) {
  ColumnPlan plan{outer, rows, cols};
  plan.tiles = ceil_div(cols, kWarp * kLanes<T>);
  plan.chunk_rows = std::max<std::int64_t>(1, rows);
  const std::int64_t blocks = std::max<std::int64_t>(1, outer * plan.tiles);
  if (in_chunks && blocks < kEnoughBlocks && rows > 64) {
    const std::int64_t wanted =
        std::min(kEnoughBlocks / blocks, ceil_div(rows, 64));
    plan.chunk_rows = ceil_div(rows, wanted);
    plan.chunks = ceil_div(rows, plan.chunk_rows);
  }
  return plan;
}

// out[o, chunk, c] = sum over the chunk's rows r of x[o, r, c]. A block is 8
// rows of 32 threads; thread (y, x) owns vector x of the tile's columns and
// adds rows y, y + 8, ...; then the 8 sums of a column meet.
template <typename In, typename Out>
__global__ void sum_columns_kernel(ColumnPlan plan, const In* x, bool aligned,
                                   Out* out) {
  using S = Compute<In>;
  constexpr int N = kLanes<In>;
  constexpr int kTile = kWarp * N;
  __shared__ SharedArray<S, kRowLanes * kTile> sums;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row_lane = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t items = plan.outer * plan.chunks * plan.tiles;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t tile = item % plan.tiles;
    const std::int64_t block = item / plan.tiles;  // outer, chunk
    const std::int64_t chunk = block % plan.chunks;
    const std::int64_t first = block / plan.chunks * plan.rows;
    const std::int64_t from = chunk * plan.chunk_rows;
    const std::int64_t to = min(from + plan.chunk_rows, plan.rows);
    const std::int64_t col = tile * kTile + lane * N;

    S sum[N] = {};
    if (col < plan.cols) {
#pragma unroll 4
      for (std::int64_t r = from + row_lane; r < to; r += kRowLanes) {
        const AlignedVector<In, N> v = load_vector<N>(
            x + (first + r) * plan.cols + col, aligned, plan.cols - col);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += widen(v[j]);
      }
    }
    __syncthreads();  // The last item's sums have been read
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums[(row_lane * N + j) * kWarp + lane] = sum[j];
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < kTile; c += kBlock) {
      if (tile * kTile + c >= plan.cols) continue;
      S total = 0;
#pragma unroll
      for (int y = 0; y < kRowLanes; ++y) {
        total += sums[(y * N + c % N) * kWarp + c / N];
      }
      Out* to_out = out + block * plan.cols + tile * kTile + c;
      *to_out = narrow<Out>(total);
    }
  }
}

template <typename In, typename Out>
void launch_columns(KernelContext& context, const ColumnPlan& plan, const In* x,
                    Out* out) {
  const bool aligned =
      is_aligned(kVectorBytes, x) && plan.cols % kLanes<In> == 0;
  const std::int64_t items = plan.outer * plan.chunks * plan.tiles;
  launch(context, "sum_rows", blocks_for(items, 1), kBlock,
         sum_columns_kernel<In, Out>, plan, x, aligned, out);
}

// out[o, c] = sum over r of x[o, r, c].
template <typename In, typename Out>
void sum_columns(KernelContext& context, std::int64_t outer, std::int64_t rows,
                 std::int64_t cols, const In* x, Out* out) {
  using S = Compute<In>;
  const ColumnPlan plan = plan_columns<In>(outer, rows, cols, true);
  if (plan.chunks == 1) return launch_columns(context, plan, x, out);
  Scratch scratch(context, outer * plan.chunks * cols * sizeof(S));
  S* const partial = scratch.as<S>();
  launch_columns(context, plan, x, partial);
  launch_columns(context, plan_columns<S>(outer, plan.chunks, cols, false),
                 static_cast<const S*>(partial), out);
}

// --- Sums along rows

// out[r, chunk] = sum over the chunk's columns c of x[r, c]. kThreads threads,
// a warp or a block, own one chunk; they take its vectors in turns.
template <int kThreads, typename In, typename Out>
__global__ void sum_row_kernel(std::int64_t items, std::int64_t chunks,
                               std::int64_t cols, std::int64_t chunk_cols,
                               const In* x, bool aligned, Out* out) {
  using S = Compute<In>;
  constexpr int N = kLanes<In>;
  constexpr int kItems = kBlock / kThreads;  // Of one block at a time
  __shared__ SharedArray<S, 32> parts;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kItems +
                           static_cast<int>(threadIdx.x) / kThreads;
       item < items; item += std::int64_t{gridDim.x} * kItems) {
    const std::int64_t from = item % chunks * chunk_cols;
    const std::int64_t to = min(from + chunk_cols, cols);
    const In* row = x + item / chunks * cols;
    S sum = 0;
#pragma unroll 2
    for (std::int64_t c = from + thread * N; c < to; c += kThreads * N) {
      const AlignedVector<In, N> v = load_vector<N>(row + c, aligned, to - c);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += widen(v[j]);
    }
    sum = join_block<kThreads>(sum, Sum(), parts);
    if (thread == 0) out[item] = narrow<Out>(sum);
  }
}

template <typename In, typename Out>
void launch_rows(KernelContext& context, std::int64_t rows, std::int64_t chunks,
                 std::int64_t cols, std::int64_t chunk_cols, const In* x,
                 Out* out) {
  const bool aligned = is_aligned(kVectorBytes, x) && cols % kLanes<In> == 0;
  const bool by_warps = chunk_cols <= 1024;
  launch(context, "sum_along_rows",
         blocks_for(rows * chunks, by_warps ? kBlock / kWarp : 1), kBlock,
         by_warps ? sum_row_kernel<kWarp, In, Out>
                  : sum_row_kernel<kBlock, In, Out>,
         rows * chunks, chunks, cols, chunk_cols, x, aligned, out);
}

// Few long rows are cut into chunks, so that many blocks share them.
template <typename In, typename Out>
void sum_along_rows(KernelContext& context, std::int64_t rows,
                    std::int64_t cols, const In* x, Out* out) {
  using S = Compute<In>;
  constexpr std::int64_t kLeast = 4 * kBlock * kLanes<In>;
  const std::int64_t wanted =
      rows == 0 || rows >= kEnoughBlocks / 2
          ? 1
          : std::min(ceil_div(cols, kLeast), kEnoughBlocks / rows);
  if (wanted <= 1) return launch_rows(context, rows, 1, cols, cols, x, out);
  const std::int64_t chunk_cols =
      ceil_div(ceil_div(cols, wanted), kLeast) * kLeast;
  const std::int64_t chunks = ceil_div(cols, chunk_cols);
  Scratch scratch(context, rows * chunks * sizeof(S));
  S* const partial = scratch.as<S>();
  launch_rows(context, rows, chunks, cols, chunk_cols, x, partial);
  launch_rows(context, rows, 1, chunks, chunks, static_cast<const S*>(partial),
              out);
}

}  // namespace

void sum_rows(KernelContext& context, DType dtype, std::int64_t rows,
              std::int64_t cols, const void* x, void* out) {
  with_floating("sum_rows", dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_columns(context, 1, rows, cols, static_cast<const T*>(x),
                static_cast<T*>(out));
  });
}

void sum_to_shape(KernelContext& context, DType dtype, const Dims& x_shape,
                  const void* x, const Dims& out_shape, void* out) {
  with_floating("sum_to_shape", dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_in_passes<Compute<T>>(
        context, dtype, x_shape, static_cast<const T*>(x), out_shape,
        static_cast<T*>(out),
        [&](std::int64_t outer, std::int64_t n, std::int64_t inner,
            const auto* from, auto* to) {
          if (inner == 1) return sum_along_rows(context, outer, n, from, to);
          sum_columns(context, outer, n, inner, from, to);
        });
  });
}

SHARDBOOK_CUDA_KERNEL(sum_rows);
SHARDBOOK_CUDA_KERNEL(sum_to_shape);

}  // namespace shardbook::kernels::cuda
