// Batch normalisation of [rows, channels]. All kernels here lay the threads of
// a block out in the same way, so that neighbours read neighbouring channels:
//
//            channels ->
//   rows     thread 0   thread 1  ...  across - 1
//    |       across     ...
//    v       2 * across ...                            down = 256 / across lines
//
// A thread holds a few channels (one vector) and walks down its block's rows.

#include "core/kernels/batch_norm.h"

#include <cmath>

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

namespace {

struct Tiling {
  std::int64_t rows = 0, channels = 0;
  int across = 1, down = 1;
  std::int64_t block_rows = 1;

  /// Blocks below each other.
  std::int64_t num_blocks() const { return ceil_div(rows, block_rows); }
};

/// A thread walks over at most `most_rows` rows, over fewer where there are not
/// enough rows to keep a large GPU busy. The choice depends on the shape only,
/// and with it the order of all sums.
Tiling tile(std::int64_t rows, std::int64_t channels, int width,
            std::int64_t most_rows) {
  constexpr std::int64_t kEnoughBlocks = 1024;
  const std::int64_t vectors = channels / width;
  Tiling t{rows, channels};
  while (t.across < kWarp && t.across < vectors) t.across *= 2;
  t.down = kBlock / t.across;
  const std::int64_t thread_rows =
      rows * ceil_div(vectors, t.across) / (t.down * kEnoughBlocks) + 1;
  t.block_rows = t.down * std::min(most_rows, thread_rows);
  return t;
}

/// The channels and rows of one thread.
struct Place {
  std::int64_t channel, first_row, last_row;
  __device__ Place(const Tiling& t, int width) {
    const int x = static_cast<int>(threadIdx.x) % t.across;
    const int y = static_cast<int>(threadIdx.x) / t.across;
    channel = (std::int64_t{blockIdx.y} * t.across + x) * width;
    const std::int64_t begin = blockIdx.x * t.block_rows;
    first_row = begin + y;
    last_row = std::min(t.rows, begin + t.block_rows);
    if (channel >= t.channels) last_row = 0;
  }
};

template <typename Kernel, typename... Args>
void launch_tiled(KernelContext& context, const char* name, const Tiling& t,
                  int width, Kernel kernel, const Args&... args) {
  launch(
      context, name,
      dim3(blocks_of(t.num_blocks()), blocks_of(t.channels, width * t.across)),
      kBlock, kernel, t, args...);
}

/// Calls body(T{}, width, tiling) with the type of `dtype` and the number of
/// channels of a thread; `aligned` says that all arrays begin at whole vectors.
template <typename Body>
void with_tiling(const char* name, DType dtype, std::int64_t rows,
                 std::int64_t channels, bool aligned, std::int64_t most_rows,
                 Body body) {
  with_floating(name, dtype, [&](auto zero) {
    with_width<decltype(zero)>(channels, aligned, [&](auto width) {
      body(zero, width, tile(rows, channels, width(), most_rows));
    });
  });
}

/// (x - center) * factor + shift: the normalised value, wherever it is needed.
template <typename T, int kWidth>
struct Affine {
  using S = Compute<T>;
  S center[kWidth], factor[kWidth], shift[kWidth];

  __device__ Affine(const RowNorm& norm, std::int64_t channel) {
    const T* const gamma = static_cast<const T*>(norm.gamma);
    const T* const beta = static_cast<const T*>(norm.beta);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const std::int64_t c = channel + j;
      center[j] = factor[j] = shift[j] = S(0);
      if (c >= norm.channels) continue;
      center[j] = static_cast<S>(norm.mean[c]);
      factor[j] = static_cast<S>(norm.rstd[c] *
                                 (gamma == nullptr ? 1.0 : widen(gamma[c])));
      if (beta != nullptr) shift[j] = widen(beta[c]);
    }
  }
  __device__ S operator()(S x, int j) const {
    return std::fma(x - center[j], factor[j], shift[j]);
  }
};

template <typename S>
__device__ S positive_part(S value, S mask) {
  return mask > S(0) ? value : S(0);
}

/// The terms of row_moments: x around the block's first row. There the sums are
/// small, and their difference in join_moments keeps its digits.
template <typename T, int kWidth>
struct MomentTerms {
  using S = Compute<T>;
  const T* x;
  std::int64_t channels;

