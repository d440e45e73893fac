// Layer normalisation. A warp works on a row of up to 1024 elements, a block on
// a longer one (warp_rows.h).

#include "core/kernels/norm.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/kernels/cuda/warp_rows.h"

namespace shardbook::kernels::cuda {

namespace {

template <typename T, typename Shape>
__global__ void layer_norm_rows(std::int64_t rows, std::int64_t cols,
                                Compute<T> eps, const T* x, const T* gamma,
                                const T* beta, T* y, Compute<T>* means,
                                Compute<T>* rstds) {
  using S = Compute<T>;
  constexpr int kWidth = Shape::kWidth;
  const std::int64_t row = Shape::first_row();
  if (row >= rows) return;  // Never a part of a warp
  const RowPart<T, Shape> part(x + row * cols, cols);
  const S count = static_cast<S>(cols);

  S sum = 0;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += widen(v[j]);
  });
  const S mean = Shape::sum(sum) / count;

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
    const auto scale = load_vector<kWidth>(gamma + column),
               shift = load_vector<kWidth>(beta + column);
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S value = (widen(v[j]) - mean) * rstd * widen(scale[j]);
      out[j] = narrow<T>(value + widen(shift[j]));
    }
    store_vector(y + row * cols + column, out);
  });
  if (Shape::thread() == 0) means[row] = mean, rstds[row] = rstd;
}

/// The arrays of layer_norm_backward.
template <typename T>
struct LayerNormGradients {
  using S = Compute<T>;
  std::int64_t rows, cols;
  const T* x;
  const T* gamma;
  const S* mean;
  const S* rstd;
  const T* dy;
  T* dx;
  /// [blocks, 2, cols]: sums of dy * xhat, and of dy, over the rows of a block.
  S* partials;
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
template <typename T, int kWidth, typename Body>
void with_walker_width(std::int64_t cols, Body body) {
  constexpr int kFew = 8, kMany = kRowItems<T, kWidth>, kHalf = kRowBlock / 2;
  if (cols <= kWarp * kFew) {
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
template <typename T, typename Shape>
struct LayerNormBackward {
  using S = Compute<T>;
  static constexpr int kWidth = Shape::kWidth;
  static constexpr int kSums = Shape::kInRegisters ? Shape::kVectors : 1;

  LayerNormGradients<T> g;
  S dgamma[kSums][kWidth], dbeta[kSums][kWidth];

  __device__ explicit LayerNormBackward(const LayerNormGradients<T>& gradients)
      : g(gradients) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dgamma[i][j] = dbeta[i][j] = S(0);
    }
  }

  __device__ void add_row(std::int64_t row) {
    const std::int64_t cols = g.cols;
    const RowPart<T, Shape> x(g.x + row * cols, cols);
    const RowPart<T, Shape> dy(g.dy + row * cols, cols);
    const S center = g.mean[row], factor = g.rstd[row];
    S sum = 0, sum_xhat = 0;
    Shape::for_vectors(cols, [&](int i, std::int64_t column) {
      const auto v = x.at(i, column), up = dy.at(i, column);
      const auto scale = load_vector<kWidth>(g.gamma + column);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const S xhat = (widen(v[j]) - center) * factor, d = widen(up[j]);
        const S scaled = d * widen(scale[j]);
        sum += scaled;
        sum_xhat = std::fma(scaled, xhat, sum_xhat);
        if constexpr (Shape::kInRegisters) {
          dgamma[i][j] = std::fma(d, xhat, dgamma[i][j]);
          dbeta[i][j] += d;
        }
      }
    });
    if (g.dx == nullptr) return;
    const S count = static_cast<S>(cols);
    const S shift = Shape::sum(sum) / count;
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

template <typename T, typename Shape>
__global__ void layer_norm_backward_rows(LayerNormGradients<T> gradients) {
  using S = Compute<T>;
  constexpr int kWidth = Shape::kWidth, kThreads = Shape::kThreads;
  const std::int64_t rows = gradients.rows, cols = gradients.cols;
  LayerNormBackward<T, Shape> work(gradients);
  for (std::int64_t row = Shape::first_row(); row < rows;
       row += std::int64_t{gridDim.x} * Shape::kRowsPerBlock) {
    work.add_row(row);
  }
  if constexpr (Shape::kInRegisters) {
    if (gradients.partials == nullptr) return;
    S* const mine = gradients.partials + std::int64_t{blockIdx.x} * 2 * cols;
    if constexpr (kThreads > kWarp) {
      Shape::for_vectors(cols, [&](int i, std::int64_t column) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          mine[column + j] = work.dgamma[i][j];
          mine[cols + column + j] = work.dbeta[i][j];
        }
      });
    } else {
      // Warp after warp adds to the block's sums. Neighbouring threads meet
      // neighbouring elements: [vectors, width, threads].
      constexpr int kSums = Shape::kVectors * kWidth * kThreads;
      __shared__ SharedArray<S, 2 * kSums> sums;
      for (int warp = 0; warp < kRowBlock / kWarp; ++warp) {
        if (static_cast<int>(threadIdx.x) / kWarp == warp) {
#pragma unroll
          for (int i = 0; i < Shape::kVectors; ++i) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
              const int at = (i * kWidth + j) * kThreads + Shape::thread();
              sums[at] = (warp == 0 ? S(0) : sums[at]) + work.dgamma[i][j];
              sums[kSums + at] =
                  (warp == 0 ? S(0) : sums[kSums + at]) + work.dbeta[i][j];
            }
          }
        }
        __syncthreads();
      }
      for (int c = static_cast<int>(threadIdx.x); c < cols; c += kRowBlock) {
        const int vector = c / kWidth / kThreads, j = c % kWidth;
        const int at = (vector * kWidth + j) * kThreads + c / kWidth % kThreads;
        mine[c] = sums[at];
        mine[cols + c] = sums[kSums + at];
      }
    }
  }
}

