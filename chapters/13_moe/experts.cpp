#include "chapters/13_moe/experts.h"

#include "chapters/07_tensor_parallel/mappings.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::moe {
namespace {

/// [E, ..] of independent experts, or E copies of one. Both draw the
/// single-device values.
Tensor expert_parameter(const std::string& name, const ExpertsShape& shape,
                        Shape of_one, double stddev, const InitOptions& init) {
  Shape all = of_one;
  all.insert(all.begin(), shape.experts);
  if (!shape.are_copies) return make_parameter(name, all, stddev, init);
  const Tensor local = make_parameter(name, all, 0, init);
  InitOptions one = init;
  one.shards.erase(one.shards.begin());
  one.device = RankContext::current().host();
  of_one.insert(of_one.begin(), 1);
  const Tensor drawn = make_parameter(name, of_one, stddev, one);
  for (std::int64_t e = 0; e < local.size(0); ++e) {
    local.rows_view(e, e + 1).copy_from(drawn.detach());
  }
  return local;
}

}  // namespace

Experts::Experts(const std::string& name, const ExpertsShape& shape,
                 InitOptions init, int ep_rank, int ep, ProcessGroup* tp)
    : tp_(tp != nullptr && tp->size() > 1 ? tp : nullptr), gelu_(shape.gelu) {
  SB_CHECK(shape.experts % ep == 0, "--ep ", ep, ": ", shape.experts,
           " experts do not divide by it; every rank has equally many");
  const auto cut = [&](std::int64_t dim) {
    InitOptions part = init;
    part.shards = {{0, ep_rank, ep}};
    if (tp_ != nullptr && dim > 0) {
      part.shards.push_back({dim, tp_->rank(), tp_->size()});
    }
    return part;
  };
  const std::int64_t m = shape.width, f = shape.hidden;
  if (f == 0) {
    SB_CHECK(tp_ == nullptr,
             "--expert-tp: linear experts have no hidden units");
    c_fc_weight = expert_parameter(name + ".c_fc.weight", shape, {m, m},
                                   shape.stddev, cut(0));
    c_fc_bias = make_constant_parameter({shape.experts, m}, 0, cut(0));
    return;
  }
  c_fc_weight = expert_parameter(name + ".c_fc.weight", shape, {m, f},
                                 shape.stddev, cut(2));
  c_fc_bias = make_constant_parameter({shape.experts, f}, 0, cut(1));
  c_proj_weight = expert_parameter(name + ".c_proj.weight", shape, {f, m},
                                   shape.residual_stddev, cut(1));
  c_proj_bias = make_constant_parameter({shape.experts, m}, 0, cut(0));
}

Tensor Experts::forward(const Tensor& rows) {
  const std::int64_t local = rows.size(0), m = rows.size(2);
  const std::int64_t f = c_fc_bias.size(1);
  const Tensor x = tp_ != nullptr ? tensor_parallel::copy_to(rows, *tp_) : rows;
  // One statement each: their order decides the order of backward
  Tensor hidden = matmul(x, c_fc_weight);
  hidden = add(hidden, reshape(c_fc_bias, {local, 1, f}));
  if (!c_proj_weight.defined()) return hidden;
  Tensor y = matmul(gelu(hidden, gelu_), c_proj_weight);
  // Hidden units of other ranks are parts of the sum; the bias is added after it
  if (tp_ != nullptr) y = tensor_parallel::reduce_from(y, *tp_);
  return add(y, reshape(c_proj_bias, {local, 1, m}));
}

void Experts::members(MemberVisitor& visit) {
  visit.parameter("c_fc.weight", c_fc_weight);
  visit.parameter("c_fc.bias", c_fc_bias);
  if (!c_proj_weight.defined()) return;
  visit.parameter("c_proj.weight", c_proj_weight);
  visit.parameter("c_proj.bias", c_proj_bias);
}

}  // namespace shardbook::moe
