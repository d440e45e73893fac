#pragma once

// Products that are computed block by block.

#include "core/tensor.h"

namespace shardbook {

/// target += op(a) op(b), plus `bias` [n] when given: target [m, n], matrices as
/// in `matmul`. With `from_zero`, target's old values do not count. One block of
/// k after another adds in the order of one product of all of k, as far as
/// kernels/matmul.h promises. Not recorded for backward.
void matmul_into(const Tensor& target, const Tensor& a, const Tensor& b,
                 bool trans_a = false, bool trans_b = false,
                 bool from_zero = false, const Tensor& bias = Tensor());

}  // namespace shardbook
