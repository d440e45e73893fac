#pragma once

// Convolutions of images [n, height, width, channels].

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"
#include "core/kernels/kernel_order.h"

namespace shardbook::kernels {

/// The sizes of a convolution: x [n, h, w, in], weight [out, in, kh, kw],
/// y [n, out_h(), out_w(), out]; `padding` zeros on each side of h and w.
struct ConvShape {
  std::int64_t n = 0;
  std::int64_t h = 0, w = 0, in = 0;
  std::int64_t out = 0;
  std::int64_t kh = 1, kw = 1;
  std::int64_t stride = 1, padding = 0;

  std::int64_t out_h() const { return (h + 2 * padding - kh) / stride + 1; }
  std::int64_t out_w() const { return (w + 2 * padding - kw) / stride + 1; }
  /// Rows and depth of the convolution as a product.
  std::int64_t rows() const { return n * out_h() * out_w(); }
  std::int64_t depth() const { return in * kh * kw; }
  /// Whether Winograd's algorithm computes this in f32 on the CPU.
  bool is_wide_3x3() const {
    return kh == 3 && kw == 3 && stride == 1 && padding == 1 && in > 0 &&
           in % 64 == 0 && out % 64 == 0;
  }
};

/// y = conv(x, weight) + bias; bias [out] may be null. All arrays share dtype.
///
/// oneDNN computes f32 and bf16. In f32, a 1x1 kernel without padding is one
/// product over all pixels that it reads, and an is_wide_3x3() is computed by
/// Winograd's algorithm, with 16 multiplications instead of 36. f64, f16 and
/// every dtype with `context.deterministic` are computed as one product per
/// image, of the image's windows laid side by side: the bits of an image's
/// result depend on that image alone.
/// Copies of the weight in another order go to `copies`, if given.
/// On CUDA, cuDNN computes all of them, f32 in TF32 only with
/// `context.allow_tf32`; with `context.deterministic` by algorithms that give
/// the same bits each time, which may depend on the other images. `copies` and
/// `order` are not used there.
/// Cost: 2 rows out depth flops, computed directly.
SHARDBOOK_KERNEL(conv2d,
                 void(KernelContext& context, DType dtype,
                      const ConvShape& shape, const void* x, const void* weight,
                      const void* bias, void* y, OrderedCopies* copies));

/// dx from dy.
SHARDBOOK_KERNEL(conv2d_backward_data,
                 void(KernelContext& context, DType dtype,
                      const ConvShape& shape, const void* dy,
                      const void* weight, void* dx, OrderedCopies* copies));

/// dweight from x and dy; images are added in order. With `order`, dweight may
/// be left in an order other than row-major, to which `*order` is then set.
SHARDBOOK_KERNEL(conv2d_backward_weight,
                 void(KernelContext& context, DType dtype,
                      const ConvShape& shape, const void* x, const void* dy,
                      void* dweight, SharedKernelOrder* order));

}  // namespace shardbook::kernels
