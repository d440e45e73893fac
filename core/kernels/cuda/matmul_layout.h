#pragma once

// A row-major product in the terms of a library that stores by columns.
//
// A row-major matrix [r, c] is, byte for byte, the column-major matrix c x r:
// its transpose. Hence C = op(A) op(B) is computed as C' = op(B)' op(A)', with
// B on the left. A bias along the rows of C [m, n] lies along the columns of
// C' (n x m), where cuBLASLt's epilogue wants it.

#include <cstdint>

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
