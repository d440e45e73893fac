#pragma once

// Matrix products by oneDNN. Read by core/kernels/*.cpp only.

#include "core/dtype.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels::cpu {

/// `matmul` through a cached oneDNN primitive, f32 or bf16; leading dimensions
/// are given. False when oneDNN has no such product on this machine, or a slow
/// one.
bool matmul_dnnl(KernelContext& context, DType dtype, const MatmulArgs& args,
                 const void* a, const void* b, void* c, const void* bias);

}  // namespace shardbook::kernels::cpu
