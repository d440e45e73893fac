// Reductions of DTensors: the sum over a dim that is cut is a partial.

#include <algorithm>
#include <limits>

#include "chapters/11_dtensor/dtensor_ops.h"
#include "chapters/11_dtensor/propagation.h"
#include "chapters/common/sharded/loss.h"
#include "core/context.h"

namespace shardbook::dtensor {
namespace {

Shape without_dim(Shape shape, std::int64_t dim) {
  shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(dim));
  return shape;
}

// Shards of `dim` become terms; shards of other dims stay.
std::vector<Rule> rules_over(const DTensor& x, std::int64_t dim,
                             const Placement& terms) {
  std::vector<Rule> rules = {{{replicate()}, replicate()}};
  for (std::int64_t other = 0; other < x.ndim(); ++other) {
    if (other == dim) {
      rules.push_back({{shard(dim)}, terms});
    } else {
      rules.push_back({{shard(other)}, shard(other > dim ? other - 1 : other)});
    }
  }
  if (terms.is_linear()) keep_terms(rules);
  return rules;
}

// Shards of any dim become terms.
std::vector<Rule> rules_over_all(const DTensor& x) {
  std::vector<Rule> rules = {{{replicate()}, replicate()}};
  for (std::int64_t dim = 0; dim < x.ndim(); ++dim) {
    rules.push_back({{shard(dim)}, partial()});
  }
  keep_terms(rules);
  return rules;
}

// True where the cuts of operand 0 leave equal shards on all ranks.
bool shards_are_equal(const DTensor& x, const Choice& choice) {
  for (std::int64_t dim = 0; dim < x.ndim(); ++dim) {
    const std::int64_t cuts =
        num_cuts(choice.operands[0], x.mesh().shape(), dim);
    if (x.shape()[static_cast<std::size_t>(dim)] % cuts != 0) return false;
  }
  return true;
}

// The terms that come from shards are means of equally many elements.
void average_shards(Choice& choice) {
  for (std::size_t axis = 0; axis < choice.result.size(); ++axis) {
    if (choice.operands[0][axis].is_shard() &&
        choice.result[axis].is_partial()) {
      choice.result[axis] = partial(PartialOp::kAvg);
    }
  }
}

// Largest (or smallest) along `dim`, which disappears; -inf (inf) where there is
// none.
Tensor extreme(const Tensor& x, std::int64_t dim, bool is_max) {
  const NoGrad no_grad;
  const Shape shape = without_dim(x.shape(), dim);
  if (x.is_meta()) return Tensor::empty(shape, x.options());
  const std::int64_t n = x.size(dim), numel = shape_numel(shape);
  std::int64_t inner = 1;
  for (std::int64_t d = dim + 1; d < x.ndim(); ++d) inner *= x.size(d);

  const std::vector<double> values = x.to_vector<double>();
  const double worst = std::numeric_limits<double>::infinity();
  std::vector<double> best(static_cast<std::size_t>(numel),
                           is_max ? -worst : worst);
  for (std::size_t at = 0; at < values.size(); ++at) {
    const auto i = static_cast<std::int64_t>(at);
    double& so_far =
        best[static_cast<std::size_t>(i / (n * inner) * inner + i % inner)];
    so_far =
        is_max ? std::max(so_far, values[at]) : std::min(so_far, values[at]);
  }
  return to_dtype(Tensor::from_values(best, shape, x.device()), x.dtype());
}

DTensor extreme_of(const char* name, const DTensor& x, std::int64_t dim,
                   bool is_max) {
  const std::int64_t d = positive_dim(name, x, dim);
  const Placement terms = partial(is_max ? PartialOp::kMax : PartialOp::kMin);
  return compute(
      name, {x}, rules_over(x, d, terms), without_dim(x.shape(), d),
      [d, is_max](const Tensors& a) { return extreme(a[0], d, is_max); });
}

}  // namespace

DTensor sum(const DTensor& x, std::int64_t dim) {
  const std::int64_t d = positive_dim("sum", x, dim);
  return compute("sum", {x}, rules_over(x, d, partial()),
                 without_dim(x.shape(), d),
                 [d](const Tensors& a) { return shardbook::sum(a[0], d); });
}

