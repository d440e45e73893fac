// What the kernels of every type of device know about shapes and indices.

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/layout.h"
#include "core/kernels/random.h"

namespace shardbook::kernels {

Dims broadcast_shape(const Dims& a, const Dims& b) {
  const auto text = [](const Dims& shape) {
    std::string result = "[";
    for (std::size_t d = 0; d < shape.size(); ++d) {
      result += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
    }
    return result + "]";
  };
  const std::size_t ndim = std::max(a.size(), b.size());
  SB_CHECK(ndim <= kMaxDims, "broadcast: ", ndim, " dims; at most ", kMaxDims);
  Dims out(ndim);
  for (std::size_t i = 1; i <= ndim; ++i) {
    const std::int64_t in_a = i <= a.size() ? a[a.size() - i] : 1;
    const std::int64_t in_b = i <= b.size() ? b[b.size() - i] : 1;
    SB_CHECK(in_a == in_b || in_a == 1 || in_b == 1, "broadcast: shapes ",
             text(a), " and ", text(b), " differ in dim ",
             static_cast<std::int64_t>(ndim - i),
             "; sizes must be equal, or one of them 1");
    out[ndim - i] = in_a == 1 ? in_b : in_a;
  }
  return out;
}

bool backward_uses_output(UnaryOp op) {
  return op == UnaryOp::kTanh || op == UnaryOp::kSigmoid ||
         op == UnaryOp::kSqrt || op == UnaryOp::kExp;
}

Dims contiguous_strides(const Dims& shape) {
  Dims strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

GlobalView whole_view(const Dims& shape) { return {shape, shape, {}, {}}; }

}  // namespace shardbook::kernels
