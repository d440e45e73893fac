// Element-wise operations and reductions.

#include "core/internal/op_scope.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/layout.h"
#include "core/kernels/random.h"
#include "core/kernels/reduce.h"
#include "core/ops.h"

namespace shardbook {

using autograd::needs_grad;
using autograd::record;
using internal::bytes_of;
using internal::count;
using internal::InputInfo;
using internal::OpScope;
using kernels::BinaryOp;
using kernels::UnaryOp;

namespace {

Tensor binary_forward(const char* name, BinaryOp op, const Tensor& a,
                      const Tensor& b) {
  internal::check_same_kind(name, a, b);
  Tensor y = Tensor::empty(kernels::broadcast_shape(a.shape(), b.shape()),
                           a.options());
  internal::pass_mark(name, y, a, b);
  OpScope(name, count(y), bytes_of({&a, &b, &y}), y)
      .run(kernels::binary, op, a.dtype(), a.shape(), a.raw(), b.shape(),
           b.raw(), y.raw());
  return y;
}

/// Sums a gradient over the dims that broadcasting repeated.
Tensor sum_to(const Tensor& grad, const InputInfo& input) {
  if (grad.shape() == input.shape) return grad;
  internal::GradientOf kind(input.leaf);
  Tensor result = Tensor::empty(input.shape, grad.options());
  OpScope("sum_to_shape", count(grad), bytes_of({&grad, &result}), grad)
      .run(kernels::sum_to_shape, grad.dtype(), grad.shape(), grad.raw(),
           result.shape(), result.raw());
  return result;
}

Tensor unary(const char* name, UnaryOp op, const Tensor& x,
             double flops_per_element) {
  Tensor y = x.empty_like();
  internal::pass_mark(name, y, x);
  OpScope(name, flops_per_element * count(x), bytes_of({&x, &y}), x)
      .run(kernels::unary, op, x.dtype(), x.numel(), x.raw(), y.raw());
  if (!needs_grad({x})) return y;
  const Tensor saved = kernels::backward_uses_output(op) ? y.detach() : x;
  record(name, {x}, {y},
         [name, op, saved, flops_per_element](const Tensors& grads) {
           const Tensor& dy = grads[0];
           Tensor dx = dy.empty_like();
           OpScope(name, flops_per_element * count(dy),
                   bytes_of({&saved, &dy, &dx}), dy)
               .run(kernels::unary_backward, op, dy.dtype(), dy.numel(),
                    saved.raw(), dy.raw(), dx.raw());
           return Tensors{dx};
         });
  return y;
}

}  // namespace

// --- Element-wise --------------------------------------------------------------

Tensor add(const Tensor& a, const Tensor& b) {
  Tensor y = binary_forward("add", BinaryOp::kAdd, a, b);
  if (!needs_grad({a, b})) return y;
  record("add", {a, b}, {y},
         [a = InputInfo(a), b = InputInfo(b)](const Tensors& grads) {
           return Tensors{a.needs_grad ? sum_to(grads[0], a) : Tensor(),
                          b.needs_grad ? sum_to(grads[0], b) : Tensor()};
         });
  return y;
}

Tensor sub(const Tensor& a, const Tensor& b) {
  Tensor y = binary_forward("sub", BinaryOp::kSub, a, b);
  if (!needs_grad({a, b})) return y;
  record("sub", {a, b}, {y},
         [a = InputInfo(a), b = InputInfo(b)](const Tensors& grads) {
           return Tensors{
               a.needs_grad ? sum_to(grads[0], a) : Tensor(),
               b.needs_grad ? sum_to(scale(grads[0], -1), b) : Tensor()};
         });
  return y;
}

Tensor mul(const Tensor& a, const Tensor& b) {
  Tensor y = binary_forward("mul", BinaryOp::kMul, a, b);
  record("mul", {a, b}, {y}, [a, b](const Tensors& grads) {
    return Tensors{
        a.requires_grad() ? sum_to(mul(grads[0], b), InputInfo(a)) : Tensor(),
        b.requires_grad() ? sum_to(mul(grads[0], a), InputInfo(b)) : Tensor()};
  });
  return y;
}

Tensor div(const Tensor& a, const Tensor& b) {
  Tensor y = binary_forward("div", BinaryOp::kDiv, a, b);
  record("div", {a, b}, {y}, [a, b](const Tensors& grads) {
    Tensors result(2);
    const Tensor da = div(grads[0], b);
    if (a.requires_grad()) result[0] = sum_to(da, InputInfo(a));
    if (b.requires_grad()) {
      result[1] = sum_to(scale(div(mul(da, a), b), -1), InputInfo(b));
    }
    return result;
  });
  return y;
}

Tensor scale(const Tensor& x, double factor) {
  Tensor y = x.empty_like();
  internal::pass_mark("scale", y, x);
  OpScope("scale", count(x), bytes_of({&x, &y}), x)
      .run(kernels::scale, x.dtype(), x.numel(), factor, x.raw(), y.raw());
  record("scale", {x}, {y}, [factor](const Tensors& grads) {
    return Tensors{scale(grads[0], factor)};
  });
  return y;
}

Tensor add_scalar(const Tensor& x, double value) {
  Tensor y = x.empty_like();
  OpScope("add_scalar", count(x), bytes_of({&x, &y}), x)
      .run(kernels::add_scalar, x.dtype(), x.numel(), value, x.raw(), y.raw());
  record("add_scalar", {x}, {y},
         [](const Tensors& grads) { return Tensors{grads[0]}; });
  return y;
}

Tensor neg(const Tensor& x) { return unary("neg", UnaryOp::kNeg, x, 1); }
Tensor abs(const Tensor& x) { return unary("abs", UnaryOp::kAbs, x, 1); }
Tensor relu(const Tensor& x) { return unary("relu", UnaryOp::kRelu, x, 1); }
Tensor gelu(const Tensor& x, GeluForm form) {
  const bool is_exact = form == GeluForm::kErf;
  return unary("gelu", is_exact ? UnaryOp::kGeluErf : UnaryOp::kGeluTanh, x, 8);
}
Tensor tanh(const Tensor& x) { return unary("tanh", UnaryOp::kTanh, x, 1); }
Tensor sigmoid(const Tensor& x) {
  return unary("sigmoid", UnaryOp::kSigmoid, x, 1);
}
Tensor square(const Tensor& x) {
  return unary("square", UnaryOp::kSquare, x, 1);
}
Tensor sqrt(const Tensor& x) { return unary("sqrt", UnaryOp::kSqrt, x, 1); }
Tensor exp(const Tensor& x) { return unary("exp", UnaryOp::kExp, x, 1); }
Tensor log(const Tensor& x) { return unary("log", UnaryOp::kLog, x, 1); }

namespace {

// A copy to another dtype or device, without a record.
Tensor converted(const Tensor& x, DType dtype, const Device& device) {
  Tensor y = Tensor::empty(x.shape(), {dtype, device});
  y.copy_from(x);
  return y;
}

}  // namespace

Tensor to_dtype(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  Tensor y = converted(x, dtype, x.device());
  if (is_floating(dtype)) {
    record("cast", {x}, {y}, [from = x.dtype()](const Tensors& grads) {
      return Tensors{converted(grads[0], from, grads[0].device())};
    });
  }
  return y;
}

Tensor to_device(const Tensor& x, const Device& device) {
  if (x.device() == device) return x;
  Tensor y = converted(x, x.dtype(), device);
  if (is_floating(x.dtype())) {
    record("copy", {x}, {y}, [from = x.device()](const Tensors& grads) {
      return Tensors{converted(grads[0], grads[0].dtype(), from)};
    });
  }
  return y;
}

// --- Reductions ------------------------------------------------------------------

namespace {

/// A tensor of this shape that repeats one value.
Tensor repeated(const Tensor& scalar, const Shape& shape, double factor) {
  Tensor y = Tensor::empty(shape, scalar.options());
  if (y.numel() == 0) return y;
  OpScope("fill", 0, bytes_of({&y}), y)
      .run(kernels::repeat, y.dtype(), y.numel(), factor, scalar.raw(),
           y.raw());
  return y;
}

Tensor sum_all(const char* name, const Tensor& x, double factor) {
  Tensor y = Tensor::empty({}, x.options());
  OpScope(name, count(x), bytes_of({&x, &y}), x)
      .run(kernels::sum_all_into, x.dtype(), x.numel(), factor, x.raw(),
           y.raw());
  record(name, {x}, {y}, [shape = x.shape(), factor](const Tensors& grads) {
    return Tensors{repeated(grads[0], shape, factor)};
  });
  return y;
}

}  // namespace

Tensor sum(const Tensor& x) { return sum_all("sum", x, 1.0); }

Tensor mean(const Tensor& x) {
  SB_CHECK(x.numel() > 0, "mean: the tensor has no elements");
  return sum_all("mean", x, 1.0 / count(x));
}

Tensor sum(const Tensor& x, std::int64_t dim) {
  x.size(dim);  // checks the dim
  if (dim < 0) dim += x.ndim();
  Shape kept = x.shape();
  kept[static_cast<std::size_t>(dim)] = 1;
  Shape dropped = x.shape();
  dropped.erase(dropped.begin() + dim);
  Tensor y = Tensor::empty(dropped, x.options());
  OpScope("sum", count(x), bytes_of({&x, &y}), x)
      .run(kernels::sum_to_shape, x.dtype(), x.shape(), x.raw(), kept, y.raw());
  record("sum", {x}, {y}, [kept, shape = x.shape()](const Tensors& grads) {
    return Tensors{
        add(Tensor::zeros(shape, grads[0].options()), reshape(grads[0], kept))};
  });
  return y;
}

Tensor mean(const Tensor& x, std::int64_t dim) {
  return scale(sum(x, dim), 1.0 / static_cast<double>(x.size(dim)));
}

// --- Filling -----------------------------------------------------------------------

std::uint64_t stream_of(const std::string& name) {
  // FNV-1a; the top bit is left to the streams of operations.
  std::uint64_t hash = 14695981039346656037ull;
  for (unsigned char c : name) hash = (hash ^ c) * 1099511628211ull;
  return hash >> 1;
}

std::uint32_t random_bits(std::uint64_t seed, std::uint64_t stream,
                          std::uint64_t element) {
  return kernels::random_bits(kernels::RandomKey{seed, stream}, element);
}

std::vector<std::uint32_t> first_random_bits(std::uint64_t seed,
                                             std::uint64_t stream,
                                             std::size_t count) {
  std::vector<std::uint32_t> bits;
  for (std::uint64_t block = 0; bits.size() < count; ++block) {
    const auto four =
        kernels::random_block(kernels::RandomKey{seed, stream}, block);
    bits.insert(bits.end(), four.begin(), four.end());
  }
  bits.resize(count);
  return bits;
}

namespace {

kernels::GlobalView view_of(const Tensor& x, const ShardView& view) {
  if (view.global_shape.empty()) return kernels::whole_view(x.shape());
  return {x.shape(), view.global_shape, view.offset, view.step};
}

}  // namespace

void fill_normal(const Tensor& x, std::uint64_t seed, std::uint64_t stream,
                 double mean, double stddev, const ShardView& view) {
  OpScope("fill_normal", 0, bytes_of({&x}), x)
      .run(kernels::fill_normal, x.dtype(), view_of(x, view),
           kernels::RandomKey{seed, stream}, mean, stddev, x.raw());
}

void fill_uniform(const Tensor& x, std::uint64_t seed, std::uint64_t stream,
                  double low, double high, const ShardView& view) {
  OpScope("fill_uniform", 0, bytes_of({&x}), x)
      .run(kernels::fill_uniform, x.dtype(), view_of(x, view),
           kernels::RandomKey{seed, stream}, low, high, x.raw());
}

double sum_of_squares(const Tensor& x) {
  OpScope scope("sum_of_squares", 2 * count(x), bytes_of({&x}), x);
  if (!scope.runs()) return 0;
  return kernels::sum_squares(scope.kernels(), x.dtype(), x.numel(), x.raw());
}

}  // namespace shardbook
