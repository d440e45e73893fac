#pragma once

// Matrix products.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// The shape of a batched product C[i] = op(A[i]) op(B[i]), where the matrices
/// of a batch follow one another.
///
///   op(A) [m, k]   A is stored [m, k], or [k, m] with trans_a
///   op(B) [k, n]   B is stored [k, n], or [n, k] with trans_b
///   C     [m, n]
struct MatmulArgs {
  std::int64_t batch = 1;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  bool trans_a = false;
  bool trans_b = false;
  /// Adds to C, and the chain of additions of each element begins with C:
  /// products of consecutive blocks of k, one after another, add in the order
  /// of one product of all of k.
  bool resume = false;
};

/// C = op(A) op(B), plus C when `resume`, plus bias[n] when given.
///
/// A, B, C and bias share `dtype` (f64, f32, bf16, f16); C overlaps no input.
/// With k = 0 the product is zero. 16-bit products add in f32.
/// Cost: 2 * batch * m * n * k flops. oneDNN computes large f32 products and
/// bf16 ones. All others, and all with `context.deterministic`, are chains of
/// multiply-adds in increasing k, to which the bias is added: an element's bits
/// do not depend on m, n, batch, position or threads, so a product of some rows
/// or columns equals those rows or columns of the product.
/// On CUDA, cuBLASLt computes all of them, f32 in TF32 only with
/// `context.allow_tf32`. The same call gives the same bits each time; with
/// `context.deterministic` no algorithm cuts k into parts that are added
/// afterwards. The order within k still depends on the shape: a product of some
/// rows need not equal those rows of the product.
/// Throws Error for another dtype or negative sizes.
SHARDBOOK_KERNEL(matmul, void(KernelContext& context, DType dtype,
                              const MatmulArgs& args, const void* a,
                              const void* b, void* c, const void* bias));

}  // namespace shardbook::kernels