/// Partial sums of rows that are too long for registers: a thread for a column,
/// the rows of a block one after the other.
template <typename T>
__global__ void layer_norm_column_sums(LayerNormGradients<T> g) {
  using S = Compute<T>;
  const std::int64_t column =
      std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (column >= g.cols) return;
  S dgamma = 0, dbeta = 0;
  for (std::int64_t row = blockIdx.x; row < g.rows; row += gridDim.x) {
    const S d = widen(g.dy[row * g.cols + column]);
    const S v = widen(g.x[row * g.cols + column]);
    dgamma = std::fma(d, (v - g.mean[row]) * g.rstd[row], dgamma);
    dbeta += d;
  }
  S* const mine = g.partials + std::int64_t{blockIdx.x} * 2 * g.cols;
  mine[column] = dgamma;
  mine[g.cols + column] = dbeta;
}

/// Adds the partial sums of the blocks: a block for 32 columns, of which each
/// warp takes every 8th partial sum. gridDim.y: dgamma, dbeta.
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
      sum += partials[(block * 2 + blockIdx.y) * cols + column];
    }
  }
  sums[static_cast<int>(threadIdx.x)] = sum;
  __syncthreads();
  if (warp > 0 || column >= cols) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w * kWarp + lane];
  out[column] = narrow<T>(sum);
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
                               kRowBlock, layer_norm_rows<T, Shape>, rows, cols,
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
    using S = Compute<T>;
    const bool wants_sums = dgamma != nullptr;
    if (!wants_sums && dx == nullptr) return;
    const auto run = [&](auto shape) {
      using Shape = decltype(shape);
      const std::int64_t blocks = num_walkers<Shape>(rows);
      Scratch scratch(context, wants_sums ? blocks * 2 * cols * sizeof(S) : 0);
      const LayerNormGradients<T> gradients{rows,
                                            cols,
                                            static_cast<const T*>(x),
                                            static_cast<const T*>(gamma),
                                            static_cast<const S*>(mean),
                                            static_cast<const S*>(rstd),
                                            static_cast<const T*>(dy),
                                            static_cast<T*>(dx),
                                            scratch.as<S>()};
      const unsigned walkers = blocks_of(blocks);
      // Before dx, which may be dy
      if (!Shape::kInRegisters && wants_sums) {
        launch(context, "layer_norm_backward",
               dim3(walkers, blocks_of(cols, kRowBlock)), kRowBlock,
               layer_norm_column_sums<T>, gradients);
      }
      if (Shape::kInRegisters || dx != nullptr) {
        launch(context, "layer_norm_backward", walkers, Shape::kBlockThreads,
               layer_norm_backward_rows<T, Shape>, gradients);
      }
      if (!wants_sums) return;
      launch(context, "layer_norm_backward", dim3(blocks_of(cols, kWarp), 2),
             kRowBlock, add_partials<T>, blocks, cols, scratch.data(), dgamma,
             dbeta);
    };
    with_width<T>(
        cols, is_aligned(kVectorBytes, x, gamma, dy, dx),
        [&](auto width) { with_walker_width<T, width()>(cols, run); });
  });
}

SHARDBOOK_CUDA_KERNEL(layer_norm);
SHARDBOOK_CUDA_KERNEL(layer_norm_backward);

}  // namespace shardbook::kernels::cuda
