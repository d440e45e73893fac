#pragma once

// Rotary positions: pairs of columns are turned by an angle of their token.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// Rows of `width` columns, of which the first heads * head_dim are heads. Row r
/// is token r % tokens.
struct RopeArgs {
  std::int64_t rows = 0;
  std::int64_t tokens = 0;
  std::int64_t width = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  bool backward = false;  ///< Turns by the negative angles
};

/// In each head, for i < head_dim / 2 and cos c_i, sin s_i of the token:
///
///   y[i]                = x[i] * c_i - x[i + head_dim / 2] * s_i
///   y[i + head_dim / 2] = x[i + head_dim / 2] * c_i + x[i] * s_i
///
///   x, y   [rows, width]; y is not x. Columns behind the heads are copied.
///   table  [tokens, head_dim]: c_0, c_1, .. and then s_0, s_1, ..
///
/// 16-bit elements are rounded once, after the sum.
SHARDBOOK_KERNEL(rope,
                 void(KernelContext& context, DType dtype, const RopeArgs& args,
                      const void* x, const void* table, void* y));

}  // namespace shardbook::kernels
