#pragma once

// Random numbers by counter: Philox4x32-10 (Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3").
//
// A number is a pure function of (seed, stream, global element index), so any
// shard of a tensor draws what the whole tensor would have drawn there. Draws
// do not depend on the dtype except by rounding.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"
#include "core/kernels/philox.h"

namespace shardbook::kernels {

/// Which elements of a global tensor a local array holds.
///
/// Local element (i_0, i_1, ...) of `shape` is global element
/// (offset_d + step_d * i_d) of `global_shape`, both row-major. Empty `offset`
/// and `step` mean zeros and ones.
///
///   // Columns 4..7 of a [3, 8] matrix
///   GlobalView{{3, 4}, {3, 8}, {0, 4}, {}}
struct GlobalView {
  Dims shape;
  Dims global_shape;
  Dims offset;
  Dims step;
};

/// The view of a whole tensor.
GlobalView whole_view(const Dims& shape);

/// x = uniform in [low, high). Unit draws have 24 bits (bf16: 8, f16: 11, so
/// that rounding never reaches 1). Floating dtypes.
/// Throws Error when the view leaves its global shape.
SHARDBOOK_KERNEL(fill_uniform, void(KernelContext& context, DType dtype,
                                    const GlobalView& view, RandomKey key,
                                    double low, double high, void* x));

/// x = normal(mean, stddev), by Box-Muller on pairs of elements (2i, 2i + 1).
SHARDBOOK_KERNEL(fill_normal, void(KernelContext& context, DType dtype,
                                   const GlobalView& view, RandomKey key,
                                   double mean, double stddev, void* x));

/// y = x / (1 - p) where the element is kept, 0 where it is dropped (with
/// probability p). The backward is the same call on dy. y may be x.
/// Throws Error unless 0 <= p < 1.
SHARDBOOK_KERNEL(dropout, void(KernelContext& context, DType dtype,
                               const GlobalView& view, RandomKey key, double p,
                               const void* x, void* y));

}  // namespace shardbook::kernels
