#include "core/kernels/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/elementwise.h"

namespace shardbook::kernels::cpu {

namespace {

// Rows that are added in the element type before f64 is used.
constexpr std::int64_t kBlockRows = 64;
// Rows per turn of the inner loop. They are added to each other first: partial
// sums are loaded once per turn, and are rounded less often.
constexpr std::int64_t kTurn = 4;

std::int64_t num_blocks(std::int64_t rows) {
  return (rows + kBlockRows - 1) / kBlockRows;
}

template <typename T>
std::int64_t padded(std::int64_t channels) {
  return (channels + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

/// Two sums per channel for each block of rows: partials [blocks, 2, padded].
/// terms(row, channel, size, a, b) adds its terms to the vectors a and b.
template <typename T, typename Terms>
void reduce_blocks(std::int64_t rows, std::int64_t channels,
                   Compute<T>* partials, const Terms& terms) {
  using V = VecOf<T>;
  const std::int64_t width = padded<T>(channels);
  parallel_for(0, num_blocks(rows), 1, [&](std::int64_t from, std::int64_t to) {
    // Last block first: the end of x is still in the caches, since x was just
    // written in order
    for (std::int64_t block = to - 1; block >= from; --block) {
      Compute<T>* const first = partials + block * 2 * width;
      Compute<T>* const second = first + width;
      std::fill_n(first, 2 * width, Compute<T>(0));
      const std::int64_t end = std::min(rows, (block + 1) * kBlockRows);
      for (std::int64_t r = block * kBlockRows; r < end; r += kTurn) {
        for_vectors<T>(channels, [&](std::int64_t c, std::int64_t size) {
          V a(Compute<T>(0)), b(Compute<T>(0));
          if (end - r >= kTurn) {
            for (std::int64_t i = 0; i < kTurn; ++i)
              terms(r + i, c, size, a, b);
          } else {
            for (std::int64_t i = r; i < end; ++i) terms(i, c, size, a, b);
          }
          store(first + c, load(first + c) + a);
          store(second + c, load(second + c) + b);
        });
      }
    }
  });
}

/// Per-channel numbers in the type that arithmetic is done in, padded.
template <typename T>
std::vector<Compute<T>> per_channel(std::int64_t channels, const auto& fn) {
  std::vector<Compute<T>> values(padded<T>(channels), Compute<T>(0));
  for (std::int64_t c = 0; c < channels; ++c) {
    values[c] = static_cast<Compute<T>>(fn(c));
  }
  return values;
}

/// (x - center) * factor + shift: the normalised value, wherever it is needed.
template <typename T>
struct Affine {
  explicit Affine(const RowNorm& norm)
      : center(per_channel<T>(norm.channels,
                              [&](std::int64_t c) { return norm.mean[c]; })),
        factor(per_channel<T>(norm.channels,
                              [&](std::int64_t c) {
                                return norm.rstd[c] * value(norm.gamma, c, 1);
                              })),
        shift(per_channel<T>(norm.channels, [&](std::int64_t c) {
          return value(norm.beta, c, 0);
        })) {}
  static double value(const void* x, std::int64_t c, double otherwise) {
    return x == nullptr ? otherwise : widen(static_cast<const T*>(x)[c]);
  }
  VecOf<T> operator()(const VecOf<T>& x, std::int64_t c) const {
    return xsimd::fma(x - load(center.data() + c), load(factor.data() + c),
                      load(shift.data() + c));
  }
  std::vector<Compute<T>> center, factor, shift;
};

template <typename V>
V positive_part(const V& v, const V& mask) {
  const V zero(0);
  return xsimd::select(mask > zero, v, zero);
}

}  // namespace

void row_moments(KernelContext& context, DType dtype, std::int64_t rows,
                 std::int64_t channels, const void* x, double* sums,
                 double* squares) {
  dispatch_floating("row_moments", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    const T* const in = static_cast<const T*>(x);
    const std::int64_t width = padded<T>(channels);
    Scratch scratch(context, num_blocks(rows) * 2 * width * sizeof(S));
    // Around the block's first row the sums are small, and their difference
    // below keeps its digits.
    reduce_blocks<T>(
        rows, channels, scratch.as<S>(),
        [&](std::int64_t r, std::int64_t c, std::int64_t size, V& a, V& b) {
          const T* origin = in + r / kBlockRows * kBlockRows * channels + c;
          const V d = load_up_to(in + r * channels + c, size) -
                      load_up_to(origin, size);
          a = a + d;
          b = xsimd::fma(d, d, b);
        });
    // Blocks join one by one (Chan et al. 1979).
    std::vector<double> mean(channels, 0.0);
    std::fill_n(squares, channels, 0.0);
    for (std::int64_t block = 0; block < num_blocks(rows); ++block) {
      const std::int64_t begin = block * kBlockRows;
      const double n = static_cast<double>(std::min(rows - begin, kBlockRows));
      const double before = static_cast<double>(begin), all = before + n;
      const S* const first = scratch.as<S>() + block * 2 * width;
      const S* const second = first + width;
      for (std::int64_t c = 0; c < channels; ++c) {
        const double shift = first[c] / n;
        const double delta = widen(in[begin * channels + c]) + shift - mean[c];
        squares[c] += std::max(0.0, second[c] - first[c] * shift) +
                      delta * delta * before * n / all;
        mean[c] += delta * n / all;
      }
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      sums[c] = mean[c] * static_cast<double>(rows);
    }
  });
}

void row_normalize(KernelContext&, DType dtype, const RowNorm& norm,
                   const void* x, const void* addend, void* y) {
  dispatch_floating("row_normalize", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    const Affine<T> affine(norm);
    const auto run = [&](auto with_addend, auto with_relu) {
      for_rows(norm.rows, norm.channels, [&](std::int64_t r) {
        for_vectors<T>(norm.channels, [&](std::int64_t c, std::int64_t size) {
          const std::int64_t at = r * norm.channels + c;
          V v = affine(load_up_to(static_cast<const T*>(x) + at, size), c);
          if constexpr (with_addend()) {
            v = v + load_up_to(static_cast<const T*>(addend) + at, size);
          }
          if constexpr (with_relu()) v = positive_part(v, v);
          store_up_to(static_cast<T*>(y) + at, v, size);
        });
      });
    };
    const std::true_type yes;
    const std::false_type no;
    if (addend != nullptr) {
      norm.relu ? run(yes, yes) : run(yes, no);
    } else {
      norm.relu ? run(no, yes) : run(no, no);
    }
  });
}

void row_norm_backward_sums(KernelContext& context, DType dtype,
                            const RowNorm& norm, const void* x, const void* y,
                            const void* dy, void* dz, double* sum_dz,
                            double* sum_dz_xhat) {
  dispatch_floating("row_norm_backward_sums", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    const T* const in = static_cast<const T*>(x);
    const T* const out = static_cast<const T*>(y);
    const T* const grad = static_cast<const T*>(dy);
    const std::int64_t channels = norm.channels;
    const std::int64_t width = padded<T>(channels);
    const Affine<T> affine(norm);
    Scratch scratch(context, num_blocks(norm.rows) * 2 * width * sizeof(S));
    S* const partials = scratch.as<S>();
    // behind_relu(at, c, size, v, g) turns g into dz, for values v of x
    const auto run = [&](const auto& behind_relu) {
      reduce_blocks<T>(
          norm.rows, channels, partials,
          [&](std::int64_t r, std::int64_t c, std::int64_t size, V& a, V& b) {
            const std::int64_t at = r * channels + c;
            const V v = load_up_to(in + at, size);
            const V g =
                behind_relu(at, c, size, v, load_up_to(grad + at, size));
            a = a + g;
            b = xsimd::fma(g, v - load(affine.center.data() + c), b);
          });
    };
    using I = std::int64_t;
    if (y != nullptr) {
      run([&](I at, I, I size, const V&, const V& g) {
        const V kept = positive_part(g, load_up_to(out + at, size));
        store_up_to(static_cast<T*>(dz) + at, kept, size);
        return kept;
      });
    } else if (norm.relu) {
      run([&](I, I c, I, const V& v, const V& g) {
        return positive_part(g, affine(v, c));
      });
    } else {
      run([](I, I, I, const V&, const V& g) { return g; });
    }
    std::fill_n(sum_dz, channels, 0.0);
    std::fill_n(sum_dz_xhat, channels, 0.0);
    for (std::int64_t block = 0; block < num_blocks(norm.rows); ++block) {
      const S* const first = partials + block * 2 * width;
      for (std::int64_t c = 0; c < channels; ++c) {
        sum_dz[c] += first[c];
        sum_dz_xhat[c] += first[width + c] * norm.rstd[c];
      }
    }
  });
}

