#pragma once

// Element-wise sums, maxima and minima over several buffers, for backends and
// algorithms. They know addresses only, so a thread without a RankContext may
// call them.

#include <cstdint>

#include "comm/process_group.h"

namespace shardbook::internal {

/// outputs[j][i] = op over k of inputs[k][i], for `count` elements.
///
/// Adds in the order of `inputs`; bf16 and f16 are summed in f32 and rounded
/// once, so the result depends on that order only. An output may be one of the
/// inputs. Cost: reads every input once and writes every output once.
void reduce_buffers(DType dtype, ReduceOp op, const void* const* inputs,
                    int num_inputs, void* const* outputs, int num_outputs,
                    std::int64_t count);

/// target = target op source.
void accumulate(DType dtype, ReduceOp op, void* target, const void* source,
                std::int64_t count);

}  // namespace shardbook::internal
