// Layer normalisation, and RMSNorm: the same (kCentered is false) without mean
// and beta. A warp works on a row of up to 1024 elements, a block on a longer
// one (warp_rows.h).

#include "core/kernels/norm.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/kernels/cuda/warp_rows.h"

namespace shardbook::kernels::cuda {

namespace {

/// The elements of a thread's row: none in a warp's part behind the last row,
/// which takes part in the sums of the warp all the same.
__device__ inline std::int64_t cols_of(std::int64_t row, std::int64_t rows,
                                       std::int64_t cols) {
  return row < rows ? cols : 0;
}

/// RMSNorm's (x rstd), as weight multiplies it.
template <typename T>
__device__ Compute<T> rounded(Compute<T> x) {
  return widen(narrow<T>(x));
}

template <typename T, typename Shape, bool kCentered>
__global__ void norm_rows(std::int64_t rows, std::int64_t all_cols,
                          Compute<T> eps, const T* x, const T* gamma,
                          const T* beta, T* y, Compute<T>* means,
                          Compute<T>* rstds) {
  using S = Compute<T>;
  constexpr int kWidth = Shape::kWidth;
  const std::int64_t row = Shape::first_row();
  const std::int64_t cols = cols_of(row, rows, all_cols);
  const RowPart<T, Shape> part(x + row * cols, cols);
  const S count = static_cast<S>(all_cols);

  S mean = 0;
  if constexpr (kCentered) {
    S sum = 0;
    Shape::for_vectors(cols, [&](int i, std::int64_t column) {
      const auto v = part.at(i, column);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += widen(v[j]);
    });
    mean = Shape::sum(sum) / count;
  }

  S squares = 0;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S d = widen(v[j]) - mean;
      squares += d * d;
    }
  });
  const S rstd = S(1) / std::sqrt(Shape::sum(squares) / count + eps);

  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
    const auto scale = load_vector<kWidth>(gamma + column);
    AlignedVector<T, kWidth> shift, out;
    if constexpr (kCentered) shift = load_vector<kWidth>(beta + column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S xhat = (widen(v[j]) - mean) * rstd;
      if constexpr (kCentered) {
        out[j] = narrow<T>(xhat * widen(scale[j]) + widen(shift[j]));
      } else {
        out[j] = narrow<T>(rounded<T>(xhat) * widen(scale[j]));
      }
    }
    store_vector(y + row * cols + column, out);
  });
  if (row >= rows || Shape::thread() != 0) return;
  if constexpr (kCentered) means[row] = mean;
  rstds[row] = rstd;
}

/// The arrays of a backward; RMSNorm has no mean, which is zero below.
template <typename T, bool kIsCentered>
struct NormGradients {
  using S = Compute<T>;
  static constexpr bool kCentered = kIsCentered;
  static constexpr int kOuts = kCentered ? 2 : 1;
  std::int64_t rows, cols;
  const T* x;
  const T* gamma;
  const S* mean;
  const S* rstd;
  const T* dy;
  T* dx;
  /// [blocks, kOuts, cols]: sums of dy * xhat, and of dy, over the rows of a
  /// block.
  S* partials;

  /// What gamma multiplied in forward.
  __device__ static S operand(S xhat) {
    if constexpr (kCentered) {
      return xhat;
    } else {
      return rounded<T>(xhat);
    }
  }
};

/// Blocks that walk over the rows, so that each adds up the gradients of gamma
/// and beta in registers: enough for a large GPU, few enough that the sums of
/// all blocks are small beside the rows.
template <typename Shape>
std::int64_t num_walkers(std::int64_t rows) {
  constexpr std::int64_t kMostWalkers = 1024, kMostSums = 1 << 20;
  constexpr std::int64_t kLeastRows = 4 * Shape::kRowsPerBlock;
  constexpr std::int64_t kMost =
      Shape::kInRegisters
          ? std::min(kMostWalkers, kMostSums / Shape::kItemsPerRow)
          : kMostWalkers / 8;
  return std::min(kMost, ceil_div(rows, kLeastRows));
}

