#pragma once

// Rows of a table by index, and gradients back into the table.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// The rows [first_row, first_row + rows) of a table, each `cols` long. When
/// the table is one shard of a larger one, `skip_foreign` makes indices outside
/// it read zeros and write nothing; otherwise such an index throws Error.
struct TableShape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t first_row = 0;
  bool skip_foreign = false;
};

/// out[i] = table[indices[i] - first_row].
///
///   table [rows, cols], indices [n] i64 or i32, out [n, cols]; all dtypes
SHARDBOOK_KERNEL(gather_rows, void(KernelContext& context, DType dtype,
                                   const TableShape& shape, const void* table,
                                   DType index_dtype, const void* indices,
                                   std::int64_t n, void* out));

/// table[indices[i] - first_row] += values[i], in increasing i.
/// Floating dtypes; 16-bit tables add in f32 and round once per row and call.
SHARDBOOK_KERNEL(scatter_add_rows,
                 void(KernelContext& context, DType dtype,
                      const TableShape& shape, void* table, DType index_dtype,
                      const void* indices, std::int64_t n, const void* values));

}  // namespace shardbook::kernels
