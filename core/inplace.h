#pragma once

// Operations that write into a given tensor: for gradients on their way through
// buckets and accumulators. Not recorded for backward; seen by observers like
// any other; nothing happens on meta devices.

#include "core/tensor.h"

namespace shardbook {

/// target += factor * value; same shape, dtype and device.
void add_into(const Tensor& target, const Tensor& value, double factor = 1);

/// target = factor * source; same shape, dtype and device. Both may be the same
/// array (then a factor of 1 costs nothing), but must not overlap otherwise.
void scale_into(const Tensor& target, const Tensor& source, double factor);

/// target *= factor, even when the factor is 1: for factors that depend on
/// values (clipping). Which operations run must not depend on values, or a run
/// on shapes could not predict them.
void scale_in_place(const Tensor& target, double factor);

/// target += op(a) op(b), plus `bias` [n] when given: target [m, n], matrices
/// as in `matmul`. With `from_zero`, target's old values do not count. Calls on
/// consecutive blocks of k add in the order of one product of all of k, as far
/// as kernels/matmul.h promises. Not recorded for backward.
void matmul_into(const Tensor& target, const Tensor& a, const Tensor& b,
                 bool trans_a = false, bool trans_b = false,
                 bool from_zero = false, const Tensor& bias = Tensor());

}  // namespace shardbook
