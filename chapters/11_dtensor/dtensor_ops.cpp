#include "chapters/11_dtensor/dtensor_ops.h"

#include <algorithm>

#include "chapters/11_dtensor/propagation.h"
#include "core/check.h"

namespace shardbook::dtensor {
namespace {

Shape broadcast_shape(const Shape& a, const Shape& b) {
  Shape shape(std::max(a.size(), b.size()), 1);
  for (const Shape& operand : {a, b}) {
    const std::size_t skip = shape.size() - operand.size();
    for (std::size_t i = 0; i < operand.size(); ++i) {
      if (operand[i] != 1) shape[skip + i] = operand[i];
    }
  }
  return shape;
}

// The cut of an operand where dim `dim` of the result is cut.
Placement operand_cut(const Shape& operand, const Shape& result,
                      std::int64_t dim) {
  const auto skip = static_cast<std::int64_t>(result.size() - operand.size());
  const std::int64_t mine = dim - skip;
  if (mine < 0 || operand[static_cast<std::size_t>(mine)] == 1) {
    return replicate();
  }
  return shard(mine);
}

// The same cut of all operands; partials where the function is linear.
DTensor pointwise(const std::string& name, const std::vector<DTensor>& operands,
                  bool is_linear,
                  const std::function<Tensor(const Tensors&)>& function) {
  Shape shape = operands[0].shape();
  for (const DTensor& x : operands) shape = broadcast_shape(shape, x.shape());
  std::vector<Rule> rules = rules_of_rows(0, operands.size());
  for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(shape.size());
       ++dim) {
    Rule rule;
    for (const DTensor& x : operands) {
      rule.operands.push_back(operand_cut(x.shape(), shape, dim));
    }
    rule.result = shard(dim);
    if (shape[static_cast<std::size_t>(dim)] > 1) rules.push_back(rule);
  }
  if (is_linear) keep_terms(rules, operands.size());
  return compute(name, operands, rules, shape, function);
}

DTensor unary(const std::string& name, const DTensor& x,
              Tensor (*function)(const Tensor&)) {
  return pointwise(name, {x}, /*is_linear=*/false,
                   [function](const Tensors& a) { return function(a[0]); });
}

}  // namespace

// --- Element-wise ----------------------------------------------------------------

DTensor add(const DTensor& a, const DTensor& b) {
  return pointwise("add", {a, b}, /*is_linear=*/true,
                   [](const Tensors& x) { return shardbook::add(x[0], x[1]); });
}

DTensor sub(const DTensor& a, const DTensor& b) {
  return pointwise("sub", {a, b}, /*is_linear=*/true,
                   [](const Tensors& x) { return shardbook::sub(x[0], x[1]); });
}

DTensor mul(const DTensor& a, const DTensor& b) {
  return pointwise("mul", {a, b}, /*is_linear=*/false,
                   [](const Tensors& x) { return shardbook::mul(x[0], x[1]); });
}

DTensor scale(const DTensor& x, double factor) {
  return pointwise(
      "scale", {x}, /*is_linear=*/true,
      [factor](const Tensors& a) { return shardbook::scale(a[0], factor); });
}

DTensor relu(const DTensor& x) { return unary("relu", x, shardbook::relu); }
DTensor gelu(const DTensor& x) {
  return unary("gelu", x, [](const Tensor& a) { return shardbook::gelu(a); });
}
DTensor tanh(const DTensor& x) { return unary("tanh", x, shardbook::tanh); }
DTensor square(const DTensor& x) {
  return unary("square", x, shardbook::square);
}

DTensor dropout(const DTensor& x, double p) {
  const Choice choice = propagate("dropout", {x}, rules_of_rows(x.ndim()));
  const Block block = local_part(x.shape(), choice.result, x.mesh().shape(),
                                 x.mesh().coordinate());
  const ShardView view{x.shape(), block.offset, {}};
  return compute("dropout", {x}, choice, x.shape(),
                 [p, view](const Tensors& a) {
                   return shardbook::dropout(a[0], p, view);
                 });
}

// --- Products ----------------------------------------------------------------------

