#pragma once

// Products of matrices whose rows do not begin at multiples of 16 bytes.
//
// For those, as GPT-2's with its 50257 words, cuBLASLt has kernels of older GPUs
// alone, at a sixth of the others' rate on an H200. Copies that zeros fill up
// cost less, where each element takes part in many products.

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel_context.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels::cuda {

/// A row-major matrix, without gaps between its rows.
struct Extent {
  std::int64_t rows, cols;
  bool operator==(const Extent& other) const {
    return rows == other.rows && cols == other.cols;
  }
};

/// Copies a matrix of 16-bit elements into a longer one, whose other elements
/// become zero, or into a shorter one, which gets the first rows and columns.
void copy_resized(KernelContext& context, Extent from, const void* x, Extent to,
                  void* y);

/// The product to compute instead: m, n and k as multiples of 8, or as they are
/// where copies would cost more than they gain.
inline MatmulArgs padded_sizes(DType dtype, MatmulArgs args) {
  const bool has_16_bits = dtype == DType::kBF16 || dtype == DType::kF16;
  const bool is_large = std::min({args.m, args.n, args.k}) >= 256;
  if (!has_16_bits || !is_large || args.batch != 1) return args;
  for (std::int64_t* size : {&args.m, &args.n, &args.k}) {
    *size = (*size + 7) / 8 * 8;
  }
  return args;
}

/// One matrix of a product in its padded size; the matrix itself where that is
/// its own.
class PaddedMatrix {
 public:
  PaddedMatrix(KernelContext& context, Extent packed, Extent padded)
      : context_(context),
        packed_(packed),
        padded_(padded),
        scratch_(context, is_copy() ? static_cast<std::size_t>(2 * padded.rows *
                                                               padded.cols)
                                    : 0) {}
  bool is_copy() const { return !(packed_ == padded_); }
  /// Where the product reads `matrix`.
  const void* read(const void* matrix) const {
    if (!is_copy()) return matrix;
    copy_resized(context_, packed_, matrix, padded_, scratch_.data());
    return scratch_.data();
  }
  /// Where the product writes `matrix`; write_back() brings it there.
  void* place_of(void* matrix) const {
    return is_copy() ? scratch_.data() : matrix;
  }
  void write_back(void* matrix) const {
    if (!is_copy()) return;
    copy_resized(context_, padded_, scratch_.data(), packed_, matrix);
  }

 private:
  KernelContext& context_;
  Extent packed_, padded_;
  Scratch scratch_;
};

/// Calls product(padded, a, b, c), with copies of the matrices of `args` where
/// `padded` has other sizes.
template <typename Product>
void multiply_padded(KernelContext& context, const MatmulArgs& args,
                     const MatmulArgs& padded, const void* a, const void* b,
                     void* c, Product product) {
  const auto stored = [](std::int64_t rows, std::int64_t cols,
                         bool transposed) {
    return transposed ? Extent{cols, rows} : Extent{rows, cols};
  };
  const auto matrix = [&](auto extent_of) {
    return PaddedMatrix(context, extent_of(args), extent_of(padded));
  };
  const PaddedMatrix left =
      matrix([&](const MatmulArgs& x) { return stored(x.m, x.k, x.trans_a); });
  const PaddedMatrix right =
      matrix([&](const MatmulArgs& x) { return stored(x.k, x.n, x.trans_b); });
  const PaddedMatrix result = matrix([](const MatmulArgs& x) {
    return Extent{x.m, x.n};
  });
  if (args.resume) result.read(c);
  product(padded, left.read(a), right.read(b), result.place_of(c));
  result.write_back(c);
}

}  // namespace shardbook::kernels::cuda
