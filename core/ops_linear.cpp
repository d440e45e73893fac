// Matrix products.

#include "core/internal/op_scope.h"
#include "core/kernels/matmul.h"
#include "core/kernels/reduce.h"
#include "core/ops.h"

namespace shardbook {

using autograd::record;
using internal::bytes_of;
using internal::GradientOf;
using internal::OpScope;
using internal::weight_gradient;

namespace {

/// Rows and columns of a matrix (or of each matrix of a batch) as stored.
struct Stored {
  std::int64_t batch, rows, cols;
};

Stored stored(const Tensor& x) {
  SB_CHECK(x.ndim() == 2 || x.ndim() == 3, "matmul: shape ",
           shape_text(x.shape()), " is neither a matrix nor a batch of them");
  return {x.ndim() == 3 ? x.size(0) : 1, x.size(-2), x.size(-1)};
}

/// y = op(a) op(b), unrecorded.
Tensor product(const Tensor& a, const Tensor& b, bool trans_a, bool trans_b) {
  internal::check_same_kind("matmul", a, b);
  const Stored sa = stored(a), sb = stored(b);
  kernels::MatmulArgs args;
  args.m = trans_a ? sa.cols : sa.rows;
  args.k = trans_a ? sa.rows : sa.cols;
  args.n = trans_b ? sb.rows : sb.cols;
  args.trans_a = trans_a;
  args.trans_b = trans_b;
  SB_CHECK((trans_b ? sb.cols : sb.rows) == args.k && a.ndim() == b.ndim() &&
               sa.batch == sb.batch,
           "matmul: shapes ", shape_text(a.shape()), trans_a ? "^T" : "",
           " and ", shape_text(b.shape()), trans_b ? "^T" : "", " do not fit");
  args.batch = sa.batch;
  args.stride_a = sa.rows * sa.cols;
  args.stride_b = sb.rows * sb.cols;
  args.stride_c = args.m * args.n;
  Tensor y = Tensor::empty(
      a.ndim() == 3 ? Shape{args.batch, args.m, args.n} : Shape{args.m, args.n},
      a.options());
  const double flops =
      2.0 * static_cast<double>(args.batch) * static_cast<double>(args.m) *
      static_cast<double>(args.n) * static_cast<double>(args.k);
  OpScope scope("matmul", flops, bytes_of({&a, &b, &y}), y,
                {args.m, args.n, args.k, args.batch});
  if (scope.runs()) {
    kernels::matmul(scope.kernels(), a.dtype(), args, a.raw(), b.raw(),
                    y.raw());
  }
  return y;
}

/// [.., n] as [rows, n].
Tensor as_rows(const Tensor& x) {
  const std::int64_t cols = x.size(-1);
  return internal::make_view(x, 0, {cols == 0 ? 0 : x.numel() / cols, cols});
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b, bool trans_a, bool trans_b) {
  Tensor y = product(a, b, trans_a, trans_b);
  record("matmul", {a, b}, {y}, [=](const Tensors& grads) {
    const Tensor& dy = grads[0];
    Tensors result(2);
    // Y = op(A) op(B):  d op(A) = dY op(B)^T,  d op(B) = op(A)^T dY.
    if (a.requires_grad()) {
      GradientOf kind(a);
      result[0] = trans_a ? product(b, dy, trans_b, true)
                          : product(dy, b, false, !trans_b);
    }
    if (b.requires_grad()) {
      result[1] = weight_gradient(b, [=] {
        return trans_b ? product(dy, a, true, trans_a)
                       : product(a, dy, !trans_a, false);
      });
    }
    return result;
  });
  return y;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const InputGradientHook& hook) {
  internal::check_same_kind("linear", x, weight);
  if (bias.defined()) internal::check_same_kind("linear", x, bias);
  SB_CHECK(weight.ndim() == 2 && x.ndim() >= 1 && x.size(-1) == weight.size(0),
           "linear: input ", shape_text(x.shape()), " and weight ",
           shape_text(weight.shape()),
           "; the last dim of the input is the "
           "first of the weight");
  SB_CHECK(!bias.defined() || bias.shape() == Shape{weight.size(1)},
           "linear: bias ", shape_text(bias.shape()), " for weight ",
           shape_text(weight.shape()));
  Shape shape = x.shape();
  shape.back() = weight.size(1);
  Tensor y = Tensor::empty(shape, x.options());
  {
    kernels::MatmulArgs args;
    args.m = as_rows(x).size(0);
    args.n = weight.size(1);
    args.k = weight.size(0);
    const double flops = 2.0 * static_cast<double>(args.m) *
                         static_cast<double>(args.n) *
                         static_cast<double>(args.k);
    OpScope scope("linear", flops, bytes_of({&x, &weight, &bias, &y}), y,
                  {args.m, args.n, args.k, 1});
    if (scope.runs()) {
      kernels::matmul(scope.kernels(), x.dtype(), args, x.raw(), weight.raw(),
                      y.raw(), bias.defined() ? bias.raw() : nullptr);
    }
  }
  // An absent bias is not an input: it would have no device.
  Tensors inputs = {x, weight};
  if (bias.defined()) inputs.push_back(bias);
  record("linear", inputs, {y}, [x, weight, bias, hook](const Tensors& grads) {
    const Tensor dy = as_rows(grads[0]);
    Tensors result(bias.defined() ? 3 : 2);
    std::function<void()> end_of_hook;
    if (x.requires_grad()) {
      result[0] =
          internal::make_view(product(dy, weight, false, true), 0, x.shape());
      if (hook) end_of_hook = hook(result[0]);
    }
    if (weight.requires_grad()) {
      result[1] = weight_gradient(
          weight, [x, dy] { return product(as_rows(x), dy, true, false); });
    }
    if (bias.defined() && bias.requires_grad()) {
      GradientOf kind(bias);
      Tensor db = Tensor::empty(bias.shape(), bias.options());
      OpScope scope("sum_rows", static_cast<double>(dy.numel()),
                    bytes_of({&dy, &db}), dy);
      if (scope.runs()) {
        kernels::sum_rows(scope.kernels(), dy.dtype(), dy.size(0), dy.size(1),
                          dy.raw(), db.raw());
      }
      result[2] = db;
    }
    if (end_of_hook) end_of_hook();
    return result;
  });
  return y;
}

}  // namespace shardbook
