#pragma once

// Element-wise sums, maxima and minima over several buffers, for backends and
// algorithms: kernels::cpu::combine. It knows addresses only, so a thread
// without a RankContext may call it.

#include <cstdint>
#include <vector>

#include "comm/process_group.h"
#include "core/kernels/combine.h"

namespace shardbook::internal {

inline kernels::ReduceKind kind_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return kernels::ReduceKind::kSum;
    case ReduceOp::kMax:
      return kernels::ReduceKind::kMax;
    default:
      return kernels::ReduceKind::kMin;
  }
}

/// outputs[j][i] = op over k of inputs[k][i], for `count` elements of host
/// memory.
inline void reduce_buffers(DType dtype, ReduceOp op, const void* const* inputs,
                           int num_inputs, void* const* outputs,
                           int num_outputs, std::int64_t count) {
  // Not in braces, which would make a list of the two addresses.
  const std::vector<const void*> from(inputs, inputs + num_inputs);
  const std::vector<void*> to(outputs, outputs + num_outputs);
  KernelContext context;
  kernels::cpu::combine(context, dtype, kind_of(op), count, from, to);
}

/// target = target op source.
inline void accumulate(DType dtype, ReduceOp op, void* target,
                       const void* source, std::int64_t count) {
  KernelContext context;
  kernels::cpu::combine(context, dtype, kind_of(op), count, {target, source},
                        {target});
}

}  // namespace shardbook::internal
