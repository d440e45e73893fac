#include "core/kernels/embedding.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/kernels/cpu/simd.h"

namespace shardbook::kernels::cpu {

namespace {

// The table's row for index i, or -1 for a row of another shard.
class Rows {
 public:
  Rows(const char* kernel, const TableShape& shape, DType dtype,
       const void* indices)
      : kernel_(kernel),
        shape_(shape),
        wide_(dtype == DType::kI64),
        indices_(indices) {
    SB_CHECK(dtype == DType::kI64 || dtype == DType::kI32, kernel,
             ": indices of dtype ", dtype_name(dtype), "; give i64 or i32");
  }

  std::int64_t operator()(std::int64_t i) const {
    const std::int64_t index =
        wide_ ? static_cast<const std::int64_t*>(indices_)[i]
              : static_cast<const std::int32_t*>(indices_)[i];
    const std::int64_t row = index - shape_.first_row;
    if (row >= 0 && row < shape_.rows) return row;
    SB_CHECK(shape_.skip_foreign && index >= 0, kernel_, ": index ", index,
             " at position ", i, "; the table has rows ", shape_.first_row,
             " to ", shape_.first_row + shape_.rows - 1);
    return -1;
  }

 private:
  const char* kernel_;
  TableShape shape_;
  bool wide_;
  const void* indices_;
};

}  // namespace

void gather_rows(KernelContext&, DType dtype, const TableShape& shape,
                 const void* table, DType index_dtype, const void* indices,
                 std::int64_t n, void* out) {
  const Rows rows("gather_rows", shape, index_dtype, indices);
  const std::size_t bytes = shape.cols * dtype_bytes(dtype);
  for_rows(n, shape.cols, [&](std::int64_t i) {
    const std::int64_t row = rows(i);
    if (bytes == 0) return;  // arrays without elements may be null
    char* to = static_cast<char*>(out) + i * bytes;
    if (row < 0) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, static_cast<const char*>(table) + row * bytes, bytes);
    }
  });
}

void scatter_add_rows(KernelContext& context, DType dtype,
                      const TableShape& shape, void* table, DType index_dtype,
                      const void* indices, std::int64_t n, const void* values) {
  const Rows rows("scatter_add_rows", shape, index_dtype, indices);
  for (std::int64_t i = 0; i < n; ++i) rows(i);  // Before anything is written
  const std::int64_t cols = shape.cols;
  dispatch_floating("scatter_add_rows", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    const T* in = static_cast<const T*>(values);
    T* out = static_cast<T*>(table);
    // Threads share the columns, so that each row adds in order.
    const std::int64_t grain =
        std::max<std::int64_t>(64, kGrain / std::max<std::int64_t>(1, n));
    if constexpr (std::is_same_v<T, S>) {
      parallel_for(0, cols, grain, [&](std::int64_t from, std::int64_t to) {
        for (std::int64_t i = 0; i < n; ++i) {
          const std::int64_t row = rows(i);
          if (row < 0) continue;
          T* sum = out + row * cols + from;
          map_range(to - from, sum, in + i * cols + from, sum,
                    [](const V& a, const V& b) { return a + b; });
        }
      });
      return;
    }
    // 16 bits: positions grouped by row, each row added up in f32.
    Scratch scratch(context, 2 * n * sizeof(std::int64_t) + 16);
    std::int64_t* const order = scratch.as<std::int64_t>();
    std::int64_t* const row_of = order + n;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      row_of[i] = rows(i);
      if (row_of[i] >= 0) order[count++] = i;
    }
    std::stable_sort(order, order + count, [&](std::int64_t a, std::int64_t b) {
      return row_of[a] < row_of[b];
    });
    parallel_for(0, cols, grain, [&](std::int64_t from, std::int64_t to) {
      constexpr std::int64_t kStrip = 256;
      S sums[kStrip];
      for (std::int64_t c = from; c < to; c += kStrip) {
        const std::int64_t width = std::min(kStrip, to - c);
        for (std::int64_t k = 0; k < count;) {
          T* sum = out + row_of[order[k]] * cols + c;
          for (std::int64_t j = 0; j < width; ++j) sums[j] = widen(sum[j]);
          const std::int64_t row = row_of[order[k]];
          for (; k < count && row_of[order[k]] == row; ++k) {
            const T* add = in + order[k] * cols + c;
            for (std::int64_t j = 0; j < width; ++j) sums[j] += widen(add[j]);
          }
          for (std::int64_t j = 0; j < width; ++j) sum[j] = narrow<T>(sums[j]);
        }
      }
    });
  });
}

}  // namespace shardbook::kernels::cpu