/// Few elements per thread: it keeps two rows and two sums of them.
template <typename T, int kWidth, bool kCentered, typename Body>
void with_walker_width(std::int64_t cols, Body body) {
  constexpr int kFew = 8, kMany = kRowItems<T, kWidth>, kHalf = kRowBlock / 2;
  if (!kCentered && cols <= NarrowRows<kWidth>::kItemsPerRow) {
    body(NarrowRows<kWidth>{});
  } else if (cols <= kWarp * kFew) {
    body(RowShape<kWidth, kWarp, kFew>{});
  } else if (cols <= kHalf * kFew) {
    body(RowShape<kWidth, kHalf, kFew>{});
  } else if (cols <= kRowBlock * kFew) {
    body(RowShape<kWidth, kRowBlock, kFew>{});
  } else if (cols <= kRowBlock * kMany) {
    body(RowShape<kWidth, kRowBlock, kMany>{});
  } else {
    body(RowShape<kWidth, kRowBlock, 0>{});
  }
}

/// One thread's part of the rows of its block.
template <typename Gradients, typename T, typename Shape>
struct NormBackward {
  using S = Compute<T>;
  static constexpr int kWidth = Shape::kWidth, kOuts = Gradients::kOuts;
  static constexpr int kSums = Shape::kInRegisters ? Shape::kVectors : 1;
  static constexpr bool kCentered = Gradients::kCentered;

  Gradients g;
  S sums[kOuts][kSums][kWidth];  ///< Of gamma's gradient, and of beta's

  __device__ explicit NormBackward(const Gradients& gradients) : g(gradients) {
#pragma unroll
    for (int out = 0; out < kOuts; ++out) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[out][i][j] = S(0);
      }
    }
  }

  __device__ void add_row(std::int64_t row) {
    const std::int64_t cols = cols_of(row, g.rows, g.cols);
    const RowPart<T, Shape> x(g.x + row * cols, cols);
    const RowPart<T, Shape> dy(g.dy + row * cols, cols);
    S center = 0, factor = 0;
    if (cols > 0) factor = g.rstd[row];
    if constexpr (kCentered) center = g.mean[row];
    S sum = 0, sum_xhat = 0;
    Shape::for_vectors(cols, [&](int i, std::int64_t column) {
      const auto v = x.at(i, column), up = dy.at(i, column);
      const auto scale = load_vector<kWidth>(g.gamma + column);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const S xhat = (widen(v[j]) - center) * factor, d = widen(up[j]);
        const S scaled = d * widen(scale[j]);
        if constexpr (kCentered) sum += scaled;
        sum_xhat = std::fma(scaled, xhat, sum_xhat);
        if constexpr (Shape::kInRegisters) {
          sums[0][i][j] = std::fma(d, g.operand(xhat), sums[0][i][j]);
          if constexpr (kCentered) sums[1][i][j] += d;
        }
      }
    });
    if (g.dx == nullptr) return;
    const S count = static_cast<S>(g.cols);
    S shift = 0;
    if constexpr (kCentered) shift = Shape::sum(sum) / count;
    const S slope = Shape::sum(sum_xhat) / count;
    Shape::for_vectors(cols, [&](int i, std::int64_t column) {
      const auto v = x.at(i, column), up = dy.at(i, column);
      const auto scale = load_vector<kWidth>(g.gamma + column);
      AlignedVector<T, kWidth> out;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const S xhat = (widen(v[j]) - center) * factor, d = widen(up[j]);
        const S scaled = d * widen(scale[j]);
        out[j] = narrow<T>(factor * (scaled - shift - xhat * slope));
      }
      store_vector(g.dx + row * cols + column, out);
    });
  }
};

