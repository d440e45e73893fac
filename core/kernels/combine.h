#pragma once

// Sums, maxima and minima over arrays of different ranks: the arithmetic of
// all_reduce and reduce_scatter where one device sees them all.

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

enum class ReduceKind { kSum, kMax, kMin };

/// out[i] = inputs[0][i] op inputs[1][i] op ..., for n elements, where `out` is
/// each of `outputs`.
///
/// Combines in the order of `inputs` (at least one); bf16 and f16 are combined
/// in f32 and rounded once, so the result depends on that order only. Sums of
/// integers wrap. An output may be one of the inputs. All dtypes.
/// Cost: reads every input once and writes every output once.
SHARDBOOK_KERNEL(combine,
                 void(KernelContext& context, DType dtype, ReduceKind op,
                      std::int64_t n, const std::vector<const void*>& inputs,
                      const std::vector<void*>& outputs));

}  // namespace shardbook::kernels
