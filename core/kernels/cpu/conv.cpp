#include "core/kernels/conv.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/kernels/cpu/dnnl_kernels.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/winograd.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/layout.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels::cpu {

namespace {

// Calls fn(patch row, offset in the row, pixel of the image) for each place of
// a window that lies inside the image; each covers `in` channels.
//
//   patches [out_h * out_w, kh * kw * in]     image [h * w, in]
template <typename Fn>
void for_taps(const ConvShape& s, const Fn& fn) {
  for (std::int64_t oy = 0; oy < s.out_h(); ++oy) {
    for (std::int64_t ox = 0; ox < s.out_w(); ++ox) {
      const std::int64_t row = oy * s.out_w() + ox;
      for (std::int64_t i = 0; i < s.kh; ++i) {
        const std::int64_t y = oy * s.stride + i - s.padding;
        if (y < 0 || y >= s.h) continue;
        for (std::int64_t j = 0; j < s.kw; ++j) {
          const std::int64_t x = ox * s.stride + j - s.padding;
          if (x < 0 || x >= s.w) continue;
          fn(row, (i * s.kw + j) * s.in, y * s.w + x);
        }
      }
    }
  }
}

template <typename T>
void gather_patches(const ConvShape& s, const T* image, T* patches) {
  std::fill_n(patches, s.out_h() * s.out_w() * s.depth(), T{});
  for_taps(s, [&](std::int64_t row, std::int64_t at, std::int64_t pixel) {
    std::copy_n(image + pixel * s.in, s.in, patches + row * s.depth() + at);
  });
}

// The reverse: overlapping places add up, in the order of the patches.
template <typename T>
void scatter_patches(const ConvShape& s, const Compute<T>* patches,
                     Compute<T>* sums, T* image) {
  std::fill_n(sums, s.h * s.w * s.in, Compute<T>(0));
  for_taps(s, [&](std::int64_t row, std::int64_t at, std::int64_t pixel) {
    const Compute<T>* from = patches + row * s.depth() + at;
    Compute<T>* to = sums + pixel * s.in;
    for (std::int64_t c = 0; c < s.in; ++c) to[c] += from[c];
  });
  for (std::int64_t i = 0; i < s.h * s.w * s.in; ++i) {
    image[i] = narrow<T>(sums[i]);
  }
}

// A 1x1 convolution without stride is a product of the arrays as they are.
bool is_product(const ConvShape& s) {
  return s.kh == 1 && s.kw == 1 && s.stride == 1 && s.padding == 0;
}

MatmulArgs product_args(std::int64_t m, std::int64_t n, std::int64_t k,
                        bool trans_a, bool trans_b) {
  MatmulArgs args;
  args.m = m, args.n = n, args.k = k;
  args.trans_a = trans_a, args.trans_b = trans_b;
  return args;
}

// Turns `deterministic` on for a scope.
class InFixedOrder {
 public:
  explicit InFixedOrder(KernelContext& context)
      : context_(context), before_(context.deterministic) {
    context.deterministic = true;
  }
  ~InFixedOrder() { context_.deterministic = before_; }

