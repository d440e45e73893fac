#pragma once

// Checks of the matrix products on every type of device.

#include <cstdint>

#include "core/check.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels {

/// Fills in leading dimensions that are 0, and joins a batch of row blocks
/// against one matrix into one taller product. Throws Error for negative sizes,
/// leading dimensions that are too small, and results that overlap.
inline MatmulArgs checked_args(MatmulArgs args) {
  SB_CHECK(args.batch >= 0 && args.m >= 0 && args.n >= 0 && args.k >= 0,
           "matmul: batch ", args.batch, ", m ", args.m, ", n ", args.n, ", k ",
           args.k, "; none may be negative");
  const auto check_ld = [](const char* name, std::int64_t* ld,
                           std::int64_t cols) {
    if (*ld == 0) *ld = cols;
    SB_CHECK(*ld >= cols, "matmul: ", name, " is ", *ld,
             ", less than the row of ", cols);
  };
  args.accumulate = args.accumulate || args.resume;
  check_ld("lda", &args.lda, args.trans_a ? args.m : args.k);
  check_ld("ldb", &args.ldb, args.trans_b ? args.k : args.n);
  check_ld("ldc", &args.ldc, args.n);
  SB_CHECK(args.batch <= 1 || args.stride_c != 0, "matmul: batch ", args.batch,
           " with stride_c 0; results overlap");
  if (args.batch > 1 && args.stride_b == 0 && !args.trans_a &&
      args.stride_a == args.m * args.lda &&
      args.stride_c == args.m * args.ldc) {
    args.m *= args.batch;
    args.batch = 1;
  }
  return args;
}

/// The same for products that GELU follows (matmul_gelu.h).
inline MatmulArgs checked_gelu_args(const MatmulArgs& original) {
  const MatmulArgs args = checked_args(original);
  SB_CHECK(args.batch == 1 && args.ldc == args.n && !args.accumulate,
           "matmul_gelu: batch ", args.batch, ", rows of ", args.n, ", ",
           args.ldc, " apart", args.accumulate ? ", accumulated" : "",
           "; give one dense product that nothing is added to");
  return args;
}

}  // namespace shardbook::kernels
