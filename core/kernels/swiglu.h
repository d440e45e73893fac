#pragma once

// The gated activation of Llama's feed-forward layers.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// y = silu(gate) * up, with silu(g) = g / (1 + exp(-g)).
///
///   gate_up  [rows, 2 cols]: [gate | up]
///   y        [rows, cols]
///
/// 16 bits are rounded as in transformers, which computes them one after the
/// other: silu(gate) first, the product after it.
SHARDBOOK_KERNEL(swiglu,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* gate_up, void* y));

/// dgate = (dy * up) * silu'(gate), dup = dy * silu(gate), where what is in
/// brackets, and silu(gate), are rounded first. dgate_up is not gate_up.
SHARDBOOK_KERNEL(swiglu_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* gate_up, const void* dy,
                      void* dgate_up));

}  // namespace shardbook::kernels
