#pragma once

// Operations on a part of something larger: a block of a matrix, rows of a
// table, some of the classes of a loss. Ranks that hold the other parts compute
// theirs; collectives between these operations put the whole together.

#include <cstdint>

#include "core/tensor.h"

namespace shardbook {

/// target += op(a) op(b), plus `bias` [n] when given: target [m, n], matrices as
/// in `matmul`. With `from_zero`, target's old values do not count. One block of
/// k after another adds in the order of one product of all of k, as far as
/// kernels/matmul.h promises.
void matmul_into(const Tensor& target, const Tensor& a, const Tensor& b,
                 bool trans_a = false, bool trans_b = false,
                 bool from_zero = false, const Tensor& bias = Tensor());

/// `embedding` where `table` is rows first_row .. first_row + v - 1 of a larger
/// one: indices of other rows read zeros, and their gradients go nowhere.
Tensor embedding_part(const Tensor& table, const Tensor& indices,
                      std::int64_t first_row);

/// The part of one rank in a loss whose classes are cut over ranks: logits [.., v]
/// are those of classes first .. first + v - 1. Not recorded; f64 for f64,
/// otherwise f32.
struct PartialLoss {
  Tensor logsumexp;  ///< [rows], of these classes
  Tensor target;     ///< [rows], the target's logit; 0 where it is not here
};
PartialLoss cross_entropy_part(const Tensor& logits, const Tensor& targets,
                               std::int64_t first);
/// Its backward: dloss [] times the gradient of the sum over rows, from the
/// logsumexp of all classes.
Tensor cross_entropy_part_backward(const Tensor& logits, const Tensor& targets,
                                   std::int64_t first, const Tensor& logsumexp,
                                   const Tensor& dloss);

}  // namespace shardbook
