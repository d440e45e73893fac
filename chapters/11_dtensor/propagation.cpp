#include "chapters/11_dtensor/propagation.h"

#include <algorithm>
#include <optional>

#include "chapters/11_dtensor/redistribute.h"
#include "core/autograd.h"
#include "core/check.h"

namespace shardbook::dtensor {
namespace {

bool applies(const Rule& rule, const std::vector<DTensor>& operands,
             std::size_t axis) {
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const Placement& now = operands[i].placements()[axis];
    if (rule.operands[i].is_partial() && rule.operands[i] != now) return false;
  }
  return true;
}

std::string layouts_text(const std::vector<DTensor>& operands) {
  std::string line;
  for (const DTensor& operand : operands) {
    line += (line.empty() ? "" : " and ") + shape_text(operand.shape()) + " " +
            text(operand.placements());
  }
  return line;
}

// Bytes and changed operands: the price of a choice.
std::pair<double, int> price(const Choice& choice,
                             const std::vector<DTensor>& operands,
                             const Shape& mesh) {
  const std::vector<std::int64_t> first(mesh.size(), 0);
  std::pair<double, int> sum{0, 0};
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const DTensor& operand = operands[i];
    const auto calls = calls_of(operand.placements(), choice.operands[i],
                                operand.shape(), mesh, first);
    sum.first += wire_elements(calls, mesh) *
                 static_cast<double>(dtype_bytes(operand.dtype()));
    for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
      sum.second += operand.placements()[axis] != choice.operands[i][axis];
    }
  }
  return sum;
}

bool is_average(const Placement& placement) {
  return placement.is_partial() && placement.op == PartialOp::kAvg;
}

}  // namespace

std::int64_t num_cuts(const Placements& placements, const Shape& mesh,
                      std::int64_t dim) {
  std::int64_t cuts = 1;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard(dim)) cuts *= mesh[axis];
  }
  return cuts;
}

Choice propagate(const std::string& name, const std::vector<DTensor>& operands,
                 const std::vector<Rule>& rules,
                 const std::function<bool(const Choice&)>& is_valid) {
  for (const DTensor& x : operands) {
    SB_CHECK(x.mesh().is_same(operands[0].mesh()), name,
             ": operands on the meshes ", operands[0].mesh().text(), " and ",
             x.mesh().text(), "; use one mesh");
  }
  const Shape& mesh = operands[0].mesh().shape();
  std::optional<Choice> best;
  std::pair<double, int> best_price;
  Choice choice;
  choice.operands.resize(operands.size());
  // Every combination of one rule per axis
  const std::function<void()> choose_axis = [&] {
    const std::size_t axis = choice.result.size();
    if (axis == mesh.size()) {
      if (is_valid && !is_valid(choice)) return;
      const auto cost = price(choice, operands, mesh);
      if (best && cost >= best_price) return;
      best = choice;
      best_price = cost;
      return;
    }
    for (const Rule& rule : rules) {
      if (!applies(rule, operands, axis)) continue;
      for (std::size_t i = 0; i < operands.size(); ++i) {
        choice.operands[i].push_back(rule.operands[i]);
      }
      choice.result.push_back(rule.result);
      choose_axis();
      for (Placements& placements : choice.operands) placements.pop_back();
      choice.result.pop_back();
    }
  };
  choose_axis();
  SB_CHECK(best.has_value(), name, " of ", layouts_text(operands),
           ": no layout fits; redistribute the operands to replicas");
  best->wire_bytes = best_price.first;
  return *best;
}

