// Rotary positions. A thread turns a vector of pairs, or copies a vector of the
// columns behind the heads.

#include "core/kernels/turn_heads.h"

#include <cstdint>

#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

namespace {

// Thread i owns piece i % pieces of row i / pieces: first the vectors of the
// heads' left halves, each with its partner on the right, then the rest.
template <int N, typename Index, typename T>
__global__ void rope_kernel(RopeArgs args, Index pieces, const T* x,
                            const T* table, T* y) {
  const Index half = static_cast<Index>(args.head_dim / 2);
  const Index pairs = static_cast<Index>(args.heads) * half / N;
  const Index all = static_cast<Index>(args.rows) * pieces;
  for (Index i = static_cast<Index>(first_index()); i < all;
       i += static_cast<Index>(index_step())) {
    const Index row = i / pieces, piece = i % pieces;
    const std::int64_t start = static_cast<std::int64_t>(row) * args.width;
    if (piece >= pairs) {
      const std::int64_t at = start + (pairs + piece) * std::int64_t{N};
      store_vector(y + at, load_vector<N>(x + at));
      continue;
    }
    const Index head = piece / (half / N), column = piece % (half / N) * N;
    const std::int64_t at = start + head * args.head_dim + column;
    const T* const angles =
        table + row % static_cast<Index>(args.tokens) * args.head_dim + column;
    const auto left = load_vector<N>(x + at),
               right = load_vector<N>(x + at + half),
               cosines = load_vector<N>(angles),
               sines = load_vector<N>(angles + half);
    AlignedVector<T, N> new_left, new_right;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const auto a = widen(left[j]), b = widen(right[j]);
      const auto c = widen(cosines[j]);
      const auto s = args.backward ? -widen(sines[j]) : widen(sines[j]);
      new_left[j] = narrow<T>(a * c - b * s);
      new_right[j] = narrow<T>(b * c + a * s);
    }
    store_vector(y + at, new_left);
    store_vector(y + at + half, new_right);
  }
}

template <int N, typename Index, typename T>
void launch_rope(KernelContext& context, const RopeArgs& args, const void* x,
                 const void* table, void* y) {
  const std::int64_t turned = args.heads * args.head_dim;
  const std::int64_t pieces = (turned / 2 + args.width - turned) / N;
  launch(context, "rope", blocks_for(args.rows * pieces), kBlock,
         rope_kernel<N, Index, T>, args, pieces, x, table, y);
}

}  // namespace

void rope(KernelContext& context, DType dtype, const RopeArgs& args,
          const void* x, const void* table, void* y) {
  with_floating("rope", dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kLanes<T>;
    const bool whole = args.head_dim / 2 % N == 0 && args.width % N == 0 &&
                       is_aligned(kVectorBytes, x, table, y);
    // Dividing 32 bits is several times as fast
    const bool is_short = args.rows * args.width < std::int64_t{1} << 31;
    if (whole && is_short) {
      launch_rope<N, std::uint32_t, T>(context, args, x, table, y);
    } else if (whole) {
      launch_rope<N, std::int64_t, T>(context, args, x, table, y);
    } else if (is_short) {
      launch_rope<1, std::uint32_t, T>(context, args, x, table, y);
    } else {
      launch_rope<1, std::int64_t, T>(context, args, x, table, y);
    }
  });
}

SHARDBOOK_CUDA_KERNEL(rope);

}  // namespace shardbook::kernels::cuda
