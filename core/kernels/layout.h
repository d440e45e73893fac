#pragma once

// Moving elements without changing them. Works on any dtype; only the size of
// an element matters.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// dst[i . dst_strides] = src[i . src_strides] for all i in `shape`: blocks of
/// concat and split, and any view. Strides count elements; those of dst visit
/// no element twice. src and dst do not overlap. Up to 8 dims.
SHARDBOOK_KERNEL(copy_strided,
                 void(KernelContext& context, DType dtype, const Dims& shape,
                      const void* src, const Dims& src_strides, void* dst,
                      const Dims& dst_strides));

/// Contiguous dst whose dim d is src's dim order[d]; src has `shape`.
SHARDBOOK_KERNEL(permute,
                 void(KernelContext& context, DType dtype, const Dims& shape,
                      const Dims& order, const void* src, void* dst));

/// Row-major strides of a contiguous array.
Dims contiguous_strides(const Dims& shape);

}  // namespace shardbook::kernels
