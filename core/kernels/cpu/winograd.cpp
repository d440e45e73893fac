#include "core/kernels/cpu/winograd.h"

#include <algorithm>
#include <memory>

#include "core/kernels/cpu/gemm.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/winograd_transforms.h"

namespace shardbook::kernels::cpu {

namespace {

using winograd::V;
constexpr std::int64_t kWidth = kLanes<float>;
constexpr std::int64_t kCols = kTileCols<float>;
constexpr std::int64_t kPoints = 16;
/// Channels of one block of a product: rows of V are this far apart.
constexpr std::int64_t kDepth = 64;
/// With fewer patches, reading the windows' points takes longer than the direct
/// kernels.
constexpr std::int64_t kFewestPatches = 12;

// --- Patches of images -------------------------------------------------------

/// The patches of images [n, h, w, channels], in order, 2x2 outputs each.
struct Patches {
  explicit Patches(const ConvShape& s)
      : h(s.h),
        w(s.w),
        rows((h + 1) / 2),
        cols((w + 1) / 2),
        count(s.n * rows * cols) {}

  /// Image, and first row and column of the outputs.
  struct Place {
    std::int64_t image, y, x;
  };
  Place operator[](std::int64_t patch) const {
    return {patch / (rows * cols), patch / cols % rows * 2, patch % cols * 2};
  }
  std::int64_t h, w, rows, cols, count;
};

/// An array of 16 points: [point][block of kDepth channels][patch][kDepth].
struct Points {
  Points(std::int64_t patches, std::int64_t channels)
      : patches(patches),
        channels(channels),
        // Not a multiple of 4 KiB: the points of a patch are written together
        step(patches * channels + kDepth + kWidth) {}
  std::int64_t size() const { return kPoints * step; }
  std::int64_t at(std::int64_t patch, std::int64_t channel) const {
    return channel / kDepth * patches * kDepth + patch * kDepth +
           channel % kDepth;
  }
  std::int64_t patches, channels, step;
};

inline void store_points(const V* from, const Points& points, std::int64_t at,
                         float* to) {
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < kPoints; ++i) {
    store(to + i * points.step + at, from[i]);
  }
}

/// Writes the points of B' d B for patches [from, to) of `images`.
void transform_patches(const Patches& patches, std::int64_t from,
                       std::int64_t to, const float* images,
                       const Points& points, float* out) {
  const std::int64_t channels = points.channels;
  for (std::int64_t p = from; p < to; ++p) {
    const Patches::Place place = patches[p];
    const float* const image =
        images + place.image * patches.h * patches.w * channels;
    const float* pixels[16];
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::int64_t y = place.y + i / 4 - 1, x = place.x + i % 4 - 1;
      const bool inside = y >= 0 && y < patches.h && x >= 0 && x < patches.w;
      pixels[i] = inside ? image + (y * patches.w + x) * channels : nullptr;
    }
    for (std::int64_t c = 0; c < channels; c += kWidth) {
      V d[16];
#pragma GCC unroll 16
      for (std::int64_t i = 0; i < 16; ++i) {
        d[i] = pixels[i] == nullptr ? V(0.0f) : load(pixels[i] + c);
      }
      winograd::transform_patch(d);
      store_points(d, points, points.at(p - from, c), out);
    }
  }
}

/// Calls fn(output 0 to 3, address) for the outputs of a patch in the image.
template <typename Fn>
inline void for_outputs(const Patches& patches, std::int64_t patch,
                        std::int64_t channels, const Fn& fn) {
  const Patches::Place place = patches[patch];
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 4; ++i) {
    const std::int64_t y = place.y + i / 2, x = place.x + i % 2;
    if (y >= patches.h || x >= patches.w) continue;
    fn(i, ((place.image * patches.h + y) * patches.w + x) * channels);
  }
}

/// Writes the points of A dY A' for patches [from, to).
void transform_gradients(const Patches& patches, std::int64_t from,
                         std::int64_t to, const float* dy, const Points& points,
                         float* out) {
  for (std::int64_t p = from; p < to; ++p) {
    for (std::int64_t c = 0; c < points.channels; c += kWidth) {
      V y[4] = {V(0.0f), V(0.0f), V(0.0f), V(0.0f)}, n[16];
      for_outputs(
          patches, p, points.channels,
          [&](std::int64_t i, std::int64_t at) { y[i] = load(dy + at + c); });
      winograd::transform_from_outputs(y, n);
      store_points(n, points, points.at(p - from, c), out);
    }
  }
}

