#pragma once

// Random numbers by counter: Philox4x32-10 (Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3").
//
// A number is a pure function of (seed, stream, global element index), so any
// shard of a tensor draws what the whole tensor would have drawn there. Draws
// do not depend on the dtype except by rounding.

#include <array>
#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel_context.h"

namespace shardbook::kernels {

/// Names a sequence: `seed` of the run, `stream` of the tensor or layer.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};

/// The block function: 4 x 32 random bits for a counter and a key.
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key);

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

/// The 32 random bits of one element.
std::uint32_t random_bits(RandomKey key, std::uint64_t element);

/// x = uniform in [low, high). Unit draws have 24 bits (bf16: 8, f16: 11, so
/// that rounding never reaches 1). Floating dtypes.
/// Throws Error when the view leaves its global shape.
void fill_uniform(KernelContext& context, DType dtype, const GlobalView& view,
                  RandomKey key, double low, double high, void* x);

/// x = normal(mean, stddev), by Box-Muller on pairs of elements (2i, 2i + 1).
void fill_normal(KernelContext& context, DType dtype, const GlobalView& view,
                 RandomKey key, double mean, double stddev, void* x);

/// y = x / (1 - p) where the element is kept, 0 where it is dropped (with
/// probability p). The backward is the same call on dy. y may be x.
/// Throws Error unless 0 <= p < 1.
void dropout(KernelContext& context, DType dtype, const GlobalView& view,
             RandomKey key, double p, const void* x, void* y);

/// mask[i] = 1 where `dropout` keeps the element, else 0.
void dropout_mask(KernelContext& context, const GlobalView& view, RandomKey key,
                  double p, std::uint8_t* mask);

}  // namespace shardbook::kernels