void row_norm_backward(KernelContext&, DType dtype, const RowNorm& norm,
                       const void* x, const void* dy, const double* sum_dz,
                       const double* sum_dz_xhat, double count, void* dx) {
  dispatch_floating("row_norm_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    const T* const in = static_cast<const T*>(x);
    const T* const grad = static_cast<const T*>(dy);
    const Affine<T> affine(norm);
    const auto shift = per_channel<T>(
        norm.channels, [&](std::int64_t c) { return sum_dz[c] / count; });
    const auto slope = per_channel<T>(norm.channels, [&](std::int64_t c) {
      return norm.rstd[c] * sum_dz_xhat[c] / count;
    });
    const auto run = [&](auto with_relu) {
      for_rows(norm.rows, norm.channels, [&](std::int64_t r) {
        for_vectors<T>(norm.channels, [&](std::int64_t c, std::int64_t size) {
          const std::int64_t at = r * norm.channels + c;
          const V v = load_up_to(in + at, size);
          V g = load_up_to(grad + at, size);
          if constexpr (with_relu()) g = positive_part(g, affine(v, c));
          const V d = v - load(affine.center.data() + c);
          g = load(affine.factor.data() + c) *
              (g - load(shift.data() + c) - d * load(slope.data() + c));
          store_up_to(static_cast<T*>(dx) + at, g, size);
        });
      });
    };
    norm.relu ? run(std::true_type()) : run(std::false_type());
  });
}