/// Outputs A' m A of patches [from, to); m is [point][patch][channels].
void transform_outputs(const Patches& patches, std::int64_t from,
                       std::int64_t to, std::int64_t channels, const float* m,
                       std::int64_t step, const float* bias, float* out) {
  for (std::int64_t p = from; p < to; ++p) {
    for (std::int64_t c = 0; c < channels; c += kWidth) {
      V points[16], y[4];
#pragma GCC unroll 16
      for (std::int64_t i = 0; i < kPoints; ++i) {
        points[i] = load(m + i * step + (p - from) * channels + c);
      }
      winograd::transform_to_outputs(points, y);
      const V shift = bias == nullptr ? V(0.0f) : load(bias + c);
      for_outputs(patches, p, channels, [&](std::int64_t i, std::int64_t at) {
        store(out + at + c, y[i] + shift);
      });
    }
  }
}

// --- Windows -----------------------------------------------------------------

/// The windows' points as products read them: [point][panel of kCols columns]
/// [row][kCols]. Forward, rows are inputs and columns are outputs; for the
/// gradient of the image it is the reverse, and windows are turned.
class WindowOrder : public KernelOrder {
 public:
  WindowOrder(const ConvShape& s, bool turned)
      : out_(s.out), in_(s.in), turned_(turned) {}

  std::int64_t rows() const { return turned_ ? out_ : in_; }
  std::int64_t cols() const { return turned_ ? in_ : out_; }
  std::int64_t step() const { return rows() * cols(); }
  std::size_t bytes() const { return kPoints * step() * sizeof(float); }

  bool equals(const KernelOrder& other) const override {
    const auto* order = dynamic_cast<const WindowOrder*>(&other);
    return order != nullptr && order->out_ == out_ && order->in_ == in_ &&
           order->turned_ == turned_;
  }
  // Not needed: copies are only read, and no gradient lies in this order.
  void to_plain(KernelContext&, const void*, void*) const override {}

  void fill(const float* weight, float* points) const {
    const std::int64_t row_step = (turned_ ? in_ : 1) * 9;
    const std::int64_t col_step = (turned_ ? 1 : in_) * 9;
    parallel_for(
        0, cols() / kWidth, 1, [&](std::int64_t from, std::int64_t to) {
          for (std::int64_t j = from * kWidth; j < to * kWidth; j += kWidth) {
            for (std::int64_t r = 0; r < rows(); ++r) {
              const float* const first = weight + r * row_step + j * col_step;
              alignas(64) float lanes[9][kWidth];
              for (std::int64_t l = 0; l < kWidth; ++l) {
                for (std::int64_t i = 0; i < 9; ++i) {
                  lanes[turned_ ? 8 - i : i][l] = first[l * col_step + i];
                }
              }
              V g[9], u[16];
              for (std::int64_t i = 0; i < 9; ++i) g[i] = load(lanes[i]);
              winograd::transform_window(g, u);
              float* const to_points =
                  points + j / kCols * kCols * rows() + r * kCols + j % kCols;
              for (std::int64_t i = 0; i < kPoints; ++i) {
                store(to_points + i * step(), u[i]);
              }
            }
          }
        });
  }

 private:
  std::int64_t out_, in_;
  bool turned_;
};

/// Patches that are worked on together: their points stay in the caches near
/// the core while the windows' points pass by.
std::int64_t patches_at_once(std::int64_t channels, std::int64_t count) {
  constexpr std::int64_t kCacheFloats = std::int64_t{1} << 18;
  const std::int64_t most = std::clamp<std::int64_t>(
      kCacheFloats / (kPoints * channels) / kTileRows * kTileRows,
      8 * kTileRows, 16 * kTileRows);
  return std::min(most, count);
}

/// Prefetches `count` floats: windows come from memory, in the order of the
/// loops below, and the processor does not look far enough ahead.
inline void prefetch(const float* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kWidth) __builtin_prefetch(from + i);
}

