#include "core/kernels/turn_heads.h"

#include <algorithm>
#include <cstdint>

#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"

namespace shardbook::kernels::cpu {

namespace {

// The last vector begins early where it would be a part of one: it computes
// some elements again, from x, to the same bits.
template <typename T>
void turn_head(std::int64_t half, Compute<T> direction, const T* x,
               const T* table, T* y) {
  using V = VecOf<T>;
  const std::int64_t size = std::min(kLanes<T>, half);
  for (std::int64_t from = 0; from < half; from += kLanes<T>) {
    const std::int64_t i = std::min(from, half - size), j = i + half;
    const V c = load_up_to(table + i, size);
    const V s = load_up_to(table + j, size) * V(direction);
    const V a = load_up_to(x + i, size), b = load_up_to(x + j, size);
    store_up_to(y + i, a * c - b * s, size);
    store_up_to(y + j, b * c + a * s, size);
  }
}

}  // namespace

void rope(KernelContext&, DType dtype, const RopeArgs& args, const void* x,
          const void* table, void* y) {
  const std::int64_t width = args.width, dim = args.head_dim;
  dispatch_floating("rope", dtype, [&](auto zero) {
    using T = decltype(zero);
    const Compute<T> direction(args.backward ? -1 : 1);
    for_rows(args.rows, width, [&](std::int64_t r) {
      const T* const in = static_cast<const T*>(x) + r * width;
      const T* const angles =
          static_cast<const T*>(table) + r % args.tokens * dim;
      T* const out = static_cast<T*>(y) + r * width;
      for (std::int64_t h = 0; h < args.heads; ++h) {
        turn_head(dim / 2, direction, in + h * dim, angles, out + h * dim);
      }
      std::copy(in + args.heads * dim, in + width, out + args.heads * dim);
    });
  });
}

}  // namespace shardbook::kernels::cpu