  struct Channels {
    AlignedVector<T, kWidth> origin;
    __device__ Channels(const MomentTerms& m, std::int64_t begin,
                        std::int64_t channel) {
      if (channel < m.channels) {
        origin = load_vector<kWidth>(m.x + begin * m.channels + channel);
      }
    }
  };
  __device__ void add(const Channels& channels, std::int64_t at, S* a,
                      S* b) const {
    const auto v = load_vector<kWidth>(x + at);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S d = widen(v[j]) - widen(channels.origin[j]);
      a[j] += d;
      b[j] = std::fma(d, d, b[j]);
    }
  }
};

/// The terms of row_norm_backward_sums.
template <typename T, int kWidth>
struct RowGradientTerms {
  using S = Compute<T>;
  RowNorm norm;
  const T* x;
  const T* y;
  const T* dy;
  T* dz;

  struct Channels {
    Affine<T, kWidth> affine;
    __device__ Channels(const RowGradientTerms& g, std::int64_t,
                        std::int64_t channel)
        : affine(g.norm, channel) {}
  };
  __device__ void add(const Channels& channels, std::int64_t at, S* a,
                      S* b) const {
    const auto v = load_vector<kWidth>(x + at),
               up = load_vector<kWidth>(dy + at);
    AlignedVector<T, kWidth> out, masked;
    if (y != nullptr) out = load_vector<kWidth>(y + at);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      S g = widen(up[j]);
      if (y != nullptr) {
        g = positive_part(g, widen(out[j]));
        masked[j] = narrow<T>(g);
      } else if (norm.relu) {
        g = positive_part(g, channels.affine(widen(v[j]), j));
      }
      a[j] += g;
      b[j] = std::fma(g, widen(v[j]) - channels.affine.center[j], b[j]);
    }
    if (y != nullptr) store_vector(dz + at, masked);
  }
};

/// Two sums per channel for each block of rows: partials [blocks, 2, channels].
/// A thread adds its rows in the type of arithmetic, f64 adds the threads.
template <typename T, int kWidth, typename Terms>
__global__ void block_sums(Tiling t, Terms terms, double* partials) {
  using S = Compute<T>;
  constexpr int kValues = kBlock * kWidth;
  __shared__ SharedArray<S, 2 * kValues> sums;
  const int thread = static_cast<int>(threadIdx.x);
  const Place place(t, kWidth);
  const typename Terms::Channels channels(terms, blockIdx.x * t.block_rows,
                                          place.channel);
  S a[kWidth] = {}, b[kWidth] = {};
#pragma unroll 4
  for (std::int64_t row = place.first_row; row < place.last_row;
       row += t.down) {
    terms.add(channels, row * t.channels + place.channel, a, b);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sums[j * kBlock + thread] = a[j];
    sums[kValues + j * kBlock + thread] = b[j];
  }
  __syncthreads();
  // A thread for a channel of the block
  if (thread >= t.across * kWidth) return;
  const int x = thread % t.across, j = thread / t.across;
  const std::int64_t c = (std::int64_t{blockIdx.y} * t.across + x) * kWidth + j;
  if (c >= t.channels) return;
  double first = 0.0, second = 0.0;
  for (int y = 0; y < t.down; ++y) {
    first += sums[j * kBlock + y * t.across + x];
    second += sums[kValues + j * kBlock + y * t.across + x];
  }
  double* const mine = partials + blockIdx.x * 2 * t.channels;
  mine[c] = first;
  mine[t.channels + c] = second;
}

/// The kernels that add the blocks have 8 channels per block and 32 threads per
/// channel; each thread adds every 32nd block.
constexpr int kJoinChannels = 8;
constexpr int kJoinThreads = kBlock / kJoinChannels;

struct Joined {
  double count = 0.0, mean = 0.0, squares = 0.0;
  /// Chan et al. 1979.
  __device__ void add(double n, double its_mean, double its_squares) {
    if (n == 0.0) return;
    const double all = count + n, delta = its_mean - mean;
    squares += its_squares + delta * delta * count * n / all;
    mean += delta * n / all;
    count = all;
  }
};

