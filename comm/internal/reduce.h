#pragma once

// Element-wise sums, maxima and minima over several buffers, for backends and
// algorithms: kernels::combine. It needs only addresses, so a thread
// without a RankContext may call it.

#include <cstdint>
#include <vector>

#include "comm/process_group.h"
#include "core/kernels/combine.h"

namespace shardbook::internal {

inline kernels::ReduceKind kind_of(ReduceOp op) {
  return op == ReduceOp::kSum   ? kernels::ReduceKind::kSum
         : op == ReduceOp::kMax ? kernels::ReduceKind::kMax
                                : kernels::ReduceKind::kMin;
}

/// outputs[j][i] = op over k of inputs[k][i], for `count` elements of host
/// memory.
inline void reduce_buffers(DType dtype, ReduceOp op,
                           const std::vector<const void*>& inputs,
                           const std::vector<void*>& outputs,
                           std::int64_t count) {
  KernelContext context;
  kernels::combine(context, dtype, kind_of(op), count, inputs, outputs);
}

/// target = target op source.
inline void accumulate(DType dtype, ReduceOp op, void* target,
                       const void* source, std::int64_t count) {
  reduce_buffers(dtype, op, {target, source}, {target}, count);
}

}  // namespace shardbook::internal
