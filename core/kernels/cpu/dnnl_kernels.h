#pragma once

// Matrix products and convolutions by oneDNN. Read by core/kernels/*.cpp only.

#include "core/dtype.h"
#include "core/kernels/conv.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels::cpu {

/// `matmul` through a cached oneDNN primitive, f32 or bf16; leading dimensions
/// are given. False when oneDNN has no such product on this machine, or a slow
/// one.
bool matmul_dnnl(KernelContext& context, DType dtype, const MatmulArgs& args,
                 const void* a, const void* b, void* c, const void* bias);

enum class ConvPass { kForward, kBackwardData, kBackwardWeight };

/// One pass through a cached primitive, f32 or bf16. `x`, `weight` and `y` are
/// the arrays of that pass or their gradients; the pass writes one of them.
/// `copies` and `order` as in conv.h; either may be null.
/// False when oneDNN has no such convolution on this machine.
bool conv_dnnl(KernelContext& context, DType dtype, ConvPass pass,
               const ConvShape& shape, void* x, void* weight, const void* bias,
               void* y, OrderedCopies* copies, SharedKernelOrder* order);

}  // namespace shardbook::kernels::cpu
