#pragma once

// Checks of the matrix products on every type of device.

#include <cstdint>

#include "core/check.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels {

/// Throws Error for negative sizes.
inline void check_args(const MatmulArgs& args) {
  SB_CHECK(args.batch >= 0 && args.m >= 0 && args.n >= 0 && args.k >= 0,
           "matmul: batch ", args.batch, ", m ", args.m, ", n ", args.n, ", k ",
           args.k, "; none may be negative");
}

/// The same for products that GELU follows (matmul_gelu.h).
inline void check_gelu_args(const MatmulArgs& args) {
  check_args(args);
  SB_CHECK(args.batch == 1 && !args.resume, "matmul_gelu: batch ", args.batch,
           args.resume ? ", accumulated" : "",
           "; give one product that nothing is added to");
}

}  // namespace shardbook::kernels