template <typename T, typename Shape, typename Gradients>
__global__ void norm_backward_rows(Gradients gradients) {
  using S = Compute<T>;
  using Work = NormBackward<Gradients, T, Shape>;
  constexpr int kWidth = Shape::kWidth, kThreads = Shape::kThreads;
  const std::int64_t cols = gradients.cols;
  Work work(gradients);
  // A warp stays together: its sums need all lanes
  for (std::int64_t row = Shape::first_row(), ahead = row % Shape::kRowsPerWarp;
       row - ahead < gradients.rows;
       row += std::int64_t{gridDim.x} * Shape::kRowsPerBlock) {
    work.add_row(row);
  }
  if constexpr (Shape::kInRegisters) {
    if (gradients.partials == nullptr) return;
    S* const mine =
        gradients.partials + std::int64_t{blockIdx.x} * Work::kOuts * cols;
    if constexpr (kThreads > kWarp) {
      Shape::for_vectors(cols, [&](int i, std::int64_t column) {
#pragma unroll
        for (int out = 0; out < Work::kOuts; ++out) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            mine[out * cols + column + j] = work.sums[out][i][j];
          }
        }
      });
    } else {
      // Warp after warp adds to the block's sums. Neighbouring threads meet
      // neighbouring elements: [vectors, width, threads].
      constexpr int kSums = Shape::kVectors * kWidth * kThreads;
      __shared__ SharedArray<S, Work::kOuts * kSums> sums;
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      for (int warp = 0; warp < kRowBlock / kWarp; ++warp) {
        if (static_cast<int>(threadIdx.x) / kWarp == warp) {
#pragma unroll
          for (int out = 0; out < Work::kOuts; ++out) {
#pragma unroll
            for (int i = 0; i < Shape::kVectors; ++i) {
#pragma unroll
              for (int j = 0; j < kWidth; ++j) {
                const S sum = Shape::sum_of_rows(work.sums[out][i][j]);
                if (lane >= kThreads) continue;
                const int at =
                    ((out * Shape::kVectors + i) * kWidth + j) * kThreads +
                    Shape::thread();
                sums[at] = (warp == 0 ? S(0) : sums[at]) + sum;
              }
            }
          }
        }
        __syncthreads();
      }
      for (int c = static_cast<int>(threadIdx.x); c < cols; c += kRowBlock) {
        const int vector = c / kWidth / kThreads, j = c % kWidth;
        const int at = (vector * kWidth + j) * kThreads + c / kWidth % kThreads;
        for (int out = 0; out < Work::kOuts; ++out) {
          mine[out * cols + c] = sums[out * kSums + at];
        }
      }
    }
  }
}

/// Partial sums of rows that are too long for registers: a thread for a column,
/// the rows of a block one after the other.
template <typename T, typename Gradients>
__global__ void norm_column_sums(Gradients g) {
  using S = Compute<T>;
  const std::int64_t column =
      std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (column >= g.cols) return;
  S dgamma = 0, dbeta = 0;
  for (std::int64_t row = blockIdx.x; row < g.rows; row += gridDim.x) {
    const S d = widen(g.dy[row * g.cols + column]);
    S center = 0;
    if constexpr (Gradients::kCentered) center = g.mean[row];
    const S v = widen(g.x[row * g.cols + column]);
    const S xhat = (v - center) * g.rstd[row];
    dgamma = std::fma(d, g.operand(xhat), dgamma);
    dbeta += d;
  }
  S* const mine =
      g.partials + std::int64_t{blockIdx.x} * Gradients::kOuts * g.cols;
  mine[column] = dgamma;
  if constexpr (Gradients::kCentered) mine[g.cols + column] = dbeta;
}

/// Adds the partial sums of the blocks: a block for 32 columns, of which each
/// warp takes every 8th partial sum. gridDim.y: dgamma, and dbeta if any.
template <typename T>
__global__ void add_partials(std::int64_t blocks, std::int64_t cols,
                             const Compute<T>* partials, T* dgamma, T* dbeta) {
  using S = Compute<T>;
  constexpr int kWarps = kRowBlock / kWarp;
  __shared__ SharedArray<S, kRowBlock> sums;
  T* const out = blockIdx.y == 0 ? dgamma : dbeta;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t column = std::int64_t{blockIdx.x} * kWarp + lane;
  S sum = 0;
  if (column < cols) {
    for (std::int64_t block = warp; block < blocks; block += kWarps) {
      sum += partials[(block * gridDim.y + blockIdx.y) * cols + column];
    }
  }
  sums[static_cast<int>(threadIdx.x)] = sum;
  __syncthreads();
  if (warp > 0 || column >= cols) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w * kWarp + lane];
  out[column] = narrow<T>(sum);
}