/// m[point][patch][cols] = v[point] times u[point], for `count` patches.
void multiply_points(const Points& v, const float* points, std::int64_t count,
                     const float* windows, std::int64_t cols, float* m,
                     std::int64_t m_step) {
  const std::int64_t rows = v.channels;
  const std::int64_t num_tiles = (count + kTileRows - 1) / kTileRows;
  const std::int64_t share = kDepth * kCols / num_tiles;
  for (std::int64_t i = 0; i < kPoints; ++i) {
    const float* const left = points + i * v.step;
    const float* const right = windows + i * rows * cols;
    float* const product = m + i * m_step;
    for (std::int64_t j = 0; j < cols; j += kCols) {
      for (std::int64_t block = 0; block < rows; block += kDepth) {
        const float* const block_windows = right + j * rows + block * kCols;
        const float* ahead = block_windows + kDepth * kCols;
        for (std::int64_t p = 0; p < count; p += kTileRows) {
          prefetch(ahead, share);
          ahead += share;
          float* const to = product + p * cols + j;
          multiply_rows<float, kTileVecs, kDepth>(
              std::min<std::int64_t>(kTileRows, count - p), kDepth,
              left + v.at(p, block), 1, block_windows, kCols, block != 0, to,
              cols);
        }
      }
    }
  }
}

/// Images times windows: [n, h, w, rows] to [n, h, w, cols].
void convolve(KernelContext& context, const ConvShape& s,
              const WindowOrder& order, const float* windows, const float* x,
              const float* bias, float* y) {
  const std::int64_t rows = order.rows(), cols = order.cols();
  const Patches patches(s);
  const std::int64_t at_once = patches_at_once(rows + cols, patches.count);
  const Points points(at_once, rows);
  const std::int64_t m_step = at_once * cols + kDepth + kWidth;
  const std::int64_t each = points.size() + kPoints * m_step;
  Scratch scratch(context, max_threads() * each * sizeof(float));
  parallel_pieces(
      0, patches.count, at_once,
      [&](int piece, std::int64_t from, std::int64_t to) {
        float* const v = scratch.as<float>() + piece * each;
        float* const m = v + points.size();
        for (std::int64_t p = from; p < to; p += at_once) {
          const std::int64_t end = std::min(to, p + at_once);
          transform_patches(patches, p, end, x, points, v);
          multiply_points(points, v, end - p, windows, cols, m, m_step);
          transform_outputs(patches, p, end, cols, m, m_step, bias, y);
        }
      });
}

void convolve_with(KernelContext& context, const ConvShape& s, bool turned,
                   const float* x, const float* weight, const float* bias,
                   float* y, OrderedCopies* copies) {
  const auto order = std::make_shared<WindowOrder>(s, turned);
  const auto fill = [&](void* to) {
    order->fill(weight, static_cast<float*>(to));
  };
  if (copies != nullptr) {
    if (void* kept = copies->find_or_make(order, order->bytes(), fill)) {
      return convolve(context, s, *order, static_cast<float*>(kept), x, bias,
                      y);
    }
  }
  Scratch windows(context, order->bytes());
  fill(windows.data());
  convolve(context, s, *order, windows.as<float>(), x, bias, y);
}

/// sums[point] [in, out] += v[point]' n[point], or = where `first`.
void multiply_gradients(const Points& v, const float* patches, const Points& n,
                        const float* gradients, std::int64_t count, bool first,
                        float* sums) {
  const std::int64_t in = v.channels, out = n.channels;
  parallel_for(0, kPoints, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) {
      const float* const left = patches + i * v.step;
      const float* const right = gradients + i * n.step;
      float* const sum = sums + i * in * out;
      for (std::int64_t j = 0; j < out; j += kCols) {
        std::int64_t rows = 0;
        for (std::int64_t c = 0; c < in; c += rows) {
          // A tile ends with its block of channels
          rows = std::min<std::int64_t>(kTileRows, kDepth - c % kDepth);
          float* const at = sum + c * out + j;
          multiply_rows<float, kTileVecs, 1>(rows, count, left + v.at(0, c),
                                             kDepth, right + n.at(0, j), kDepth,
                                             !first, at, out);
        }
      }
    }
  });
}

/// The gradients of 16 windows of input c, for outputs from k on, from their
/// points.
inline void write_windows(const V* points, std::int64_t in, std::int64_t k,
                          std::int64_t c, float* dweight) {
  V g[9];
  winograd::transform_to_window(points, g);
  alignas(64) float lanes[9][kWidth];
  for (std::int64_t i = 0; i < 9; ++i) store(lanes[i], g[i]);
  for (std::int64_t l = 0; l < kWidth; ++l) {
    float* const window = dweight + ((k + l) * in + c) * 9;
    for (std::int64_t i = 0; i < 9; ++i) window[i] = lanes[i][l];
  }
}

