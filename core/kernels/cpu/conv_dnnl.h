#pragma once

// Convolutions by oneDNN. Read by core/kernels/*.cpp only.

#include "core/dtype.h"
#include "core/kernels/conv.h"
#include "core/kernels/kernel_context.h"

namespace shardbook::kernels::cpu {

enum class ConvPass { kForward, kBackwardData, kBackwardWeight };

/// One pass through a cached primitive, f32 or bf16. `x`, `weight` and `y` are
/// the arrays of that pass or their gradients; the pass writes one of them.
/// `copies` and `order` as in conv.h; either may be null.
/// False when oneDNN has no such convolution on this machine.
bool conv_dnnl(KernelContext& context, DType dtype, ConvPass pass,
               const ConvShape& shape, void* x, void* weight, const void* bias,
               void* y, OrderedCopies* copies, SharedKernelOrder* order);

}  // namespace shardbook::kernels::cpu