DTensor matmul(const DTensor& a, const DTensor& b, bool trans_b) {
  SB_CHECK(a.ndim() >= 2 && b.ndim() == 2, "matmul: ", shape_text(a.shape()),
           " times ", shape_text(b.shape()), "; give [.., m, k] and a matrix");
  const std::int64_t last = a.ndim() - 1;
  const std::int64_t b_k = trans_b ? 1 : 0;
  const std::int64_t k = b.shape()[static_cast<std::size_t>(b_k)];
  SB_CHECK(a.shape().back() == k, "matmul: ", shape_text(a.shape()), " times ",
           shape_text(b.shape()), trans_b ? " transposed" : "", " sums over ",
           a.shape().back(), " and ", k, " elements");
  std::vector<Rule> rules = rules_of_rows(last, 2);
  rules.push_back({{replicate(), shard(1 - b_k)}, shard(last)});
  rules.push_back({{shard(last), shard(b_k)}, partial()});
  for (const PartialOp op : {PartialOp::kSum, PartialOp::kAvg}) {
    rules.push_back({{partial(op), replicate()}, partial(op)});
    rules.push_back({{replicate(), partial(op)}, partial(op)});
  }
  Shape shape = a.shape();
  shape.back() = b.shape()[static_cast<std::size_t>(1 - b_k)];
  return compute("matmul", {a, b}, rules, shape, [trans_b](const Tensors& x) {
    // All rows as one matrix
    Shape rows = x[0].shape();
    const std::int64_t k = rows.back();
    rows.back() = x[1].size(trans_b ? 0 : 1);
    std::int64_t m = 1;
    for (std::size_t i = 0; i + 1 < rows.size(); ++i) m *= rows[i];
    return shardbook::reshape(
        shardbook::matmul(shardbook::reshape(x[0], {m, k}), x[1], false,
                          trans_b),
        rows);
  });
}

DTensor attention(const DTensor& q, const DTensor& k, const DTensor& v,
                  const AttentionOptions& options) {
  SB_CHECK(q.ndim() == 3, "attention: queries ", shape_text(q.shape()),
           "; give [b, s, h]");
  std::vector<Rule> rules;
  for (const Placement& placement : {replicate(), shard(0), shard(2)}) {
    rules.push_back({Placements(3, placement), placement});
  }
  const Shape& mesh = q.mesh().shape();
  // Cut between key heads, so queries stay with the key head they read
  const std::int64_t kv_heads =
      options.kv_heads == 0 ? options.heads : options.kv_heads;
  const Choice choice =
      propagate("attention", {q, k, v}, rules, [&](const Choice& choice) {
        const std::int64_t cuts = num_cuts(choice.result, mesh, 2);
        return options.heads % cuts == 0 && kv_heads % cuts == 0;
      });
  const std::int64_t cuts = num_cuts(choice.result, mesh, 2);
  AttentionOptions local = options;
  local.heads = options.heads / cuts;
  local.kv_heads = kv_heads / cuts;
  SB_CHECK(options.dropout == 0 ||
               choice.result == Placements(mesh.size(), replicate()),
           "attention: dropout ", options.dropout,
           " of probabilities that are cut; give 0");
  return compute("attention", {q, k, v}, choice, q.shape(),
                 [local](const Tensors& x) {
                   return shardbook::attention(x[0], x[1], x[2], local);
                 });
}

// --- Along the last dim --------------------------------------------------------------

DTensor softmax(const DTensor& x) {
  return compute("softmax", {x}, rules_of_rows(x.ndim() - 1), x.shape(),
                 [](const Tensors& a) { return shardbook::softmax(a[0]); });
}

DTensor layer_norm(const DTensor& x, const DTensor& gamma, const DTensor& beta,
                   double eps) {
  return compute("layer_norm", {x, gamma, beta}, rules_of_rows(x.ndim() - 1, 3),
                 x.shape(), [eps](const Tensors& a) {
                   return shardbook::layer_norm(a[0], a[1], a[2], eps);
                 });
}

// --- Lookup --------------------------------------------------------------------------

namespace {

// embedding_part of a table whose shard may be empty: zeros for indices of other
// ranks' rows. The sum over the ranks is the lookup in the whole table.
// Vocabulary-parallel embedding of Megatron-LM.
Tensor embedding_of_rows(const Tensor& table, const Tensor& indices,
                         std::int64_t first) {
  if (table.size(0) > 0) return embedding_part(table, indices, first);
  // Zeros that depend on the table: backward must pass here on every rank
  Shape shape = indices.shape();
  shape.push_back(table.size(1));
  return shardbook::add(Tensor::zeros(shape, table.options()),
                        shardbook::sum(table, 0));
}

}  // namespace

