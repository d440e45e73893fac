#include "core/kernels/loops.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/kernels/elementwise.h"

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

namespace {

/// Puts a loop around loops that are listed innermost first, or joins it with
/// the last of them.
void enclose(Loops& loops, std::int64_t size, std::int64_t a, std::int64_t b) {
  const bool joins = !loops.sizes.empty() &&
                     a == loops.a.back() * loops.sizes.back() &&
                     b == loops.b.back() * loops.sizes.back();
  if (joins) {
    loops.sizes.back() *= size;
    return;
  }
  loops.sizes.push_back(size);
  loops.a.push_back(a);
  loops.b.push_back(b);
}

Loops outermost_first(Loops loops) {
  for (Dims* dims : {&loops.sizes, &loops.a, &loops.b}) {
    std::reverse(dims->begin(), dims->end());
  }
  return loops;
}

}  // namespace

Loops plan_broadcast(const Dims& out, const Dims& a, const Dims& b) {
  const std::size_t ndim = out.size();
  const auto size_in = [&](const Dims& shape, std::size_t dim) {
    const std::size_t missing = ndim - shape.size();
    return dim < missing ? 1 : shape[dim - missing];
  };
  Loops loops;
  std::int64_t a_stride = 1, b_stride = 1;
  for (std::size_t d = ndim; d-- > 0;) {
    if (out[d] == 1) continue;
    const std::int64_t in_a = size_in(a, d), in_b = size_in(b, d);
    enclose(loops, out[d], in_a == 1 ? 0 : a_stride, in_b == 1 ? 0 : b_stride);
    a_stride *= in_a;
    b_stride *= in_b;
  }
  if (loops.sizes.empty()) return {{1}, {1}, {1}};
  return outermost_first(std::move(loops));
}

Loops plan_copy(const Dims& shape, const Dims& src, const Dims& dst) {
  SB_CHECK(shape.size() <= kMaxDims, "copy_strided: ", shape.size(),
           " dims; at most ", kMaxDims);
  SB_CHECK(src.size() == shape.size() && dst.size() == shape.size(),
           "copy_strided: ", src.size(), " strides of src and ", dst.size(),
           " of dst for ", shape.size(), " dims");
  std::vector<std::size_t> dims;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] != 1) dims.push_back(d);
  }
  std::stable_sort(dims.begin(), dims.end(), [&](std::size_t x, std::size_t y) {
    return dst[x] > dst[y];
  });
  Loops loops;
  for (auto d = dims.rbegin(); d != dims.rend(); ++d) {
    enclose(loops, shape[*d], src[*d], dst[*d]);
  }
  return outermost_first(std::move(loops));
}

PermutedView plan_permute(const Dims& shape, const Dims& order) {
  const std::size_t ndim = shape.size();
  SB_CHECK(order.size() == ndim, "permute: an order of ", order.size(),
           " dims for a shape of ", ndim);
  std::vector<bool> seen(ndim, false);
  const Dims strides = contiguous_strides(shape);
  Dims out_shape(ndim), src_strides(ndim);
  for (std::size_t d = 0; d < ndim; ++d) {
    const std::int64_t from = order[d];
    SB_CHECK(from >= 0 && from < static_cast<std::int64_t>(ndim) && !seen[from],
             "permute: order names dim ", from, "; each of the ", ndim,
             " dims comes once");
    seen[from] = true;
    out_shape[d] = shape[from];
    src_strides[d] = strides[from];
  }
  return {out_shape, src_strides};
}

SumGroups plan_sum(const Dims& x, const Dims& out) {
  SB_CHECK(x.size() <= kMaxDims && out.size() <= x.size(),
           "sum_to_shape: ", x.size(), " dims to ", out.size(),
           "; not more than before, and at most ", kMaxDims);
  SumGroups groups;
  const std::size_t missing = x.size() - out.size();
  for (std::size_t d = 0; d < x.size(); ++d) {
    const std::int64_t to = d < missing ? 1 : out[d - missing];
    SB_CHECK(to == x[d] || to == 1, "sum_to_shape: dim ", d, " of size ", x[d],
             " cannot become ", to, "; it stays or becomes 1");
    if (x[d] == 1) continue;
    const bool summed = to == 1;
    if (!groups.sizes.empty() && groups.summed.back() == summed) {
      groups.sizes.back() *= x[d];
    } else {
      groups.sizes.push_back(x[d]);
      groups.summed.push_back(summed);
    }
  }
  return groups;
}

ViewRuns plan_runs(const GlobalView& view) {
  const std::size_t ndim = view.shape.size();
  SB_CHECK(view.global_shape.size() == ndim &&
               (view.offset.empty() || view.offset.size() == ndim) &&
               (view.step.empty() || view.step.size() == ndim),
           "random: a view with ", ndim, " local and ",
           view.global_shape.size(), " global dims, ", view.offset.size(),
           " offsets and ", view.step.size(), " steps; they must agree");
  ViewRuns runs;
  std::uint64_t stride = 1;
  bool joining = true;  // Still in the run, and it covers its dims so far
  for (std::size_t d = ndim; d-- > 0;) {
    const std::int64_t size = view.shape[d], global = view.global_shape[d];
    const std::int64_t offset = view.offset.empty() ? 0 : view.offset[d];
    const std::int64_t step = view.step.empty() ? 1 : view.step[d];
    SB_CHECK(size >= 0 && offset >= 0 && step >= 1 &&
                 (size == 0 || offset + (size - 1) * step < global),
             "random: dim ", static_cast<std::int64_t>(d), " of ", size,
             " elements from ", offset, " in steps of ", step,
             " leaves the global size ", global);
    runs.first += static_cast<std::uint64_t>(offset) * stride;
    const bool innermost = d + 1 == ndim;
    if (joining && (innermost || step == 1)) {
      if (innermost) runs.step = static_cast<std::uint64_t>(step);
      runs.length *= size;
      joining = step == 1 && size == global;
    } else {
      joining = false;
      runs.sizes.insert(runs.sizes.begin(), size);
      runs.strides.insert(runs.strides.begin(),
                          stride * static_cast<std::uint64_t>(step));
      runs.count *= size;
    }
    stride *= static_cast<std::uint64_t>(global);
  }
  return runs;
}

std::uint32_t keep_threshold(double p) {
  return static_cast<std::uint32_t>(
      std::min(std::ceil(p * 0x1p32), 0x1p32 - 1.0));
}

std::uint32_t dropout_threshold(double p) {
  SB_CHECK(p >= 0.0 && p < 1.0, "dropout: probability ", p,
           "; it lies in [0, 1)");
  return keep_threshold(p);
}

}  // namespace shardbook::kernels
