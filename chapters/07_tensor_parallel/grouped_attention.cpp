#include "chapters/07_tensor_parallel/grouped_attention.h"

#include <algorithm>
#include <vector>

#include "core/check.h"

namespace shardbook::tensor_parallel {
namespace {

/// The `columns` of a matrix [in, out] and of its bias.
Linear cut_linear(const std::string& name, std::int64_t in, std::int64_t out,
                  double stddev, InitOptions init, const Shards& columns) {
  Linear made;
  init.shards = columns;
  made.weight = make_parameter(name + ".weight", {in, out}, stddev, init);
  for (Shard& shard : init.shards) shard.dim = 0;
  made.bias = make_constant_parameter({out}, 0, init);
  return made;
}

// A weight that several ranks hold is treated like a shared activation: f
// before it sums its gradient.
Tensor shared_linear(const Tensor& x, const Linear& layer,
                     ProcessGroup& sharers) {
  return linear(x, copy_to(layer.weight, sharers),
                copy_to(layer.bias, sharers));
}

const GroupedShape& checked(const GroupedShape& shape, int t) {
  SB_CHECK(shape.groups > 0 && shape.heads % shape.groups == 0,
           "grouped attention: ", shape.groups, " groups share ", shape.heads,
           " heads; give a divisor of ", shape.heads);
  SB_CHECK(shape.width % shape.heads == 0, "grouped attention: ", shape.heads,
           " heads do not divide a width of ", shape.width);
  SB_CHECK(shape.heads % t == 0, "grouped attention: ", shape.heads,
           " heads do not divide over ", t, " ranks; give a divisor of ",
           shape.heads);
  return shape;
}

}  // namespace

Shards kv_shards(std::int64_t groups, int rank, int t) {
  SB_CHECK(groups % t == 0 || t % groups == 0, "grouped attention: ", groups,
           " groups of keys over ", t,
           " ranks; give a multiple or a divisor of ", groups, " ranks");
  if (groups % t == 0) return {{1, rank, t}};
  return {{1, rank / (t / groups), groups}};
}

std::shared_ptr<ProcessGroup> kv_sharers(ProcessGroup& tp,
                                         std::int64_t groups) {
  const int t = tp.size();
  kv_shards(groups, 0, t);
  const int together = groups % t == 0 ? 1 : static_cast<int>(t / groups);
  std::vector<std::vector<int>> parts;
  for (int rank = 0; rank < t; ++rank) {
    if (rank % together == 0) parts.emplace_back();
    parts.back().push_back(rank);
  }
  return tp.partition(parts, "kv");
}

GroupedAttention::GroupedAttention(const std::string& name,
                                   const GroupedShape& shape, InitOptions init,
                                   ProcessGroup& tp, ProcessGroup& sharers)
    : o_proj(name + ".o_proj",
             LinearShape{shape.width, checked(shape, tp.size()).width, 1,
                         shape.stddev},
             init, tp),
      shape_(shape),
      tp_(&tp),
      sharers_(&sharers) {
  const std::int64_t h = shape.width, d = h / shape.heads;
  const Shards own = kv_shards(shape.groups, tp.rank(), tp.size());
  const auto cut = [&](const char* kind, std::int64_t out,
                       const Shards& columns) {
    return cut_linear(name + "." + kind, h, out, shape.stddev, init, columns);
  };
  q_proj = cut("q_proj", h, {{1, tp.rank(), tp.size()}});
  k_proj = cut("k_proj", shape.groups * d, own);
  v_proj = cut("v_proj", shape.groups * d, own);
}

Tensor GroupedAttention::forward(const Tensor& x) {
  const std::int64_t own = shape_.heads / tp_->size(), s = x.size(1);
  const Tensor in = copy_to(x, *tp_);
  const Tensor q = q_proj(in);
  const Tensor k = shared_linear(in, k_proj, *sharers_);
  const Tensor v = shared_linear(in, v_proj, *sharers_);

  // All heads have one size, so the width gives this rank's groups
  AttentionOptions options;
  options.heads = own;
  options.kv_heads = k.size(2) / (shape_.width / shape_.heads);
  options.dropout = is_training() ? shape_.dropout : 0;
  // Draw the masks that one device draws for these heads
  options.shard = {
      {x.size(0), shape_.heads, s, s}, {0, tp_->rank() * own, 0, 0}, {}};
  return o_proj(attention(q, k, v, options));
}

void GroupedAttention::members(MemberVisitor& visit) {
  visit.module("q_proj", q_proj);
  visit.module("k_proj", k_proj);
  visit.module("v_proj", v_proj);
  visit.module("o_proj", o_proj);
}

}  // namespace shardbook::tensor_parallel
