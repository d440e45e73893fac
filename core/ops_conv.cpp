// Images: convolutions and pooling.

#include "core/internal/kernel_orders.h"
#include "core/internal/op_scope.h"
#include "core/kernels/conv.h"
#include "core/kernels/pool.h"
#include "core/kernels/reduce.h"
#include "core/ops.h"

namespace shardbook {

using autograd::record;
using internal::bytes_of;
using internal::count;
using internal::GradientOf;
using internal::OpScope;
using internal::raw_or_null;
using internal::weight_gradient;

namespace {

void check_images(const char* op, const Tensor& x) {
  SB_CHECK(x.ndim() == 4, op, ": input ", shape_text(x.shape()),
           "; give images [n, height, width, channels]");
}

void check_window(const char* op, std::int64_t kh, std::int64_t kw,
                  std::int64_t stride, std::int64_t padding, const Tensor& x) {
  SB_CHECK(stride >= 1 && padding >= 0, op, ": stride ", stride,
           " and padding ", padding, "; give at least 1 and 0");
  SB_CHECK(kh >= 1 && kw >= 1 && kh <= x.size(1) + 2 * padding &&
               kw <= x.size(2) + 2 * padding,
           op, ": a window of ", kh, " x ", kw, " does not fit into images ",
           x.size(1), " x ", x.size(2), " with padding ", padding);
}

kernels::ConvShape conv_shape(const Tensor& x, const Tensor& weight,
                              const Tensor& bias, std::int64_t stride,
                              std::int64_t padding) {
  check_images("conv2d", x);
  internal::check_same_kind("conv2d", x, weight);
  SB_CHECK(weight.ndim() == 4 && weight.size(1) == x.size(3), "conv2d: weight ",
           shape_text(weight.shape()), " for images ", shape_text(x.shape()),
           "; give [out, ", x.size(3), ", kh, kw]");
  check_window("conv2d", weight.size(2), weight.size(3), stride, padding, x);
  if (bias.defined()) {
    internal::check_same_kind("conv2d", x, bias);
    SB_CHECK(bias.shape() == Shape{weight.size(0)}, "conv2d: bias ",
             shape_text(bias.shape()), " for weight ",
             shape_text(weight.shape()));
  }
  kernels::ConvShape s;
  s.n = x.size(0), s.h = x.size(1), s.w = x.size(2), s.in = x.size(3);
  s.out = weight.size(0), s.kh = weight.size(2), s.kw = weight.size(3);
  s.stride = stride, s.padding = padding;
  return s;
}

/// Each pass is a product of the same three sizes.
double conv_flops(const kernels::ConvShape& s) {
  return 2.0 * static_cast<double>(s.rows()) * static_cast<double>(s.out) *
         static_cast<double>(s.depth());
}

/// Lets observers tell apart the convolutions whose kernels need fewer
/// operations than conv_flops() returns.
const char* name_of(const kernels::ConvShape& s) {
  return s.is_wide_3x3() ? "conv2d_3x3" : "conv2d";
}

Tensor data_gradient(const kernels::ConvShape& s, const Tensor& x,
                     const Tensor& weight, const Tensor& dy) {
  Tensor dx = internal::gradient_like(x);
  OpScope scope(name_of(s), conv_flops(s), bytes_of({&dy, &weight, &dx}), dy,
                {s.rows(), s.depth(), s.out, 1});
  if (scope.runs()) {
    internal::CopiesOf copies(weight);
    kernels::conv2d_backward_data(scope.kernels(), dy.dtype(), s, dy.raw(),
                                  internal::address_to_read(weight), dx.raw(),
                                  &copies);
  }
  return dx;
}

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              std::int64_t stride, std::int64_t padding) {
  const kernels::ConvShape s = conv_shape(x, weight, bias, stride, padding);
  Tensor y = Tensor::empty({s.n, s.out_h(), s.out_w(), s.out}, x.options());
  {
    OpScope scope(name_of(s), conv_flops(s), bytes_of({&x, &weight, &bias, &y}),
                  y, {s.rows(), s.out, s.depth(), 1});
    if (scope.runs()) {
      internal::CopiesOf copies(weight);
      kernels::conv2d(scope.kernels(), x.dtype(), s, x.raw(),
                      internal::address_to_read(weight), raw_or_null(bias),
                      y.raw(), &copies);
    }
  }
  // An absent bias is not an input: it would have no device.
  Tensors inputs = {x, weight};
  if (bias.defined()) inputs.push_back(bias);
  record("conv2d", inputs, {y}, [x, weight, bias, s](const Tensors& grads) {
    const Tensor& dy = grads[0];
    Tensors result(bias.defined() ? 3 : 2);
    if (x.requires_grad()) result[0] = data_gradient(s, x, weight, dy);
    if (weight.requires_grad()) {
      result[1] = weight_gradient(weight, [x, weight, dy, s] {
        Tensor dweight = Tensor::empty(weight.shape(), weight.options());
        OpScope scope(name_of(s), conv_flops(s), bytes_of({&x, &dy, &dweight}),
                      dy, {s.depth(), s.out, s.rows(), 1});
        if (scope.runs()) {
          SharedKernelOrder order;
          kernels::conv2d_backward_weight(
              scope.kernels(), dy.dtype(), s, x.raw(), dy.raw(), dweight.raw(),
              internal::may_keep_kernel_order(dy.device()) ? &order : nullptr);
          if (order != nullptr) internal::set_kernel_order(dweight, order);
        }
        return dweight;
      });
    }
    if (bias.defined() && bias.requires_grad()) {
      Tensor dbias = internal::gradient_like(bias);
      OpScope("sum_rows", count(dy), bytes_of({&dy, &dbias}), dy)
          .run(kernels::sum_rows, dy.dtype(), s.rows(), s.out, dy.raw(),
               dbias.raw());
      result[2] = dbias;
    }
    return result;
  });
  return y;
}

Tensor max_pool2d(const Tensor& x, std::int64_t size, std::int64_t stride,
                  std::int64_t padding) {
  check_images("max_pool2d", x);
  check_window("max_pool2d", size, size, stride, padding, x);
  SB_CHECK(2 * padding <= size, "max_pool2d: padding ", padding,
           " is more than half of the window of ", size);
  kernels::PoolShape s;
  s.n = x.size(0), s.h = x.size(1), s.w = x.size(2), s.c = x.size(3);
  s.size = size, s.stride = stride, s.padding = padding;
  Tensor y = Tensor::empty({s.n, s.out_h(), s.out_w(), s.c}, x.options());
  Tensor taps = Tensor::empty(y.shape(), {DType::kI32, x.device()});
  OpScope("max_pool2d", count(y) * static_cast<double>(size * size),
          bytes_of({&x, &y, &taps}), x)
      .run(kernels::max_pool, x.dtype(), s, x.raw(), y.raw(),
           taps.data<std::int32_t>());
  record("max_pool2d", {x}, {y},
         [input = internal::InputInfo(x), s, taps](const Tensors& grads) {
           const Tensor& dy = grads[0];
           GradientOf kind(input.leaf);
           Tensor dx = Tensor::empty(input.shape, dy.options());
           OpScope("max_pool2d", count(dy), bytes_of({&dy, &taps, &dx}), dy)
               .run(kernels::max_pool_backward, dy.dtype(), s, dy.raw(),
                    taps.data<std::int32_t>(), dx.raw());
           return Tensors{dx};
         });
  return y;
}

Tensor global_avg_pool2d(const Tensor& x) {
  check_images("global_avg_pool2d", x);
  const std::int64_t n = x.size(0), pixels = x.size(1) * x.size(2),
                     c = x.size(3);
  SB_CHECK(pixels > 0, "global_avg_pool2d: images ", shape_text(x.shape()),
           " have no pixels");
  Tensor y = Tensor::empty({n, c}, x.options());
  OpScope("global_avg_pool2d", count(x), bytes_of({&x, &y}), x)
      .run(kernels::average_pixels, x.dtype(), n, pixels, c, x.raw(), y.raw());
  record("global_avg_pool2d", {x}, {y},
         [input = internal::InputInfo(x), n, pixels, c](const Tensors& grads) {
           const Tensor& dy = grads[0];
           GradientOf kind(input.leaf);
           Tensor dx = Tensor::empty(input.shape, dy.options());
           OpScope("global_avg_pool2d", count(dx), bytes_of({&dy, &dx}), dy)
               .run(kernels::average_pixels_backward, dy.dtype(), n, pixels, c,
                    dy.raw(), dx.raw());
           return Tensors{dx};
         });
  return y;
}

}  // namespace shardbook