template <typename T>
__global__ void join_moments(Tiling t, std::int64_t blocks, const T* x,
                             const double* partials, double* sums,
                             double* squares) {
  __shared__ SharedArray<double, 3 * kBlock> joined;
  const int thread = static_cast<int>(threadIdx.x);
  const int line = thread / kJoinChannels;
  const std::int64_t c =
      std::int64_t{blockIdx.x} * kJoinChannels + thread % kJoinChannels;
  Joined mine;
  if (c < t.channels) {
    for (std::int64_t block = line; block < blocks; block += kJoinThreads) {
      const std::int64_t begin = block * t.block_rows;
      const double n =
          static_cast<double>(std::min(t.block_rows, t.rows - begin));
      const double first = partials[block * 2 * t.channels + c];
      const double second = partials[(block * 2 + 1) * t.channels + c];
      const double shift = first / n;
      mine.add(n, widen(x[begin * t.channels + c]) + shift,
               std::fmax(0.0, second - first * shift));
    }
  }
  joined[thread] = mine.count;
  joined[kBlock + thread] = mine.mean;
  joined[2 * kBlock + thread] = mine.squares;
  __syncthreads();
  if (line > 0 || c >= t.channels) return;
  for (int i = thread + kJoinChannels; i < kBlock; i += kJoinChannels) {
    mine.add(joined[i], joined[kBlock + i], joined[2 * kBlock + i]);
  }
  sums[c] = mine.mean * static_cast<double>(t.rows);
  squares[c] = mine.squares;
}

__global__ void join_sums(Tiling t, std::int64_t blocks, const double* rstd,
                          const double* partials, double* first,
                          double* second) {
  __shared__ SharedArray<double, 2 * kBlock> joined;
  const int thread = static_cast<int>(threadIdx.x);
  const int line = thread / kJoinChannels;
  const std::int64_t c =
      std::int64_t{blockIdx.x} * kJoinChannels + thread % kJoinChannels;
  double a = 0.0, b = 0.0;
  if (c < t.channels) {
    for (std::int64_t block = line; block < blocks; block += kJoinThreads) {
      a += partials[block * 2 * t.channels + c];
      b += partials[(block * 2 + 1) * t.channels + c];
    }
  }
  joined[thread] = a;
  joined[kBlock + thread] = b;
  __syncthreads();
  if (line > 0 || c >= t.channels) return;
  for (int i = thread + kJoinChannels; i < kBlock; i += kJoinChannels) {
    a += joined[i];
    b += joined[kBlock + i];
  }
  first[c] = a;
  second[c] = b * rstd[c];
}

/// Rows whose loads a thread issues together.
constexpr int kTurn = 2;

template <typename T, int kWidth>
__global__ void normalize_rows(Tiling t, RowNorm norm, const T* x,
                               const T* addend, T* y) {
  using S = Compute<T>;
  const Place place(t, kWidth);
  const Affine<T, kWidth> affine(norm, place.channel);
  for (std::int64_t row = place.first_row; row < place.last_row;
       row += kTurn * t.down) {
    AlignedVector<T, kWidth> v[kTurn], add[kTurn];
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      if (row + i * t.down >= place.last_row) continue;
      const std::int64_t at = (row + i * t.down) * t.channels + place.channel;
      v[i] = load_vector<kWidth>(x + at);
      if (addend != nullptr) add[i] = load_vector<kWidth>(addend + at);
    }
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      if (row + i * t.down >= place.last_row) continue;
      const std::int64_t at = (row + i * t.down) * t.channels + place.channel;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        S value = affine(widen(v[i][j]), j);
        if (addend != nullptr) value = value + widen(add[i][j]);
        if (norm.relu) value = positive_part(value, value);
        v[i][j] = narrow<T>(value);
      }
      store_vector(y + at, v[i]);
    }
  }
}

template <typename T, int kWidth>
__global__ void row_gradients(Tiling t, RowNorm norm, const T* x, const T* dy,
                              const double* sum_dz, const double* sum_dz_xhat,
                              double count, T* dx) {
  using S = Compute<T>;
  const Place place(t, kWidth);
  const Affine<T, kWidth> affine(norm, place.channel);
  S shift[kWidth] = {}, slope[kWidth] = {};
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const std::int64_t c = place.channel + j;
    if (c >= t.channels) continue;
    shift[j] = static_cast<S>(sum_dz[c] / count);
    slope[j] = static_cast<S>(norm.rstd[c] * sum_dz_xhat[c] / count);
  }