 private:
  KernelContext& context_;
  bool before_;
};

// [out, in, kh, kw] <-> [out, kh, kw, in]: the order of the patches.
void to_patch_order(KernelContext& context, DType dtype, const ConvShape& s,
                    const void* weight, void* out) {
  permute(context, dtype, {s.out, s.in, s.kh, s.kw}, {0, 2, 3, 1}, weight, out);
}
void from_patch_order(KernelContext& context, DType dtype, const ConvShape& s,
                      const void* weight, void* out) {
  permute(context, dtype, {s.out, s.kh, s.kw, s.in}, {0, 3, 1, 2}, weight, out);
}

template <typename T>
void forward(KernelContext& context, DType dtype, const ConvShape& s,
             const T* x, const T* weight, const T* bias, T* y) {
  const std::int64_t image = s.h * s.w * s.in;
  const std::int64_t rows = s.out_h() * s.out_w();
  Scratch ordered(context, s.out * s.depth() * sizeof(T));
  Scratch patches(context, is_product(s) ? 0 : rows * s.depth() * sizeof(T));
  to_patch_order(context, dtype, s, weight, ordered.data());
  for (std::int64_t i = 0; i < s.n; ++i) {
    const T* from = x + i * image;
    if (!is_product(s)) {
      gather_patches(s, from, patches.as<T>());
      from = patches.as<T>();
    }
    matmul(context, dtype, product_args(rows, s.out, s.depth(), false, true),
           from, ordered.data(), y + i * rows * s.out, bias);
  }
}

template <typename T>
void backward_data(KernelContext& context, DType dtype, const ConvShape& s,
                   const T* dy, const T* weight, T* dx) {
  using S = Compute<T>;
  const std::int64_t image = s.h * s.w * s.in;
  const std::int64_t rows = s.out_h() * s.out_w();
  // 16-bit gradients overlap in f32, and are rounded once.
  constexpr DType kSums = std::is_same_v<S, double> ? DType::kF64 : DType::kF32;
  Scratch ordered(context, s.out * s.depth() * sizeof(T));
  Scratch wide(context, (s.out * s.depth() + rows * s.out) * sizeof(S));
  Scratch patches(context, rows * s.depth() * sizeof(S));
  Scratch sums(context, image * sizeof(S));
  S* const wide_dy = wide.as<S>() + s.out * s.depth();
  to_patch_order(context, dtype, s, weight, ordered.data());
  cast(context, dtype, ordered.data(), kSums, wide.data(), s.out * s.depth());
  for (std::int64_t i = 0; i < s.n; ++i) {
    cast(context, dtype, dy + i * rows * s.out, kSums, wide_dy, rows * s.out);
    matmul(context, kSums, product_args(rows, s.depth(), s.out, false, false),
           wide_dy, wide.data(), patches.data(), nullptr);
    scatter_patches<T>(s, patches.as<S>(), sums.as<S>(), dx + i * image);
  }
}

template <typename T>
void backward_weight(KernelContext& context, DType dtype, const ConvShape& s,
                     const T* x, const T* dy, T* dweight) {
  using S = Compute<T>;
  constexpr DType kSums = std::is_same_v<S, double> ? DType::kF64 : DType::kF32;
  const std::int64_t image = s.h * s.w * s.in;
  const std::int64_t rows = s.out_h() * s.out_w();
  const std::int64_t size = s.out * s.depth();
  Scratch patches(context, rows * s.depth() * sizeof(T));
  Scratch wide(context, (rows * (s.depth() + s.out) + 2 * size) * sizeof(S));
  Scratch narrowed(context, size * sizeof(T));
  S* const product = wide.as<S>() + size;
  S* const wide_patches = product + size;
  S* const wide_dy = wide_patches + rows * s.depth();
  fill(context, kSums, size, wide.data(), 0.0);
  for (std::int64_t i = 0; i < s.n; ++i) {
    gather_patches(s, x + i * image, patches.as<T>());
    cast(context, dtype, patches.data(), kSums, wide_patches, rows * s.depth());
    cast(context, dtype, dy + i * rows * s.out, kSums, wide_dy, rows * s.out);
    matmul(context, kSums, product_args(s.out, s.depth(), rows, true, false),
           wide_dy, wide_patches, product, nullptr);
    axpy(context, kSums, size, 1.0, product, wide.data());
  }
  cast(context, kSums, wide.data(), dtype, narrowed.data(), size);
  from_patch_order(context, dtype, s, narrowed.data(), dweight);
}

bool dnnl_has(KernelContext& context, DType dtype) {
  return !context.deterministic &&
         (dtype == DType::kF32 || dtype == DType::kBF16);
}

// Whether each place of the window lies inside the image for some output. Where
// one never does, oneDNN's bf16 kernels leave its weight gradient unwritten
// (2.6, matrix units).
bool every_tap_counts(const ConvShape& s) {
  const auto counts = [&](std::int64_t taps, std::int64_t length,
                          std::int64_t outputs) {
    for (std::int64_t i = 0; i < taps; ++i) {
      bool inside = false;
      for (std::int64_t o = 0; o < outputs && !inside; ++o) {
        const std::int64_t at = o * s.stride + i - s.padding;
        inside = at >= 0 && at < length;
      }
      if (!inside) return false;
    }
    return true;
  };
  return counts(s.kh, s.h, s.out_h()) && counts(s.kw, s.w, s.out_w());
}

// A 1x1 convolution is one product over the pixels that it reads: as fast as
// oneDNN's convolution, and the weight needs no other order.
bool is_one_product(KernelContext& context, DType dtype, const ConvShape& s) {
  return dtype == DType::kF32 && !context.deterministic && s.kh == 1 &&
         s.kw == 1 && s.padding == 0;
}

bool uses_winograd(KernelContext& context, DType dtype, const ConvShape& s) {
  return dtype == DType::kF32 && !context.deterministic && is_winograd(s);
}

// Every stride-th pixel of an image, as rows of one matrix.
class Pixels {
 public:
  Pixels(KernelContext& context, const ConvShape& s)
      : context_(context),
        shape_({s.n, s.out_h(), s.out_w(), s.in}),
        strides_({s.h * s.w * s.in, s.stride * s.w * s.in, s.stride * s.in, 1}),
        size_(s.n * s.h * s.w * s.in),
        are_all_(s.stride == 1),
        rows_(context, are_all_ ? 0 : s.rows() * s.in * sizeof(float)) {}