DTensor compute(const std::string& name, const std::vector<DTensor>& operands,
                const Choice& choice, const Shape& result_shape,
                const std::function<Tensor(const Tensors&)>& function) {
  const Mesh& mesh = operands[0].mesh();
  // Axes on which all ranks compute the same: a partial gradient can pass there
  // unchanged
  std::vector<bool> is_copy(mesh.ndim());
  for (std::size_t axis = 0; axis < mesh.ndim(); ++axis) {
    is_copy[axis] = choice.result[axis].is_replicate() &&
                    std::all_of(choice.operands.begin(), choice.operands.end(),
                                [axis](const Placements& placements) {
                                  return placements[axis].is_replicate();
                                });
  }
  // The layout of the result's gradient, set by backward
  const auto arrived = std::make_shared<Placements>();

  Tensors locals;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const DTensor x = operands[i].redistribute(choice.operands[i]);
    const DTensor layout = x.layout();
    const Placements result = choice.result;
    const auto identity = [](const Tensors& inputs) { return inputs; };
    const auto backward = [layout, arrived, is_copy,
                           result](const Tensors& grads) {
      Placements placements = normalized(layout.placements());
      Tensor grad = grads[0];
      for (std::size_t axis = 0; axis < placements.size(); ++axis) {
        const Placement& mine = layout.placements()[axis];
        if (is_copy[axis]) {
          placements[axis] = (*arrived)[axis];
        } else if (mine.is_replicate() && !result[axis].is_replicate()) {
          placements[axis] = partial();
        }
        // Each term of an average counts 1/P
        const std::int64_t ranks = layout.mesh().shape()[axis];
        if (is_average(mine) && ranks > 1) {
          grad = scale(grad, static_cast<double>(ranks));
        }
      }
      return Tensors{layout.gradient()->add(layout, grad, placements)};
    };
    locals.push_back(autograd::custom_function("operand", {x.local()}, identity,
                                               backward)[0]);
  }

  const Tensor local = function(locals);
  const DTensor layout(Tensor(), mesh, choice.result, result_shape,
                       std::make_shared<GradientLayout>());
  const Tensor outside = autograd::custom_function(
      "result", {local}, [](const Tensors& inputs) { return inputs; },
      [layout, arrived, is_copy](const Tensors& grads) {
        const Placements from = layout.gradient()->take(layout);
        Placements to = normalized(layout.placements());
        for (std::size_t axis = 0; axis < to.size(); ++axis) {
          if (is_copy[axis]) to[axis] = from[axis];
        }
        Tensor grad = redistribute_local(grads[0], layout.mesh(),
                                         layout.shape(), from, to);
        for (std::size_t axis = 0; axis < to.size(); ++axis) {
          const std::int64_t ranks = layout.mesh().shape()[axis];
          if (is_average(layout.placements()[axis]) && ranks > 1) {
            grad = scale(grad, 1 / static_cast<double>(ranks));
          }
        }
        *arrived = to;
        return Tensors{grad};
      })[0];
  return DTensor(outside, mesh, choice.result, result_shape, layout.gradient());
}

std::vector<Rule> rules_of_rows(std::int64_t dims, std::size_t operands) {
  const Placements whole(operands, replicate());
  std::vector<Rule> rules = {{whole, replicate()}};
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    rules.push_back({whole, shard(dim)});
    rules.back().operands[0] = shard(dim);
  }
  return rules;
}

void keep_terms(std::vector<Rule>& rules, std::size_t operands) {
  for (const PartialOp op : {PartialOp::kSum, PartialOp::kAvg}) {
    rules.push_back({Placements(operands, partial(op)), partial(op)});
  }
}

DTensor compute(const std::string& name, const std::vector<DTensor>& operands,
                const std::vector<Rule>& rules, const Shape& shape,
                const std::function<Tensor(const Tensors&)>& function) {
  return compute(name, operands, propagate(name, operands, rules), shape,
                 function);
}

std::int64_t positive_dim(const char* name, const DTensor& x,
                          std::int64_t dim) {
  const std::int64_t positive = dim < 0 ? dim + x.ndim() : dim;
  SB_CHECK(positive >= 0 && positive < x.ndim(), name, ": dim ", dim,
           " of a tensor ", shape_text(x.shape()));
  return positive;
}

}  // namespace shardbook::dtensor
