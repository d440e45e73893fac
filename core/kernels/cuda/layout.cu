// Copies. Contiguous runs move in the largest words that fit them, up to 16
// bytes; transposes go through shared memory, so that both sides are read and
// written along their rows.

#include "core/kernels/layout.h"

#include <algorithm>
#include <cstdint>

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"
#include "core/kernels/cuda/walk.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cuda {

namespace {

using Word16 = AlignedVector<std::uint32_t, 4>;

template <typename Word, typename Index>
__global__ void copy_kernel(Index n, Walk<Index> walk, const Word* src,
                            Word* dst) {
  for (Index i = static_cast<Index>(first_index()); i < n;
       i += static_cast<Index>(index_step())) {
    Index s, t;
    walk.find(i, &s, &t);
    dst[t] = src[s];
  }
}

constexpr int kTile = 32;

// Tiles of 32 x 32, a block of 32 x 8 threads for each: `row` runs along dst,
// `col` along src. A row of the tile is one word longer, so that neither its
// rows nor its columns meet in one bank.
struct TileWalk {
  Walk<std::int64_t> outer;
  std::int64_t rows, cols, row_tiles, col_tiles, tiles;
  std::int64_t src_row, dst_col;  // Strides of the other direction
};

template <typename Word>
__global__ void transpose_kernel(TileWalk walk, const Word* src, Word* dst) {
  __shared__ SharedArray<Word, kTile*(kTile + 1)> tile;
  constexpr int kRows = kBlock / kTile;  // At a time
  const int x = static_cast<int>(threadIdx.x) % kTile;
  const int y = static_cast<int>(threadIdx.x) / kTile;
  for (std::int64_t i = blockIdx.x; i < walk.tiles; i += gridDim.x) {
    std::int64_t rest = i;
    const std::int64_t col = rest % walk.col_tiles * kTile;
    rest /= walk.col_tiles;
    const std::int64_t row = rest % walk.row_tiles * kTile;
    rest /= walk.row_tiles;
    std::int64_t s = 0, t = 0;
    for (int d = 0; d < walk.outer.count; ++d) {
      const std::int64_t at = rest % walk.outer.sizes[d];
      rest /= walk.outer.sizes[d];
      s += at * walk.outer.a[d];
      t += at * walk.outer.b[d];
    }
    __syncthreads();  // The last tile has been read
#pragma unroll
    for (int j = y; j < kTile; j += kRows) {
      if (row + j < walk.rows && col + x < walk.cols) {
        tile[j * (kTile + 1) + x] = src[s + (row + j) * walk.src_row + col + x];
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = y; j < kTile; j += kRows) {
      if (col + j < walk.cols && row + x < walk.rows) {
        dst[t + (col + j) * walk.dst_col + row + x] = tile[x * (kTile + 1) + j];
      }
    }
  }
}

// The last loop runs along dst, loop `along` runs along src.
template <typename Word>
void copy_transposed(KernelContext& context, Loops loops, std::size_t along,
                     const Word* src, Word* dst) {
  const std::size_t last = loops.sizes.size() - 1;
  TileWalk walk;
  walk.rows = loops.sizes[last];
  walk.src_row = loops.a[last];
  walk.cols = loops.sizes[along];
  walk.dst_col = loops.b[along];
  walk.row_tiles = ceil_div(walk.rows, kTile);
  walk.col_tiles = ceil_div(walk.cols, kTile);
  walk.tiles = walk.row_tiles * walk.col_tiles;
  for (Dims* dims : {&loops.sizes, &loops.a, &loops.b}) {
    dims->erase(dims->begin() + static_cast<std::ptrdiff_t>(last));
    dims->erase(dims->begin() + static_cast<std::ptrdiff_t>(along));
  }
  walk.outer = Walk<std::int64_t>(loops);
  for (const std::int64_t size : loops.sizes) walk.tiles *= size;
  launch(context, "transpose", blocks_for(walk.tiles, 1), kBlock,
         transpose_kernel<Word>, walk, src, dst);
}

// The loops in words of `bytes` rather than elements of `element`; false where
// runs, strides or addresses do not divide.
bool widen_words(Loops* loops, std::int64_t element, std::int64_t bytes,
                 const void* src, const void* dst) {
  const std::int64_t factor = bytes / element;
  const std::size_t last = loops->sizes.size() - 1;
  bool divides = is_aligned(static_cast<int>(bytes), src, dst) &&
                 loops->sizes[last] % factor == 0;
  for (std::size_t d = 0; d < last; ++d) {
    divides = divides && loops->a[d] % factor == 0 && loops->b[d] % factor == 0;
  }
  if (!divides) return false;
  loops->sizes[last] /= factor;
  for (std::size_t d = 0; d < last; ++d) {
    loops->a[d] /= factor;
    loops->b[d] /= factor;
  }
  return true;
}

template <typename Word>
void copy_words(KernelContext& context, const Loops& loops, const void* src,
                void* dst) {
  const auto* from = static_cast<const Word*>(src);
  auto* to = static_cast<Word*>(dst);
  std::int64_t n = 1, src_end = 0, dst_end = 0;
  bool is_short = true;  // Offsets fit 32 bits, and none is negative
  for (std::size_t d = 0; d < loops.sizes.size(); ++d) {
    n *= loops.sizes[d];
    src_end += (loops.sizes[d] - 1) * loops.a[d];
    dst_end += (loops.sizes[d] - 1) * loops.b[d];
    is_short = is_short && loops.a[d] >= 0 && loops.b[d] >= 0;
  }
  is_short = is_short && std::max({n, src_end, dst_end}) < std::int64_t{1}
                                                               << 31;
  if (is_short) {
    launch(context, "copy_strided", blocks_for(n), kBlock,
           copy_kernel<Word, std::uint32_t>, static_cast<std::uint32_t>(n),
           Walk<std::uint32_t>(loops), from, to);
  } else {
    launch(context, "copy_strided", blocks_for(n), kBlock,
           copy_kernel<Word, std::int64_t>, n, Walk<std::int64_t>(loops), from,
           to);
  }
}

template <typename Element>
void copy_loops(KernelContext& context, Loops loops, const void* src,
                void* dst) {
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(Element));
  if (loops.sizes.empty()) loops = {{1}, {1}, {1}};
  const std::size_t last = loops.sizes.size() - 1;
  if (loops.b[last] == 1 && loops.a[last] == 1) {
    if (widen_words(&loops, kElement, 16, src, dst)) {
      return copy_words<Word16>(context, loops, src, dst);
    }
    if (kElement < 8 && widen_words(&loops, kElement, 8, src, dst)) {
      return copy_words<std::uint64_t>(context, loops, src, dst);
    }
    if (kElement < 4 && widen_words(&loops, kElement, 4, src, dst)) {
      return copy_words<std::uint32_t>(context, loops, src, dst);
    }
  } else if (loops.b[last] == 1) {
    for (std::size_t along = 0; along < last; ++along) {
      if (loops.a[along] != 1) continue;
      return copy_transposed(context, loops, along,
                             static_cast<const Element*>(src),
                             static_cast<Element*>(dst));
    }
  }
  copy_words<Element>(context, loops, src, dst);
}

}  // namespace

void copy_strided(KernelContext& context, DType dtype, const Dims& shape,
                  const void* src, const Dims& src_strides, void* dst,
                  const Dims& dst_strides) {
  const Loops loops = plan_copy(shape, src_strides, dst_strides);
  for (const std::int64_t size : shape) {
    if (size == 0) return;
  }
  switch (dtype_bytes(dtype)) {
    case 8:
      return copy_loops<std::uint64_t>(context, loops, src, dst);
    case 4:
      return copy_loops<std::uint32_t>(context, loops, src, dst);
    default:
      return copy_loops<std::uint16_t>(context, loops, src, dst);
  }
}

void permute(KernelContext& context, DType dtype, const Dims& shape,
             const Dims& order, const void* src, void* dst) {
  const PermutedView view = plan_permute(shape, order);
  copy_strided(context, dtype, view.shape, src, view.strides, dst,
               contiguous_strides(view.shape));
}

SHARDBOOK_CUDA_KERNEL(copy_strided);
SHARDBOOK_CUDA_KERNEL(permute);

}  // namespace shardbook::kernels::cuda