  /// The pixels of x: x itself where the convolution reads all of them.
  const void* of(const void* x) {
    if (are_all_) return x;
    copy_strided(context_, DType::kF32, shape_, x, strides_, rows_.data(),
                 contiguous_strides(shape_));
    return rows_.data();
  }
  /// Where to write the gradient of the pixels, before spread().
  void* gradient_of(void* dx) { return are_all_ ? dx : rows_.data(); }
  /// dx gets the gradients of its pixels, and zeros between them.
  void spread(void* dx) {
    if (are_all_) return;
    fill(context_, DType::kF32, size_, dx, 0.0);
    copy_strided(context_, DType::kF32, shape_, rows_.data(),
                 contiguous_strides(shape_), dx, strides_);
  }

 private:
  KernelContext& context_;
  const Dims shape_, strides_;
  const std::int64_t size_;
  const bool are_all_;
  Scratch rows_;
};

template <typename Fn>
void in_order(KernelContext& context, DType dtype, const Fn& fn) {
  const InFixedOrder order(context);
  dispatch_floating("conv2d", dtype, fn);
}

}  // namespace

void conv2d(KernelContext& context, DType dtype, const ConvShape& shape,
            const void* x, const void* weight, const void* bias, void* y,
            OrderedCopies* copies) {
  if (shape.rows() * shape.out == 0) return;
  if (is_one_product(context, dtype, shape)) {
    return matmul(context, dtype,
                  product_args(shape.rows(), shape.out, shape.in, false, true),
                  Pixels(context, shape).of(x), weight, y, bias);
  }
  if (uses_winograd(context, dtype, shape)) {
    return winograd_forward(context, shape, static_cast<const float*>(x),
                            static_cast<const float*>(weight),
                            static_cast<const float*>(bias),
                            static_cast<float*>(y), copies);
  }
  if (dnnl_has(context, dtype) &&
      conv_dnnl(context, dtype, ConvPass::kForward, shape, const_cast<void*>(x),
                const_cast<void*>(weight), bias, y, copies, nullptr)) {
    return;
  }
  in_order(context, dtype, [&](auto zero) {
    using T = decltype(zero);
    forward(context, dtype, shape, static_cast<const T*>(x),
            static_cast<const T*>(weight), static_cast<const T*>(bias),
            static_cast<T*>(y));
  });
}

void conv2d_backward_data(KernelContext& context, DType dtype,
                          const ConvShape& shape, const void* dy,
                          const void* weight, void* dx, OrderedCopies* copies) {
  if (shape.n * shape.h * shape.w * shape.in == 0) return;
  if (is_one_product(context, dtype, shape)) {
    Pixels pixels(context, shape);
    matmul(context, dtype,
           product_args(shape.rows(), shape.in, shape.out, false, false), dy,
           weight, pixels.gradient_of(dx), nullptr);
    return pixels.spread(dx);
  }
  if (uses_winograd(context, dtype, shape)) {
    return winograd_backward_data(context, shape, static_cast<const float*>(dy),
                                  static_cast<const float*>(weight),
                                  static_cast<float*>(dx), copies);
  }
  if (dnnl_has(context, dtype) &&
      conv_dnnl(context, dtype, ConvPass::kBackwardData, shape, dx,
                const_cast<void*>(weight), nullptr, const_cast<void*>(dy),
                copies, nullptr)) {
    return;
  }
  in_order(context, dtype, [&](auto zero) {
    using T = decltype(zero);
    backward_data(context, dtype, shape, static_cast<const T*>(dy),
                  static_cast<const T*>(weight), static_cast<T*>(dx));
  });
}

void conv2d_backward_weight(KernelContext& context, DType dtype,
                            const ConvShape& shape, const void* x,
                            const void* dy, void* dweight,
                            SharedKernelOrder* order) {
  if (is_one_product(context, dtype, shape)) {
    return matmul(context, dtype,
                  product_args(shape.out, shape.in, shape.rows(), true, false),
                  dy, Pixels(context, shape).of(x), dweight, nullptr);
  }
  if (uses_winograd(context, dtype, shape)) {
    return winograd_backward_weight(
        context, shape, static_cast<const float*>(x),
        static_cast<const float*>(dy), static_cast<float*>(dweight));
  }
  if (dnnl_has(context, dtype) && shape.rows() > 0 &&
      (dtype == DType::kF32 || every_tap_counts(shape)) &&
      conv_dnnl(context, dtype, ConvPass::kBackwardWeight, shape,
                const_cast<void*>(x), dweight, nullptr, const_cast<void*>(dy),
                nullptr, order)) {
    return;
  }
  in_order(context, dtype, [&](auto zero) {
    using T = decltype(zero);
    backward_weight(context, dtype, shape, static_cast<const T*>(x),
                    static_cast<const T*>(dy), static_cast<T*>(dweight));
  });
}

}  // namespace shardbook::kernels::cpu
