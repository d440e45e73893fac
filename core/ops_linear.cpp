// Matrix products.

#include <functional>
#include <memory>
#include <utility>

#include "core/inplace.h"
#include "core/internal/op_scope.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/matmul.h"
#include "core/kernels/matmul_gelu.h"
#include "core/kernels/reduce.h"
#include "core/ops.h"
#include "core/tensor_storage.h"

namespace shardbook {

using autograd::record;
using internal::bytes_of;
using internal::count;
using internal::GradientOf;
using internal::OpScope;
using internal::raw_or_null;
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

/// op(a) op(b) of two matrices, or of two batches.
kernels::MatmulArgs args_of(const Tensor& a, const Tensor& b, bool trans_a,
                            bool trans_b) {
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
  return args;
}

double flops_of(const kernels::MatmulArgs& args) {
  return 2.0 * static_cast<double>(args.batch) * static_cast<double>(args.m) *
         static_cast<double>(args.n) * static_cast<double>(args.k);
}

/// y = op(a) op(b), unrecorded.
Tensor product(const Tensor& a, const Tensor& b, bool trans_a, bool trans_b) {
  const kernels::MatmulArgs args = args_of(a, b, trans_a, trans_b);
  Tensor y = Tensor::empty(
      a.ndim() == 3 ? Shape{args.batch, args.m, args.n} : Shape{args.m, args.n},
      a.options());
  OpScope("matmul", flops_of(args), bytes_of({&a, &b, &y}), y,
          {args.m, args.n, args.k, args.batch})
      .run(kernels::matmul, a.dtype(), args, a.raw(), b.raw(), y.raw());
  return y;
}

/// [.., n] as [rows, n]. Rows without elements are rows, too.
Tensor as_rows(const Tensor& x) {
  std::int64_t rows = 1;
  for (std::int64_t dim = 0; dim + 1 < x.ndim(); ++dim) rows *= x.size(dim);
  return internal::make_view(x, 0, {rows, x.size(-1)});
}

/// x [.., k] W [k, n] + b as one product of x's rows.
kernels::MatmulArgs linear_args(const Tensor& x, const Tensor& weight,
                                const Tensor& bias) {
  internal::check_same_kind("linear", x, weight);
  if (bias.defined()) internal::check_same_kind("linear", x, bias);
  SB_CHECK(weight.ndim() == 2 && x.ndim() >= 1 && x.size(-1) == weight.size(0),
           "linear: input ", shape_text(x.shape()), " and weight ",
           shape_text(weight.shape()),
           "; the last dim of the input is the first of the weight");
  SB_CHECK(!bias.defined() || bias.shape() == Shape{weight.size(1)},
           "linear: bias ", shape_text(bias.shape()), " for weight ",
           shape_text(weight.shape()));
  kernels::MatmulArgs args;
  args.m = as_rows(x).size(0);
  args.n = weight.size(1);
  args.k = weight.size(0);
  return args;
}

/// An uninitialised [.., n] for x [.., k] and a weight [k, n].
Tensor linear_output(const Tensor& x, const Tensor& weight) {
  Shape shape = x.shape();
  shape.back() = weight.size(1);
  return Tensor::empty(shape, x.options());
}

/// An absent bias is not an input: it would have no device.
Tensors linear_inputs(const Tensor& x, const Tensor& weight,
                      const Tensor& bias) {
  return bias.defined() ? Tensors{x, weight, bias} : Tensors{x, weight};
}

/// x W + b, unrecorded.
Tensor linear_forward(const Tensor& x, const Tensor& weight,
                      const Tensor& bias) {
  const kernels::MatmulArgs args = linear_args(x, weight, bias);
  Tensor y = linear_output(x, weight);
  OpScope("linear", flops_of(args), bytes_of({&x, &weight, &bias, &y}), y,
          {args.m, args.n, args.k, 1})
      .run(kernels::matmul, x.dtype(), args, x.raw(), weight.raw(), y.raw(),
           raw_or_null(bias));
  return y;
}

/// dy W^T, or undefined where x needs no gradient. Gradients `dy` of a linear
/// layer's output are given as rows.
Tensor input_gradient(const Tensor& x, const Tensor& weight, const Tensor& dy) {
  if (!x.requires_grad()) return Tensor();
  return internal::make_view(product(dy, weight, false, true), 0, x.shape());
}

Tensor bias_gradient(const Tensor& bias, const Tensor& dy) {
  Tensor db = internal::gradient_like(bias);
  OpScope("sum_rows", count(dy), bytes_of({&dy, &db}), dy)
      .run(kernels::sum_rows, dy.dtype(), dy.size(0), dy.size(1), dy.raw(),
           db.raw());
  return db;
}

/// The gradients of a linear layer's inputs; `dx` has been computed, and `db`
/// may have been.
Tensors linear_gradients(const Tensor& x, const Tensor& weight,
                         const Tensor& bias, const Tensor& dy, Tensor dx,
                         Tensor db = Tensor()) {
  Tensors result = {std::move(dx), Tensor()};
  if (weight.requires_grad()) {
    result[1] = weight_gradient(
        weight, [x, dy] { return product(as_rows(x), dy, true, false); });
  }
  if (!bias.defined()) return result;
  if (bias.requires_grad() && !db.defined()) db = bias_gradient(bias, dy);
  result.push_back(std::move(db));
  return result;
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

void matmul_into(const Tensor& target, const Tensor& a, const Tensor& b,
                 bool trans_a, bool trans_b, bool from_zero,
                 const Tensor& bias) {
  kernels::MatmulArgs args = args_of(a, b, trans_a, trans_b);
  args.resume = !from_zero;
  internal::check_same_kind("matmul_into", target, a);
  SB_CHECK(a.ndim() == 2 && target.shape() == (Shape{args.m, args.n}),
           "matmul_into: shape ", shape_text(target.shape()),
           " for a product of [", args.m, ", ", args.n, "]");
  OpScope("matmul", flops_of(args), bytes_of({&a, &b, &target, &bias}), target,
          {args.m, args.n, args.k, 1})
      .run(kernels::matmul, a.dtype(), args, a.raw(), b.raw(), target.raw(),
           raw_or_null(bias));
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const InputGradientHook& hook) {
  Tensor y = linear_forward(x, weight, bias);
  record("linear", linear_inputs(x, weight, bias), {y},
         [x, weight, bias, hook](const Tensors& grads) {
           const Tensor dy = as_rows(grads[0]);
           const Tensor dx = input_gradient(x, weight, dy);
           std::function<void()> end_of_hook;
           if (hook && dx.defined()) end_of_hook = hook(dx);
           Tensors result = linear_gradients(x, weight, bias, dy, dx);
           if (end_of_hook) end_of_hook();
           return result;
         });
  return y;
}

// --- A linear layer, GELU and another linear layer ---------------------------

namespace {

constexpr double kGeluFlops = 8;

/// Work that the second product's backward did for the nodes before it.
struct GeluEpilogue {
  /// True when it computed the gradient of GELU's input.
  bool is_applied = false;
  /// The first layer's bias gradient, until its node takes it.
  Tensor dbias;
};

/// pre = x W + b and gelu(pre) by one kernel, unrecorded.
std::pair<Tensor, Tensor> linear_gelu(const Tensor& x, const Tensor& weight,
                                      const Tensor& bias) {
  const kernels::MatmulArgs args = linear_args(x, weight, bias);
  const Tensor pre = linear_output(x, weight), y = pre.empty_like();
  OpScope("linear_gelu", flops_of(args) + kGeluFlops * count(y),
          bytes_of({&x, &weight, &bias, &pre, &y}), y,
          {args.m, args.n, args.k, 1})
      .run(kernels::matmul_gelu, x.dtype(), args, x.raw(), weight.raw(),
           raw_or_null(bias), pre.raw(), y.raw());
  return {pre, y};
}

/// dy W^T * gelu'(pre), and the gradient of the bias inside `pre` by the same
/// kernel. The latter is booked as workspace until its node runs: bills count
/// the gradients of one layer at a time.
Tensor gelu_input_gradient(const Tensor& pre, const Tensor& weight,
                           const Tensor& dy, const Tensor& bias,
                           GeluEpilogue& epilogue) {
  Tensor dpre = pre.empty_like();
  epilogue.is_applied = true;
  if (bias.defined() && bias.requires_grad()) {
    const MemoryScope kind(MemoryKind::kWorkspace);
    epilogue.dbias = bias.empty_like();
  }
  const Tensor& dbias = epilogue.dbias;
  kernels::MatmulArgs args;
  args.m = as_rows(pre).size(0);
  args.n = weight.size(0);
  args.k = weight.size(1);
  args.trans_b = true;
  const double each = kGeluFlops + (dbias.defined() ? 1 : 0);
  OpScope("matmul_gelu", flops_of(args) + each * count(dpre),
          bytes_of({&dy, &weight, &pre, &dpre, &dbias}), dy,
          {args.m, args.n, args.k, 1})
      .run(kernels::matmul_gelu_backward, dy.dtype(), args, dy.raw(),
           weight.raw(), pre.raw(), dpre.raw(), raw_or_null(dbias));
  return dpre;
}

Tensor gelu_gradient(const Tensor& pre, const Tensor& dy) {
  Tensor dx = dy.empty_like();
  OpScope("gelu", kGeluFlops * count(dy), bytes_of({&pre, &dy, &dx}), dy)
      .run(kernels::unary_backward, kernels::UnaryOp::kGeluTanh, dy.dtype(),
           dy.numel(), pre.raw(), dy.raw(), dx.raw());
  return dx;
}

/// Three nodes, as without epilogues: gradients reach the leaves, and saved
/// tensors are dropped, in the same order.
Tensor gelu_mlp_with_epilogues(const Tensor& x, const Tensor& w1,
                               const Tensor& b1, const Tensor& w2,
                               const Tensor& b2) {
  const auto [pre, h] = linear_gelu(x, w1, b1);
  const auto epilogue = std::make_shared<GeluEpilogue>();
  record("linear", linear_inputs(x, w1, b1), {pre},
         [x, w1, b1, epilogue](const Tensors& grads) {
           const Tensor dpre = as_rows(grads[0]);
           const Tensor dx = input_gradient(x, w1, dpre);
           Tensor db = std::exchange(epilogue->dbias, Tensor());
           if (db.defined()) {
             const GradientOf kind(b1);
             set_memory_kind(db, RankContext::current().memory_kind);
           }
           return linear_gradients(x, w1, b1, dpre, dx, std::move(db));
         });
  record("gelu", {pre}, {h}, [pre = pre, epilogue](const Tensors& grads) {
    return Tensors{epilogue->is_applied ? grads[0]
                                        : gelu_gradient(pre, grads[0])};
  });
  Tensor y = linear_forward(h, w2, b2);
  record("linear", linear_inputs(h, w2, b2), {y},
         [pre = pre, h = h, b1, w2, b2, epilogue](const Tensors& grads) {
           const Tensor dy = as_rows(grads[0]);
           *epilogue = GeluEpilogue();
           Tensor dh;
           // A deferred weight gradient keeps h, and bills also count h's
           // gradient: run separate kernels, which hold both.
           if (RankContext::current().weight_gradients != nullptr) {
             dh = input_gradient(h, w2, dy);
           } else if (h.requires_grad()) {
             dh = gelu_input_gradient(pre, w2, dy, b1, *epilogue);
           }
           return linear_gradients(h, w2, b2, dy, dh);
         });
  return y;
}

}  // namespace

Tensor gelu_mlp(const Tensor& x, const Tensor& w1, const Tensor& b1,
                const Tensor& w2, const Tensor& b2, GeluForm form) {
  // cuBLASLt has the tanh form alone
  if (x.device().is_cuda() && form == GeluForm::kTanh) {
    return gelu_mlp_with_epilogues(x, w1, b1, w2, b2);
  }
  return linear(gelu(linear(x, w1, b1), form), w2, b2);
}

}  // namespace shardbook
