#pragma once

// A row-major product in the terms of a library that stores by columns.
//
// A row-major matrix [r, c] is, byte for byte, the column-major matrix c x r:
// its transpose. Hence C = op(A) op(B) is computed as C' = op(B)' op(A)', with
// B on the left. A bias along the rows of C [m, n] lies along the columns of
// C' (n x m), where cuBLASLt's epilogue wants it.

#include <cstdint>
#include <utility>

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
/// derivative (CUBLASLT_EPILOGUE_GELU_AUX.., DGELU..).
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
  return is_accurate && !context.deterministic && !is_empty && args.n % 8 == 0;
}

inline ColumnMajorProduct column_major(const MatmulArgs& args) {
  // Row-major as stored: `rows` x `cols`, unless it enters transposed
  const auto operand = [](std::int64_t rows, std::int64_t cols,
                          bool transposed) {
    if (transposed) std::swap(rows, cols);
    return ColumnMajor{cols, rows, cols, rows * cols, transposed};
  };
  return {args.n,
          args.m,
          args.k,
          args.batch,
          operand(args.k, args.n, args.trans_b),
          operand(args.m, args.k, args.trans_a),
          operand(args.m, args.n, false)};
}

}  // namespace shardbook::kernels::cuda