void channel_shift_squares(KernelContext&, std::int64_t channels,
                           const double* local, const double* mean,
                           double* squares) {
  const double local_count = local[channels];
  for (std::int64_t c = 0; c < channels; ++c) {
    const double shift = local[c] / local_count - mean[c];
    squares[c] += local_count * shift * shift;
  }
}

void channel_rstd(KernelContext&, std::int64_t channels, const double* variance,
                  double eps, double* rstd) {
  for (std::int64_t c = 0; c < channels; ++c) {
    rstd[c] = 1.0 / std::sqrt(variance[c] + eps);
  }
}

namespace {

// The order of operations decides the bits.
template <typename T>
void blend(T* running, const double* now, std::int64_t channels, double keep,
           double share) {
  for (std::int64_t c = 0; c < channels; ++c) {
    running[c] =
        static_cast<T>(keep * static_cast<double>(running[c]) + share * now[c]);
  }
}

}  // namespace

void channel_blend(KernelContext& context, DType dtype, std::int64_t channels,
                   double keep, double share, const double* now,
                   void* running) {
  if (dtype == DType::kF64) {
    blend(static_cast<double*>(running), now, channels, keep, share);
  } else if (dtype == DType::kF32) {
    blend(static_cast<float*>(running), now, channels, keep, share);
  } else {
    std::vector<double> values(static_cast<std::size_t>(channels));
    cpu::cast(context, dtype, running, DType::kF64, values.data(), channels);
    blend(values.data(), now, channels, keep, share);
    cpu::cast(context, DType::kF64, values.data(), dtype, running, channels);
  }
}

}  // namespace shardbook::kernels::cpu