#pragma unroll 2
  for (std::int64_t row = place.first_row; row < place.last_row;
       row += t.down) {
    const std::int64_t at = row * t.channels + place.channel;
    const auto v = load_vector<kWidth>(x + at),
               up = load_vector<kWidth>(dy + at);
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S value = widen(v[j]);
      S g = widen(up[j]);
      if (norm.relu) g = positive_part(g, affine(value, j));
      const S d = value - affine.center[j];
      out[j] = narrow<T>(affine.factor[j] * (g - shift[j] - d * slope[j]));
    }
    store_vector(dx + at, out);
  }
}

/// Rows that one thread adds before f64 is used, and rows that one thread
/// writes.
constexpr std::int64_t kSumRows = 64;
constexpr std::int64_t kWriteRows = 16;

}  // namespace

void row_moments(KernelContext& context, DType dtype, std::int64_t rows,
                 std::int64_t channels, const void* x, double* sums,
                 double* squares) {
  const char* const name = "row_moments";
  with_tiling(name, dtype, rows, channels, is_aligned(kVectorBytes, x),
              kSumRows, [&](auto zero, auto width, const Tiling& t) {
                using T = decltype(zero);
                using Terms = MomentTerms<T, width()>;
                Scratch scratch(context,
                                t.num_blocks() * 2 * channels * sizeof(double));
                launch_tiled(context, name, t, width(),
                             block_sums<T, width(), Terms>,
                             Terms{static_cast<const T*>(x), channels},
                             scratch.as<double>());
                launch(context, name, blocks_of(channels, kJoinChannels),
                       kBlock, join_moments<T>, t, t.num_blocks(), x,
                       scratch.data(), sums, squares);
              });
}

void row_normalize(KernelContext& context, DType dtype, const RowNorm& norm,
                   const void* x, const void* addend, void* y) {
  const char* const name = "row_normalize";
  with_tiling(name, dtype, norm.rows, norm.channels,
              is_aligned(kVectorBytes, x, addend, y), kWriteRows,
              [&](auto zero, auto width, const Tiling& t) {
                launch_tiled(context, name, t, width(),
                             normalize_rows<decltype(zero), width()>, norm, x,
                             addend, y);
              });
}

void row_norm_backward_sums(KernelContext& context, DType dtype,
                            const RowNorm& norm, const void* x, const void* y,
                            const void* dy, void* dz, double* sum_dz,
                            double* sum_dz_xhat) {
  const char* const name = "row_norm_backward_sums";
  with_tiling(
      name, dtype, norm.rows, norm.channels,
      is_aligned(kVectorBytes, x, y, dy, dz), kSumRows,
      [&](auto zero, auto width, const Tiling& t) {
        using T = decltype(zero);
        using Terms = RowGradientTerms<T, width()>;
        Scratch scratch(context,
                        t.num_blocks() * 2 * norm.channels * sizeof(double));
        launch_tiled(
            context, name, t, width(), block_sums<T, width(), Terms>,
            Terms{norm, static_cast<const T*>(x), static_cast<const T*>(y),
                  static_cast<const T*>(dy), static_cast<T*>(dz)},
            scratch.as<double>());
        launch(context, name, blocks_of(norm.channels, kJoinChannels), kBlock,
               join_sums, t, t.num_blocks(), norm.rstd, scratch.data(), sum_dz,
               sum_dz_xhat);
      });
}

void row_norm_backward(KernelContext& context, DType dtype, const RowNorm& norm,
                       const void* x, const void* dy, const double* sum_dz,
                       const double* sum_dz_xhat, double count, void* dx) {
  const char* const name = "row_norm_backward";
  with_tiling(name, dtype, norm.rows, norm.channels,
              is_aligned(kVectorBytes, x, dy, dx), kWriteRows,
              [&](auto zero, auto width, const Tiling& t) {
                launch_tiled(context, name, t, width(),
                             row_gradients<decltype(zero), width()>, norm, x,
                             dy, sum_dz, sum_dz_xhat, count, dx);
              });
}

SHARDBOOK_CUDA_KERNEL(row_moments);
SHARDBOOK_CUDA_KERNEL(row_normalize);
SHARDBOOK_CUDA_KERNEL(row_norm_backward_sums);
SHARDBOOK_CUDA_KERNEL(row_norm_backward);

}  // namespace shardbook::kernels::cuda
