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
  const T* bias;
  bool resume;
};

template <typename T>
Product<T> product_at(const MatmulArgs& args, const void* a, const void* b,
                      void* c, const void* bias, std::int64_t i) {
  return {args.m,
          args.n,
          args.k,
          static_cast<const T*>(a) + i * args.m * args.k,
          args.trans_a ? 1 : args.k,
          args.trans_a ? args.m : 1,
          static_cast<const T*>(b) + i * args.k * args.n,
          args.trans_b ? 1 : args.n,
          args.trans_b ? args.k : 1,
          static_cast<T*>(c) + i * args.m * args.n,
          static_cast<const T*>(bias),
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

// Rows [from, to) of the product's block of k that starts at p. C holds the
// sums of earlier blocks.
template <typename T>
void multiply_block(const Product<T>& x, std::int64_t p, std::int64_t depth,
                    std::int64_t from, std::int64_t to, const T* packed_b,
                    T* packed_a) {
  constexpr std::int64_t kCols = kTileCols<T>;
  const bool resume = p > 0 || x.resume;
  const bool with_bias = x.bias != nullptr && p + depth == x.k;
  pack_panels<kTileRows>(x.a + from * x.a_row + p * x.a_col, x.a_row, x.a_col,
                         to - from, depth, packed_a);
  for (std::int64_t j = 0; j < x.n; j += kCols) {
    const std::int64_t cols = std::min(kCols, x.n - j);
    for (std::int64_t i = from; i < to; i += kTileRows) {
      T* const out = x.c + i * x.n + j;
      const std::int64_t rows = std::min<std::int64_t>(kTileRows, to - i);
      // The next tile below has time to arrive.
      const std::int64_t next = i + kTileRows;
      if (next < to) {
        prefetch_tile(out + kTileRows * x.n,
                      std::min<std::int64_t>(kTileRows, to - next), x.n);
      }
      multiply_panel<1>(rows, cols, depth, packed_a + (i - from) * depth,
                        kTileRows, packed_b + j * depth, kCols, resume, out,
                        x.n, with_bias ? x.bias + j : nullptr);
    }
  }
}

template <typename T>
void multiply_serial(const Product<T>& x, T* packed_a, T* packed_b) {
  for (std::int64_t p = 0; p < x.k; p += kBlockK) {
    const std::int64_t depth = std::min(kBlockK, x.k - p);
    pack_b(x, p, depth, 0, (x.n + kTileCols<T> - 1) / kTileCols<T>, packed_b);
    for (std::int64_t i = 0; i < x.m; i += kBlockRows) {
      multiply_block(x, p, depth, i, std::min(x.m, i + kBlockRows), packed_b,
                     packed_a);
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
  const double flops = 2.0 * args.m * args.n * args.k;
  // A thread is worth starting for about 100 microseconds of work.
  constexpr double kWorthThread = 5e6;
  const int threads = flops * args.batch < 2 * kWorthThread ? 1 : max_threads();

  if (threads == 1 || args.batch >= threads) {
    const std::int64_t each = a_size + b_size;
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
                                        mine, mine + a_size);
                      }
                    });
    return;
  }

  // One product over all threads: they pack B together, then take rows.
  const std::int64_t panels = (args.n + kTileCols<T> - 1) / kTileCols<T>;
  const std::int64_t tiles = (args.m + kTileRows - 1) / kTileRows;
  Scratch scratch(context, (threads * a_size + b_size) * sizeof(T));
  T* const packed_a = scratch.as<T>();
  T* const packed_b = packed_a + threads * a_size;
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
                             packed_b, packed_a + piece * a_size);
            }
          });
    }
  }
}

// 16-bit operands are widened into scratch, multiplied, and rounded once.
void multiply_widened(KernelContext& context, DType dtype,
                      const MatmulArgs& args, const void* a, const void* b,
                      void* c, const void* bias) {
  const std::int64_t a_size = args.m * args.k, b_size = args.k * args.n,
                     c_size = args.m * args.n;
  Scratch scratch(context, (a_size + b_size + c_size + args.n) * sizeof(float));
  float* const wide_a = scratch.as<float>();
  float* const wide_b = wide_a + a_size;
  float* const wide_c = wide_b + b_size;
  float* const wide_bias = wide_c + c_size;
  const auto widen = [&](const void* x, std::int64_t i, std::int64_t n,
                         float* out) {
    cast(context, dtype, static_cast<const std::uint16_t*>(x) + i * n,
         DType::kF32, out, n);
  };
  MatmulArgs one = args;
  one.batch = 1;
  if (bias != nullptr) widen(bias, 0, args.n, wide_bias);
  for (std::int64_t i = 0; i < args.batch; ++i) {
    widen(a, i, a_size, wide_a);
    widen(b, i, b_size, wide_b);
    if (args.resume) widen(c, i, c_size, wide_c);
    multiply_all<float>(context, one, wide_a, wide_b, wide_c,
                        bias == nullptr ? nullptr : wide_bias);
    cast(context, DType::kF32, wide_c, dtype,
         static_cast<std::uint16_t*>(c) + i * c_size, c_size);
  }
}

// The product when k is 0: zeros, C or bias.
void multiply_empty(KernelContext& context, DType dtype, const MatmulArgs& args,
                    void* c, const void* bias) {
  const std::int64_t rows = args.batch * args.m;
  if (!args.resume) fill(context, dtype, rows * args.n, c, 0.0);
  if (bias == nullptr) return;
  binary(context, BinaryOp::kAdd, dtype, {rows, args.n}, c, {args.n}, bias, c);
}

// Below this, calling oneDNN costs more than it saves.
bool is_large(const MatmulArgs& args) {
  return args.m * args.n * args.k >= std::int64_t{1} << 22;
}

}  // namespace

void matmul(KernelContext& context, DType dtype, const MatmulArgs& args,
            const void* a, const void* b, void* c, const void* bias) {
  check_args(args);
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
      [[fallthrough]];
    default:
      return multiply_widened(context, dtype, args, a, b, c, bias);
  }
}

}  // namespace shardbook::kernels::cpu