DTensor embedding(const DTensor& table, const DTensor& indices) {
  const Placement r = replicate();
  std::vector<Rule> rules = {{{r, r}, r}};
  for (std::int64_t dim = 0; dim < indices.ndim(); ++dim) {
    rules.push_back({{r, shard(dim)}, shard(dim)});
  }
  rules.push_back({{shard(1), r}, shard(indices.ndim())});
  rules.push_back({{shard(0), r}, partial()});
  Shape shape = indices.shape();
  shape.push_back(table.shape()[1]);
  const Choice choice = propagate("embedding", {table, indices}, rules);
  const Mesh& mesh = table.mesh();
  const Block rows = local_part(table.shape(), choice.operands[0], mesh.shape(),
                                mesh.coordinate());
  const std::int64_t first = rows.offset[0];
  const bool is_cut = num_cuts(choice.operands[0], mesh.shape(), 0) > 1;
  return compute("embedding", {table, indices}, choice, shape,
                 [first, is_cut](const Tensors& x) {
                   return is_cut ? embedding_of_rows(x[0], x[1], first)
                                 : shardbook::embedding(x[0], x[1]);
                 });
}

// --- Layout ------------------------------------------------------------------------------

DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1) {
  const std::int64_t a = positive_dim("transpose", x, dim0);
  const std::int64_t b = positive_dim("transpose", x, dim1);
  std::vector<Rule> rules = {{{replicate()}, replicate()}};
  for (std::int64_t dim = 0; dim < x.ndim(); ++dim) {
    rules.push_back({{shard(dim)}, shard(dim == a ? b : dim == b ? a : dim)});
  }
  keep_terms(rules);
  Shape shape = x.shape();
  std::swap(shape[static_cast<std::size_t>(a)],
            shape[static_cast<std::size_t>(b)]);
  return compute("transpose", {x}, rules, shape, [a, b](const Tensors& t) {
    return shardbook::transpose(t[0], a, b);
  });
}

namespace {

/// Dims [in_begin, in_end) and [out_begin, out_end) have the same elements.
struct DimGroup {
  std::size_t in_begin, in_end, out_begin, out_end;
};

// The finest groups of dims that one reshape maps to each other.
std::vector<DimGroup> dim_groups(const Shape& in, const Shape& out) {
  std::vector<DimGroup> groups;
  std::size_t i = 0, j = 0;
  while (i < in.size() || j < out.size()) {
    DimGroup group{i, i, j, j};
    std::int64_t a = 1, b = 1;
    if (i < in.size()) a = in[i++];
    if (j < out.size()) b = out[j++];
    while (a != b) {
      if (a < b && i < in.size()) {
        a *= in[i++];
      } else if (j < out.size()) {
        b *= out[j++];
      } else {
        a *= in[i++];
      }
    }
    group.in_end = i;
    group.out_end = j;
    groups.push_back(group);
  }
  return groups;
}

// The first dim of a range that has more than one element.
std::size_t outermost(const Shape& shape, std::size_t begin, std::size_t end) {
  while (begin + 1 < end && shape[begin] == 1) ++begin;
  return begin;
}

}  // namespace

DTensor reshape(const DTensor& x, const Shape& shape) {
  SB_CHECK(
      shape_numel(shape) == shape_numel(x.shape()) && shape_numel(shape) > 0,
      "reshape: ", shape_text(x.shape()), " to ", shape_text(shape));
  const Shape& mesh = x.mesh().shape();
  std::vector<Rule> rules = {{{replicate()}, replicate()}};
  // Pairs of dims, of x and of the result, that cuts must divide
  std::vector<std::pair<std::size_t, std::size_t>> must_divide;
  for (const DimGroup& group : dim_groups(x.shape(), shape)) {
    if (group.in_begin == group.in_end || group.out_begin == group.out_end) {
      continue;
    }
    const std::size_t in = outermost(x.shape(), group.in_begin, group.in_end);
    const std::size_t out = outermost(shape, group.out_begin, group.out_end);
    rules.push_back({{shard(static_cast<std::int64_t>(in))},
                     shard(static_cast<std::int64_t>(out))});
    if (x.shape()[in] != shape[out]) must_divide.emplace_back(in, out);
  }
  keep_terms(rules);
  const Choice choice =
      propagate("reshape", {x}, rules, [&](const Choice& choice) {
        return std::all_of(
            must_divide.begin(), must_divide.end(), [&](const auto& dims) {
              const std::int64_t cuts = num_cuts(
                  choice.result, mesh, static_cast<std::int64_t>(dims.second));
              return x.shape()[dims.first] % cuts == 0 &&
                     shape[dims.second] % cuts == 0;
            });
      });
  const Shape local =
      local_part(shape, choice.result, mesh, x.mesh().coordinate()).shape;
  return compute("reshape", {x}, choice, shape, [local](const Tensors& t) {
    return shardbook::reshape(t[0], local);
  });
}

}  // namespace shardbook::dtensor