DTensor mean(const DTensor& x, std::int64_t dim) {
  const std::int64_t d = positive_dim("mean", x, dim);
  const std::int64_t n = x.shape()[static_cast<std::size_t>(d)];
  Choice choice = propagate("mean", {x}, rules_over(x, d, partial()));
  const bool is_equal =
      n % num_cuts(choice.operands[0], x.mesh().shape(), d) == 0;
  if (is_equal) average_shards(choice);
  return compute("mean", {x}, choice, without_dim(x.shape(), d),
                 [d, n, is_equal](const Tensors& a) {
                   if (is_equal) return shardbook::mean(a[0], d);
                   return shardbook::scale(shardbook::sum(a[0], d),
                                           1.0 / static_cast<double>(n));
                 });
}

DTensor sum(const DTensor& x) {
  return compute("sum", {x}, rules_over_all(x), {},
                 [](const Tensors& a) { return shardbook::sum(a[0]); });
}

DTensor mean(const DTensor& x) {
  Choice choice = propagate("mean", {x}, rules_over_all(x));
  const bool is_equal = shards_are_equal(x, choice);
  if (is_equal) average_shards(choice);
  const auto n = static_cast<double>(shape_numel(x.shape()));
  return compute("mean", {x}, choice, {}, [n, is_equal](const Tensors& a) {
    if (is_equal) return shardbook::mean(a[0]);
    return shardbook::scale(shardbook::sum(a[0]), 1 / n);
  });
}

DTensor max(const DTensor& x, std::int64_t dim) {
  return extreme_of("max", x, dim, /*is_max=*/true);
}

DTensor min(const DTensor& x, std::int64_t dim) {
  return extreme_of("min", x, dim, /*is_max=*/false);
}

DTensor cross_entropy(const DTensor& logits, const DTensor& targets) {
  const std::int64_t last = logits.ndim() - 1;
  const Placement r = replicate();
  std::vector<Rule> rules = {{{r, r}, r}, {{shard(last), r}, r}};
  for (std::int64_t dim = 0; dim < last; ++dim) {
    rules.push_back({{shard(dim), shard(dim)}, partial()});
  }
  const Mesh& mesh = logits.mesh();
  const std::int64_t classes = logits.shape().back();
  // One axis may cut the classes, if each of its ranks gets some
  const auto is_valid = [&](const Choice& choice) {
    const Placements& x = choice.operands[0];
    const std::int64_t cuts = num_cuts(x, mesh.shape(), last);
    const auto axes = std::count(x.begin(), x.end(), shard(last));
    return axes == 0 ||
           (axes == 1 && ceil_part(classes, cuts, cuts - 1).size > 0);
  };
  const Choice choice =
      propagate("cross_entropy", {logits, targets}, rules, is_valid);
  const bool cuts_classes =
      num_cuts(choice.operands[0], mesh.shape(), last) > 1;
  bool cuts_rows = false;
  for (std::size_t axis = 0; axis < choice.result.size(); ++axis) {
    cuts_rows = cuts_rows ||
                (choice.result[axis].is_partial() && mesh.shape()[axis] > 1);
  }
  // The ranks of a row exchange numbers per row, and no logits
  const auto first = local_part(logits.shape(), choice.operands[0],
                                mesh.shape(), mesh.coordinate())
                         .offset.back();
  const auto over_classes = [&mesh, &choice, last](const Tensor& x,
                                                   bool is_max) {
    const ReduceOp op = is_max ? ReduceOp::kMax : ReduceOp::kSum;
    for (std::size_t axis = 0; axis < mesh.ndim(); ++axis) {
      if (choice.operands[0][axis] != shard(last)) continue;
      mesh.group(axis).all_reduce(x, op, "loss").wait();
    }
  };
  const auto loss = [&](const Tensors& x, Reduction reduction) {
    return cuts_classes ? cross_entropy_part(x[0], x[1], first, classes,
                                             over_classes, reduction)
                        : shardbook::cross_entropy(x[0], x[1], reduction);
  };
  if (!cuts_rows) {
    return compute("cross_entropy", {logits, targets}, choice, {},
                   [&](const Tensors& x) { return loss(x, Reduction::kMean); });
  }
  // Ranks may have different numbers of targets: divide by the total
  const DTensor rows = targets.redistribute(choice.operands[1]);
  const DType stat = logits.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  const Tensor count =
      from_local(count_targets(rows.local(), stat), mesh, choice.result)
          .full_tensor();
  return compute("cross_entropy", {logits, rows}, choice, {},
                 [&](const Tensors& x) {
                   return shardbook::div(loss(x, Reduction::kSum), count);
                 });
}

}  // namespace shardbook::dtensor
