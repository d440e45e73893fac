#include "chapters/07_tensor_parallel/mappings.h"

#include <utility>

#include "core/autograd.h"
#include "core/check.h"

namespace shardbook::tensor_parallel {
namespace {

std::int64_t dim_of(const Tensor& x, Cut cut) {
  const std::int64_t dim = cut.dim < 0 ? cut.dim + x.ndim() : cut.dim;
  SB_CHECK(dim >= 0 && dim < x.ndim(), "a cut of dim ", cut.dim,
           " of a tensor of shape ", shape_text(x.shape()));
  return dim;
}

// [before, length, after] around a dimension.
struct Around {
  std::int64_t before = 1, length = 1, behind = 1;
  Around(const Shape& shape, std::int64_t dim) {
    for (std::int64_t d = 0; d < static_cast<std::int64_t>(shape.size()); ++d) {
      const std::int64_t n = shape[static_cast<std::size_t>(d)];
      (d < dim ? before : d == dim ? length : behind) *= n;
    }
  }
};

Tensor own_part(const Tensor& x, ProcessGroup& group, Cut cut, const char*) {
  const std::int64_t dim = dim_of(x, cut);
  const std::int64_t own =
      exact_part(x.size(dim), group.size(), "the dimension that is cut");
  return slice(x, dim, group.rank() * own, (group.rank() + 1) * own);
}

Tensor function(const char* name, const Tensor& x,
                const std::function<Tensor(const Tensor& x)>& forward,
                std::function<Tensor(const Tensor& grad)> backward) {
  return autograd::custom_function(
      name, {x},
      [&](const Tensors& inputs) { return Tensors{forward(inputs[0])}; },
      [backward = std::move(backward)](const Tensors& grads) {
        return Tensors{backward(grads[0])};
      })[0];
}

Tensor as_it_is(const Tensor& x) { return x; }

using Operation = Tensor (*)(const Tensor& x, ProcessGroup& group, Cut cut,
                             const char* label);

// Runs one operation in forward, the other one in backward.
Tensor conjugate(const char* name, const Tensor& x, ProcessGroup& group,
                 Cut cut, Operation forward, Operation backward) {
  if (group.size() == 1) return x;
  return function(
      name, x, [&](const Tensor& x) { return forward(x, group, cut, name); },
      [name, &group, cut, backward](const Tensor& grad) {
        return backward(grad, group, cut, name);
      });
}

}  // namespace

std::int64_t exact_part(std::int64_t length, int parts, const char* what) {
  SB_CHECK(length % parts == 0, what, " has ", length, " elements, which ",
           parts, " ranks cannot share equally; a multiple of ", parts,
           " would do");
  return length / parts;
}

Tensor all_gather(const Tensor& x, ProcessGroup& group, Cut cut,
                  const char* label) {
  if (group.size() == 1) return x;
  const std::int64_t p = group.size(), dim = dim_of(x, cut);
  const Around around(x.shape(), dim);
  Shape shape = x.shape();
  shape[static_cast<std::size_t>(dim)] *= p;
  // The ranks' parts come one after another, whichever dimension is cut
  Tensor parts = Tensor::empty(
      {p, around.before, around.length * around.behind}, x.options());
  group.all_gather(parts, x, label).wait();
  if (around.before == 1) return reshape(parts, shape);
  return reshape(transpose(parts, 0, 1), shape);
}

Tensor reduce_scatter(const Tensor& x, ProcessGroup& group, Cut cut,
                      const char* label) {
  if (group.size() == 1) return x;
  const std::int64_t p = group.size(), dim = dim_of(x, cut);
  const Around around(x.shape(), dim);
  const std::int64_t own =
      exact_part(around.length, group.size(), "the dimension that is cut");
  Shape shape = x.shape();
  shape[static_cast<std::size_t>(dim)] = own;
  Tensor parts = reshape(x, {around.before, p, own * around.behind});
  if (around.before > 1) parts = transpose(parts, 0, 1);
  Tensor sum = Tensor::empty(shape, x.options());
  group.reduce_scatter(sum, parts, ReduceOp::kSum, label).wait();
  return sum;
}

Tensor copy_to(const Tensor& x, ProcessGroup& group) {
  if (group.size() == 1) return x;
  return function("copy_to", x, as_it_is, [&group](const Tensor& grad) {
    // Another path may hold the same gradient
    Tensor sum = grad.clone();
    group.all_reduce(sum, ReduceOp::kSum, "f").wait();
    return sum;
  });
}

Tensor reduce_from(const Tensor& x, ProcessGroup& group) {
  if (group.size() == 1) return x;
  return function(
      "reduce_from", x,
      [&group](const Tensor& x) {
        group.all_reduce(x, ReduceOp::kSum, "g").wait();
        return x;
      },
      as_it_is);
}

Tensor scatter_to(const Tensor& x, ProcessGroup& group, Cut cut) {
  return conjugate("scatter_to", x, group, cut, own_part, all_gather);
}

Tensor gather_from(const Tensor& x, ProcessGroup& group, Cut cut) {
  return conjugate("gather_from", x, group, cut, all_gather, own_part);
}

Tensor gather_to_parallel(const Tensor& x, ProcessGroup& group, Cut cut) {
  return conjugate("gather_to_parallel", x, group, cut, all_gather,
                   reduce_scatter);
}

Tensor reduce_scatter_to(const Tensor& x, ProcessGroup& group, Cut cut) {
  return conjugate("reduce_scatter_to", x, group, cut, reduce_scatter,
                   all_gather);
}

InputGradientHook sum_input_gradients(ProcessGroup& group) {
  if (group.size() == 1) return {};
  return [&group](const Tensor& gradient) -> std::function<void()> {
    Work work = group.all_reduce(gradient, ReduceOp::kSum, "f");
    return [work]() mutable { work.wait(); };
  };
}

}  // namespace shardbook::tensor_parallel
