#include "core/kernels/matmul.h"

#include <algorithm>

#include "core/kernels/cpu/dnnl_kernels.h"
#include "core/kernels/cpu/gemm.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/matmul_args.h"

namespace shardbook::kernels::cpu {

namespace {

// Rows of A that are packed together: with kBlockK a quarter of L2.
constexpr std::int64_t kBlockRows = 240 / kTileRows * kTileRows;

// One product with explicit strides: A(i, p) at i * a_row + p * a_col, and so
// on for B.
template <typename T>
struct Product {
  std::int64_t m, n, k;
  const T* a;
  std::int64_t a_row, a_col;
  const T* b;
  std::int64_t b_row, b_col;
  T* c;
  std::int64_t ldc;
  const T* bias;
  bool accumulate, resume;
};

template <typename T>
Product<T> product_at(const MatmulArgs& args, const void* a, const void* b,
                      void* c, const void* bias, std::int64_t i) {
  return {args.m,
          args.n,
          args.k,
          static_cast<const T*>(a) + i * args.stride_a,
          args.trans_a ? 1 : args.lda,
          args.trans_a ? args.lda : 1,
          static_cast<const T*>(b) + i * args.stride_b,
          args.trans_b ? 1 : args.ldb,
          args.trans_b ? args.ldb : 1,
          static_cast<T*>(c) + i * args.stride_c,
          args.ldc,
          static_cast<const T*>(bias),
          args.accumulate,
          args.resume};
}

// Elements of scratch for one block of rows, and for a block of k of all of B.
template <typename T>
std::int64_t packed_a_size(const Product<T>& x) {
  return round_up(std::min(x.m, kBlockRows), kTileRows) *
         std::min(x.k, kBlockK);
}
template <typename T>
std::int64_t packed_b_size(const Product<T>& x) {
  return round_up(x.n, kTileCols<T>) * std::min(x.k, kBlockK);
}

template <typename T>
void pack_b(const Product<T>& x, std::int64_t p, std::int64_t depth,
            std::int64_t first_panel, std::int64_t last_panel, T* packed) {
  constexpr std::int64_t kCols = kTileCols<T>;
  const std::int64_t from = first_panel * kCols;
  const std::int64_t to = std::min(x.n, last_panel * kCols);
  pack_panels<kCols>(x.b + p * x.b_row + from * x.b_col, x.b_col, x.b_row,
                     to - from, depth, packed + from * depth);
}

// Rows [from, to) of the product's block of k that starts at p. `sums` holds
// the sums of earlier blocks.
template <typename T>
void multiply_block(const Product<T>& x, std::int64_t p, std::int64_t depth,
                    std::int64_t from, std::int64_t to, const T* packed_b,
                    T* packed_a, T* sums, std::int64_t sums_ld) {
  constexpr std::int64_t kCols = kTileCols<T>;
  const bool first = p == 0, last = p + depth == x.k;
  pack_panels<kTileRows>(x.a + from * x.a_row + p * x.a_col, x.a_row, x.a_col,
                         to - from, depth, packed_a);
  for (std::int64_t j = 0; j < x.n; j += kCols) {
    const std::int64_t cols = std::min(kCols, x.n - j);
    for (std::int64_t i = from; i < to; i += kTileRows) {
      TileEnds<T> ends;
      if (!first || x.resume) {
        ends.partial = sums + i * sums_ld + j;
        ends.partial_ld = sums_ld;
      }
      if (last && x.accumulate && !x.resume) {
        ends.addend = x.c + i * x.ldc + j;
        ends.addend_ld = x.ldc;
      }
      if (last && x.bias != nullptr) ends.bias = x.bias + j;
      T* out = last ? x.c + i * x.ldc + j : sums + i * sums_ld + j;
      const std::int64_t ld = last ? x.ldc : sums_ld;
      const std::int64_t rows = std::min<std::int64_t>(kTileRows, to - i);
      // The next tile below has time to arrive.
      const std::int64_t next = i + kTileRows;
      if (next < to) {
        prefetch_tile(out + kTileRows * ld,
                      std::min<std::int64_t>(kTileRows, to - next), ld);
      }
      multiply_panel<1>(rows, cols, depth, packed_a + (i - from) * depth,
                        kTileRows, packed_b + j * depth, kCols, ends, out, ld);
    }
  }
}

// Sums between blocks of k go to C, unless C's old values are still needed.
template <typename T>
bool needs_sums(const Product<T>& x) {
  return x.accumulate && !x.resume && x.k > kBlockK;
}

template <typename T>
void multiply_serial(const Product<T>& x, T* packed_a, T* packed_b, T* sums) {
  for (std::int64_t p = 0; p < x.k; p += kBlockK) {
    const std::int64_t depth = std::min(kBlockK, x.k - p);
    pack_b(x, p, depth, 0, (x.n + kTileCols<T> - 1) / kTileCols<T>, packed_b);
    for (std::int64_t i = 0; i < x.m; i += kBlockRows) {
      multiply_block(x, p, depth, i, std::min(x.m, i + kBlockRows), packed_b,
                     packed_a, needs_sums(x) ? sums : x.c,
                     needs_sums(x) ? x.n : x.ldc);
    }
  }
}

// Scratch small enough for the stack costs nothing.
constexpr std::size_t kStackBytes = 16384;

template <typename T>
void multiply_all(KernelContext& context, const MatmulArgs& args, const void* a,
                  const void* b, void* c, const void* bias) {
  const Product<T> whole = product_at<T>(args, a, b, c, bias, 0);
  const std::int64_t a_size = packed_a_size(whole);
  const std::int64_t b_size = packed_b_size(whole);
  const std::int64_t sums_size = needs_sums(whole) ? args.m * args.n : 0;
  const double flops = 2.0 * args.m * args.n * args.k;
  // A thread is worth starting for about 100 microseconds of work.
  constexpr double kWorthThread = 5e6;
  const int threads = flops * args.batch < 2 * kWorthThread ? 1 : max_threads();

  if (threads == 1 || args.batch >= threads) {
    const std::int64_t each = a_size + b_size + sums_size;
    const int pieces = args.batch == 1 ? 1 : threads;
    const std::size_t bytes = pieces * each * sizeof(T);
    alignas(64) char stack[kStackBytes];
    Scratch scratch(context, bytes > kStackBytes ? bytes : 0);
    T* const base =
        bytes > kStackBytes ? scratch.as<T>() : reinterpret_cast<T*>(stack);
    const std::int64_t grain =
        threads == 1 ? args.batch
                     : std::max<std::int64_t>(
                           1, static_cast<std::int64_t>(kWorthThread / flops));
    parallel_pieces(0, args.batch, grain,
                    [&](int piece, std::int64_t from, std::int64_t to) {
                      T* mine = base + piece * each;
                      for (std::int64_t i = from; i < to; ++i) {
                        multiply_serial(product_at<T>(args, a, b, c, bias, i),
                                        mine, mine + a_size,
                                        mine + a_size + b_size);
                      }
                    });
    return;
  }

  // One product over all threads: they pack B together, then take rows.
  const std::int64_t panels = (args.n + kTileCols<T> - 1) / kTileCols<T>;
  const std::int64_t tiles = (args.m + kTileRows - 1) / kTileRows;
  Scratch scratch(context, (threads * a_size + b_size + sums_size) * sizeof(T));
  T* const packed_a = scratch.as<T>();
  T* const packed_b = packed_a + threads * a_size;
  T* const sums = packed_b + b_size;
  for (std::int64_t item = 0; item < args.batch; ++item) {
    const Product<T> x = product_at<T>(args, a, b, c, bias, item);
    for (std::int64_t p = 0; p < x.k; p += kBlockK) {
      const std::int64_t depth = std::min(kBlockK, x.k - p);
      parallel_for(0, panels, 1, [&](std::int64_t from, std::int64_t to) {
        pack_b(x, p, depth, from, to, packed_b);
      });
      parallel_pieces(
          0, tiles, 1, [&](int piece, std::int64_t from, std::int64_t to) {
            const std::int64_t end = std::min(x.m, to * kTileRows);
            for (std::int64_t i = from * kTileRows; i < end; i += kBlockRows) {
              multiply_block(x, p, depth, i, std::min(end, i + kBlockRows),
                             packed_b, packed_a + piece * a_size,
                             needs_sums(x) ? sums : x.c,
                             needs_sums(x) ? x.n : x.ldc);
            }
          });
    }
  }
}

// 16-bit operands are widened into scratch, multiplied, and rounded once.
template <typename T>
void multiply_widened(KernelContext& context, const MatmulArgs& args,
                      const void* a, const void* b, void* c, const void* bias) {
  const std::int64_t a_rows = args.trans_a ? args.k : args.m;
  const std::int64_t a_cols = args.trans_a ? args.m : args.k;
  const std::int64_t b_rows = args.trans_b ? args.n : args.k;
  const std::int64_t b_cols = args.trans_b ? args.k : args.n;
  Scratch scratch(
      context, (a_rows * a_cols + b_rows * b_cols + args.m * args.n + args.n) *
                   sizeof(float));
  float* const wide_a = scratch.as<float>();
  float* const wide_b = wide_a + a_rows * a_cols;
  float* const wide_c = wide_b + b_rows * b_cols;
  float* const wide_bias = wide_c + args.m * args.n;
  const auto widen_rows = [](const T* x, std::int64_t rows, std::int64_t cols,
                             std::int64_t ld, float* out) {
    for_rows(rows, cols, [&](std::int64_t r) {
      for (std::int64_t j = 0; j < cols; ++j) {
        out[r * cols + j] = widen(x[r * ld + j]);
      }
    });
  };
  MatmulArgs dense = args;
  dense.batch = 1;
  dense.lda = a_cols, dense.ldb = b_cols, dense.ldc = args.n;
  if (bias != nullptr) {
    widen_rows(static_cast<const T*>(bias), 1, args.n, args.n, wide_bias);
  }
  for (std::int64_t i = 0; i < args.batch; ++i) {
    if (i == 0 || args.stride_a != 0) {
      widen_rows(static_cast<const T*>(a) + i * args.stride_a, a_rows, a_cols,
                 args.lda, wide_a);
    }
    if (i == 0 || args.stride_b != 0) {
      widen_rows(static_cast<const T*>(b) + i * args.stride_b, b_rows, b_cols,
                 args.ldb, wide_b);
    }
    T* const out = static_cast<T*>(c) + i * args.stride_c;
    if (args.accumulate) {
      widen_rows(out, args.m, args.n, args.ldc, wide_c);
    }
    multiply_all<float>(context, dense, wide_a, wide_b, wide_c,
                        bias == nullptr ? nullptr : wide_bias);
    for_rows(args.m, args.n, [&](std::int64_t r) {
      for (std::int64_t j = 0; j < args.n; ++j) {
        out[r * args.ldc + j] = narrow<T>(wide_c[r * args.n + j]);
      }
    });
  }
}

// The product when k is 0: zeros, C or bias.
void multiply_empty(KernelContext& context, DType dtype, const MatmulArgs& args,
                    void* c, const void* bias) {
  const std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (std::int64_t r = 0; r < args.batch * args.m; ++r) {
    void* row = static_cast<char*>(c) +
                (r / args.m * args.stride_c + r % args.m * args.ldc) * bytes;
    if (!args.accumulate) fill(context, dtype, args.n, row, 0.0);
    if (bias != nullptr) axpy(context, dtype, args.n, 1.0, bias, row);
  }
}

// Below this, calling oneDNN costs more than it saves.
bool is_large(const MatmulArgs& args) {
  return args.m * args.n * args.k >= std::int64_t{1} << 22;
}

}  // namespace

void matmul(KernelContext& context, DType dtype, const MatmulArgs& original,
            const void* a, const void* b, void* c, const void* bias) {
  const MatmulArgs args = checked_args(original);
  dispatch_floating("matmul", dtype, [](auto) {});
  if (args.batch == 0 || args.m == 0 || args.n == 0) return;
  if (args.k == 0) return multiply_empty(context, dtype, args, c, bias);
  switch (dtype) {
    case DType::kF64:
      return multiply_all<double>(context, args, a, b, c, bias);
    case DType::kF32:
      if (!context.deterministic && is_large(args) &&
          matmul_dnnl(context, dtype, args, a, b, c, bias)) {
        return;
      }
      return multiply_all<float>(context, args, a, b, c, bias);
    case DType::kBF16:
      if (!context.deterministic &&
          matmul_dnnl(context, dtype, args, a, b, c, bias)) {
        return;
      }
      return multiply_widened<BF16>(context, args, a, b, c, bias);
    default:
      return multiply_widened<F16>(context, args, a, b, c, bias);
  }
}

}  // namespace shardbook::kernels::cpu