template <typename T, bool kCentered>
void norm_backward(KernelContext& context, const char* name,
                   NormGradients<T, kCentered> gradients, void* dgamma,
                   void* dbeta) {
  using S = Compute<T>;
  using Gradients = NormGradients<T, kCentered>;
  const std::int64_t rows = gradients.rows, cols = gradients.cols;
  const bool wants_sums = dgamma != nullptr, wants_dx = gradients.dx != nullptr;
  if (!wants_sums && !wants_dx) return;
  const auto run = [&](auto shape) {
    using Shape = decltype(shape);
    const std::int64_t blocks = num_walkers<Shape>(rows);
    Scratch scratch(
        context, wants_sums ? blocks * Gradients::kOuts * cols * sizeof(S) : 0);
    gradients.partials = scratch.as<S>();
    const unsigned walkers = blocks_of(blocks);
    // Before dx, which may be dy
    if (!Shape::kInRegisters && wants_sums) {
      launch(context, name, dim3(walkers, blocks_of(cols, kRowBlock)),
             kRowBlock, norm_column_sums<T, Gradients>, gradients);
    }
    if (Shape::kInRegisters || wants_dx) {
      launch(context, name, walkers, Shape::kBlockThreads,
             norm_backward_rows<T, Shape, Gradients>, gradients);
    }
    if (!wants_sums) return;
    launch(context, name, dim3(blocks_of(cols, kWarp), Gradients::kOuts),
           kRowBlock, add_partials<T>, blocks, cols, scratch.data(), dgamma,
           dbeta);
  };
  with_width<T>(
      cols,
      is_aligned(kVectorBytes, gradients.x, gradients.gamma, gradients.dy,
                 gradients.dx),
      [&](auto width) { with_walker_width<T, width(), kCentered>(cols, run); });
}

}  // namespace

void layer_norm(KernelContext& context, DType dtype, std::int64_t rows,
                std::int64_t cols, double eps, const void* x, const void* gamma,
                const void* beta, void* y, void* mean, void* rstd) {
  SB_CHECK(cols >= 1, "layer_norm: rows of ", cols, " elements; at least 1");
  with_floating("layer_norm", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_row_shape<T>(cols, is_aligned(kVectorBytes, x, gamma, beta, y),
                      [&](auto shape) {
                        using Shape = decltype(shape);
                        launch(context, "layer_norm", Shape::grid(rows),
                               kRowBlock, norm_rows<T, Shape, true>, rows, cols,
                               eps, x, gamma, beta, y, mean, rstd);
                      });
  });
}

void layer_norm_backward(KernelContext& context, DType dtype, std::int64_t rows,
                         std::int64_t cols, const void* x, const void* gamma,
                         const void* mean, const void* rstd, const void* dy,
                         void* dx, void* dgamma, void* dbeta) {
  with_floating("layer_norm_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    norm_backward<T, true>(
        context, "layer_norm_backward",
        {rows, cols, static_cast<const T*>(x), static_cast<const T*>(gamma),
         static_cast<const Compute<T>*>(mean),
         static_cast<const Compute<T>*>(rstd), static_cast<const T*>(dy),
         static_cast<T*>(dx), nullptr},
        dgamma, dbeta);
  });
}

void rms_norm(KernelContext& context, DType dtype, std::int64_t rows,
              std::int64_t cols, double eps, const void* x, const void* weight,
              void* y, void* rstd) {
  SB_CHECK(cols >= 1, "rms_norm: rows of ", cols, " elements; at least 1");
  with_floating("rms_norm", dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, "rms_norm", Shape::grid(rows), Shape::kBlockThreads,
             norm_rows<T, Shape, false>, rows, cols, eps, x, weight, nullptr, y,
             nullptr, rstd);
    };
    with_width<T>(cols, is_aligned(kVectorBytes, x, weight, y),
                  [&](auto width) {
                    if (cols <= NarrowRows<width()>::kItemsPerRow) {
                      run(NarrowRows<width()>{});
                    } else {
                      with_row_width<T, width()>(cols, run);
                    }
                  });
  });
}

void rms_norm_backward(KernelContext& context, DType dtype, std::int64_t rows,
                       std::int64_t cols, const void* x, const void* weight,
                       const void* rstd, const void* dy, void* dx,
                       void* dweight) {
  with_floating("rms_norm_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    norm_backward<T, false>(
        context, "rms_norm_backward",
        {rows, cols, static_cast<const T*>(x), static_cast<const T*>(weight),
         nullptr, static_cast<const Compute<T>*>(rstd),
         static_cast<const T*>(dy), static_cast<T*>(dx), nullptr},
        dweight, nullptr);
  });
}

SHARDBOOK_CUDA_KERNEL(layer_norm);
SHARDBOOK_CUDA_KERNEL(layer_norm_backward);
SHARDBOOK_CUDA_KERNEL(rms_norm);
SHARDBOOK_CUDA_KERNEL(rms_norm_backward);

}  // namespace shardbook::kernels::cuda