void write_all_windows(const ConvShape& s, const float* sums, float* dweight) {
  parallel_for(0, s.out / kWidth, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t k = from * kWidth; k < to * kWidth; k += kWidth) {
      for (std::int64_t c = 0; c < s.in; ++c) {
        V u[kPoints];
        for (std::int64_t i = 0; i < kPoints; ++i) {
          u[i] = load(sums + (i * s.in + c) * s.out + k);
        }
        write_windows(u, s.in, k, c, dweight);
      }
    }
  });
}

/// multiply_gradients and write_all_windows in one, for patches that are all
/// worked on together: the sums of a tile of weights never leave the caches.
void multiply_all_gradients(const Points& v, const float* patches,
                            const Points& n, const float* gradients,
                            std::int64_t count, float* dweight) {
  const std::int64_t in = v.channels;
  parallel_for(
      0, n.channels / kCols, 1, [&](std::int64_t from, std::int64_t to) {
        alignas(64) float sums[kPoints][kTileRows * kCols];
        for (std::int64_t j = from * kCols; j < to * kCols; j += kCols) {
          std::int64_t rows = 0;
          for (std::int64_t c = 0; c < in; c += rows) {
            // A tile ends with its block of channels
            rows = std::min<std::int64_t>(kTileRows, kDepth - c % kDepth);
            for (std::int64_t i = 0; i < kPoints; ++i) {
              multiply_rows<float, kTileVecs, 1>(
                  rows, count, patches + i * v.step + v.at(0, c), kDepth,
                  gradients + i * n.step + n.at(0, j), kDepth,
                  /*resume=*/false, sums[i], kCols);
            }
            for (std::int64_t r = 0; r < rows; ++r) {
              for (std::int64_t k = 0; k < kCols; k += kWidth) {
                V u[kPoints];
                for (std::int64_t i = 0; i < kPoints; ++i) {
                  u[i] = load(sums[i] + r * kCols + k);
                }
                write_windows(u, in, j + k, c + r, dweight);
              }
            }
          }
        }
      });
}

}  // namespace

bool is_winograd(const ConvShape& s) {
  return s.is_wide_3x3() && Patches(s).count >= kFewestPatches;
}

void winograd_forward(KernelContext& context, const ConvShape& shape,
                      const float* x, const float* weight, const float* bias,
                      float* y, OrderedCopies* copies) {
  convolve_with(context, shape, /*turned=*/false, x, weight, bias, y, copies);
}

void winograd_backward_data(KernelContext& context, const ConvShape& shape,
                            const float* dy, const float* weight, float* dx,
                            OrderedCopies* copies) {
  convolve_with(context, shape, /*turned=*/true, dy, weight, nullptr, dx,
                copies);
}

void winograd_backward_weight(KernelContext& context, const ConvShape& shape,
                              const float* x, const float* dy, float* dweight) {
  const Patches patches(shape);
  const std::int64_t at_once =
      patches_at_once(shape.in + shape.out, patches.count);
  const Points v(at_once, shape.in), n(at_once, shape.out);
  const bool are_all_at_once = at_once == patches.count;
  const std::int64_t sums_size =
      are_all_at_once ? 0 : kPoints * shape.in * shape.out;
  Scratch scratch(context, (sums_size + v.size() + n.size()) * sizeof(float));
  float* const from_x = scratch.as<float>();
  float* const from_dy = from_x + v.size();
  float* const sums = from_dy + n.size();
  for (std::int64_t p = 0; p < patches.count; p += at_once) {
    const std::int64_t end = std::min(patches.count, p + at_once);
    transform_patches(patches, p, end, x, v, from_x);
    transform_gradients(patches, p, end, dy, n, from_dy);
    if (are_all_at_once) {
      return multiply_all_gradients(v, from_x, n, from_dy, end, dweight);
    }
    multiply_gradients(v, from_x, n, from_dy, end - p, p == 0, sums);
  }
  write_all_windows(shape, sums, dweight);
}

}  // namespace shardbook::kernels::cpu
