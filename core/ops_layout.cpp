// Views and copies that move elements without changing them.

#include <algorithm>
#include <numeric>

#include "core/internal/op_scope.h"
#include "core/kernels/layout.h"
#include "core/ops.h"

namespace shardbook {

using autograd::record;
using internal::bytes_of;
using internal::OpScope;

namespace {

std::int64_t checked_dim(const char* op, const Tensor& x, std::int64_t dim) {
  const std::int64_t n = x.ndim();
  SB_CHECK(dim >= -n && dim < n, op, ": dim ", dim, " of a tensor of shape ",
           shape_text(x.shape()));
  return dim < 0 ? dim + n : dim;
}

/// The block of `whole` that starts at `begin` in `dim` and has part's shape:
/// copied to `part`, or from it.
void copy_block(const Tensor& whole, std::int64_t dim, std::int64_t begin,
                const Tensor& part, bool into_whole) {
  OpScope scope(into_whole ? "concat" : "slice", 0, bytes_of({&part, &part}),
                whole);
  if (!scope.runs() || part.numel() == 0) return;
  const kernels::Dims outer = kernels::contiguous_strides(whole.shape());
  const kernels::Dims inner = kernels::contiguous_strides(part.shape());
  auto* block = static_cast<std::byte*>(whole.raw()) +
                begin * outer[static_cast<std::size_t>(dim)] *
                    static_cast<std::int64_t>(dtype_bytes(whole.dtype()));
  if (into_whole) {
    kernels::copy_strided(scope.kernels(), whole.dtype(), part.shape(),
                          part.raw(), inner, block, outer);
  } else {
    kernels::copy_strided(scope.kernels(), whole.dtype(), part.shape(), block,
                          outer, part.raw(), inner);
  }
}

}  // namespace

Tensor reshape(const Tensor& x, const Shape& shape) {
  Shape sizes = shape;
  const auto open = std::find(sizes.begin(), sizes.end(), -1);
  if (open != sizes.end()) {
    *open = 1;
    const std::int64_t known = shape_numel(sizes);
    SB_CHECK(known > 0 && x.numel() % known == 0,
             "reshape: ", shape_text(x.shape()), " cannot become ",
             shape_text(shape));
    *open = x.numel() / known;
  }
  SB_CHECK(shape_numel(sizes) == x.numel(), "reshape: ", shape_text(x.shape()),
           " cannot become ", shape_text(shape));
  Tensor y = internal::make_view(x, 0, sizes);
  record("reshape", {x}, {y}, [from = x.shape()](const Tensors& grads) {
    return Tensors{internal::make_view(grads[0], 0, from)};
  });
  return y;
}

Tensor slice(const Tensor& x, std::int64_t dim, std::int64_t begin,
             std::int64_t end) {
  dim = checked_dim("slice", x, dim);
  SB_CHECK(0 <= begin && begin <= end && end <= x.size(dim), "slice: ", begin,
           " to ", end, " of dim ", dim, " of shape ", shape_text(x.shape()));
  Tensor y;
  if (dim == 0) {
    y = x.rows_view(begin, end);
  } else {
    Shape shape = x.shape();
    shape[static_cast<std::size_t>(dim)] = end - begin;
    y = Tensor::empty(shape, x.options());
    copy_block(x, dim, begin, y, /*into_whole=*/false);
  }
  record("slice", {x}, {y},
         [dim, begin, x = internal::InputInfo(x)](const Tensors& grads) {
           internal::GradientOf kind(x.leaf);
           Tensor dx = Tensor::zeros(x.shape, grads[0].options());
           copy_block(dx, dim, begin, grads[0], /*into_whole=*/true);
           return Tensors{dx};
         });
  return y;
}

Tensor concat(const Tensors& parts, std::int64_t dim) {
  SB_CHECK(!parts.empty(), "concat: no tensors were given");
  dim = checked_dim("concat", parts[0], dim);
  const auto d = static_cast<std::size_t>(dim);
  Shape shape = parts[0].shape();
  shape[d] = 0;
  std::vector<std::int64_t> sizes;
  for (const Tensor& part : parts) {
    internal::check_same_kind("concat", parts[0], part);
    Shape expected = parts[0].shape();
    SB_CHECK(part.ndim() == parts[0].ndim(), "concat: shapes ",
             shape_text(parts[0].shape()), " and ", shape_text(part.shape()));
    expected[d] = part.size(dim);
    SB_CHECK(part.shape() == expected, "concat along dim ", dim, ": shapes ",
             shape_text(parts[0].shape()), " and ", shape_text(part.shape()));
    sizes.push_back(part.size(dim));
    shape[d] += part.size(dim);
  }
  Tensor y = Tensor::empty(shape, parts[0].options());
  std::int64_t begin = 0;
  for (const Tensor& part : parts) {
    copy_block(y, dim, begin, part, /*into_whole=*/true);
    begin += part.size(dim);
  }
  record("concat", parts, {y}, [dim, sizes](const Tensors& grads) {
    Tensors result;
    std::int64_t at = 0;
    for (std::int64_t size : sizes) {
      result.push_back(slice(grads[0], dim, at, at + size));
      at += size;
    }
    return result;
  });
  return y;
}

Tensor permute(const Tensor& x, const std::vector<std::int64_t>& order) {
  SB_CHECK(static_cast<std::int64_t>(order.size()) == x.ndim(),
           "permute: ", order.size(), " dims are named for shape ",
           shape_text(x.shape()));
  Shape shape;
  std::vector<std::int64_t> sources;
  std::vector<std::int64_t> inverse(order.size(), -1);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto from =
        static_cast<std::size_t>(checked_dim("permute", x, order[i]));
    SB_CHECK(inverse[from] < 0, "permute: dim ", from, " is named twice");
    inverse[from] = static_cast<std::int64_t>(i);
    sources.push_back(static_cast<std::int64_t>(from));
    shape.push_back(x.shape()[from]);
  }
  Tensor y = Tensor::empty(shape, x.options());
  OpScope("permute", 0, bytes_of({&x, &y}), x)
      .run(kernels::permute, x.dtype(), x.shape(), sources, x.raw(), y.raw());
  record("permute", {x}, {y}, [inverse](const Tensors& grads) {
    return Tensors{permute(grads[0], inverse)};
  });
  return y;
}

Tensor transpose(const Tensor& x, std::int64_t dim0, std::int64_t dim1) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(x.ndim()));
  std::iota(order.begin(), order.end(), 0);
  std::swap(order[static_cast<std::size_t>(checked_dim("transpose", x, dim0))],
            order[static_cast<std::size_t>(checked_dim("transpose", x, dim1))]);
  return permute(x, order);
}

}  // namespace shardbook
