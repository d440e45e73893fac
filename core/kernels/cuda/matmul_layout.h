#pragma once

// A row-major product in the terms of a library that stores by columns.
//
// A row-major matrix [r, c] is, byte for byte, the column-major matrix c x r:
// its transpose. Hence C = op(A) op(B) is computed as C' = op(B)' op(A)', with
// B on the left. A bias along the rows of C [m, n] lies along the columns of
// C' (n x m), where cuBLASLt's epilogue wants it.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels::cuda {

/// A matrix stored by columns; consecutive ones of a batch are `stride` apart.
struct ColumnMajor {
  std::int64_t rows = 0, cols = 0;  ///< As stored
  std::int64_t ld = 0;              ///< Distance between stored columns
  std::int64_t stride = 0;
  bool transposed = false;  ///< Enters the product transposed
};

/// c [m x n] = op(left) [m x k] * op(right) [k x n].
struct ColumnMajorProduct {
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  ColumnMajor left;   ///< MatmulArgs's B
  ColumnMajor right;  ///< MatmulArgs's A
  ColumnMajor c;
};

/// Whether an epilogue of cuBLASLt may compute GELU behind a product, or its
/// derivative (CUBLASLT_EPILOGUE_GELU_AUX.., DGELU..). `args` are
/// checked_gelu_args.
///
/// GELU is the tanh form there, as here. cuBLASLt promises no accuracy for
/// its tanh, and GPUs have an instruction that gives 11 bits: enough where
/// elements have 8 or 11 bits themselves, and where f32 may be rounded to 11 as
/// TF32. In deterministic mode, the order in which the epilogue would sum the
/// gradient of the bias is not known. The leading dimension of the auxiliary
/// matrix, `pre`, must be a multiple of 8 elements. Where all this holds,
/// cuBLASLt may still have no algorithm, and says so when it is asked for one.
inline bool may_fuse_gelu(const KernelContext& context, DType dtype,
                          const MatmulArgs& args) {
  const bool is_accurate = dtype == DType::kBF16 || dtype == DType::kF16 ||
                           (dtype == DType::kF32 && context.allow_tf32);
  const bool is_empty = args.m == 0 || args.n == 0 || args.k == 0;
  return is_accurate && !context.deterministic && !is_empty &&
         args.ldc % 8 == 0;
}

/// `args` with all leading dimensions given (matmul_args.h).
inline ColumnMajorProduct column_major(const MatmulArgs& args) {
  const auto operand = [](std::int64_t stored_rows, std::int64_t stored_cols,
                          std::int64_t ld, std::int64_t stride,
                          bool transposed) {
    return ColumnMajor{stored_cols, stored_rows, ld, stride, transposed};
  };
  ColumnMajorProduct product;
  product.m = args.n, product.n = args.m, product.k = args.k;
  product.batch = args.batch;
  product.left =
      operand(args.trans_b ? args.n : args.k, args.trans_b ? args.k : args.n,
              args.ldb, args.stride_b, args.trans_b);
  product.right =
      operand(args.trans_a ? args.k : args.m, args.trans_a ? args.m : args.k,
              args.lda, args.stride_a, args.trans_a);
  product.c = operand(args.m, args.n, args.ldc, args.stride_c, false);
  return product;
}

}  // namespace shardbook::kernels::cuda
