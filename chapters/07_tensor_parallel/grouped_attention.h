#pragma once

// Grouped-query attention, cut over ranks: `groups` heads of keys and values,
// each shared by heads / groups consecutive heads of queries.
//
//   8 heads, 2 groups     t = 2                       t = 4
//   queries   0123 4567   0123   4567                 01   23   45   67
//   keys      0    1      0      1                    0    0    1    1
//
// If t divides the groups, a rank has whole groups, and nothing changes. With
// more ranks than groups, t / groups ranks hold the same keys. Each of them
// sees its own queries' part of the keys' gradient; the parts are summed.
// Ainslie et al. 2023, "GQA"; Megatron-LM's num_query_groups.

#include <memory>
#include <string>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "core/layers.h"

namespace shardbook::tensor_parallel {

struct GroupedShape {
  std::int64_t width = 0, heads = 0, groups = 0;
  double stddev = 0.02;
  double dropout = 0;  ///< of the probabilities
};

/// The columns of keys (or values) that rank `rank` of t holds: its groups, or
/// the one that it shares. Throws Error unless one of t and groups divides the
/// other.
Shards kv_shards(std::int64_t groups, int rank, int t);
/// The ranks of tp that hold the same keys; this rank alone if t divides the
/// groups. Collective.
std::shared_ptr<ProcessGroup> kv_sharers(ProcessGroup& tp, std::int64_t groups);

/// Queries, keys and values are projected by three matrices. One f sums the
/// gradient of x for all three.
class GroupedAttention : public ModuleOf<GroupedAttention> {
 public:
  /// `sharers`: the group from kv_sharers, the same for all layers.
  GroupedAttention(const std::string& name, const GroupedShape& shape,
                   InitOptions init, ProcessGroup& tp, ProcessGroup& sharers);
  /// [n, S, h] -> [n, S, h], both on every rank.
  ///
  /// Communication: g forward and f backward, all-reduces of n S h elements.
  /// With more ranks than groups, also dWk, dbk, dWv and dbv over the sharers:
  /// 2 (h + 1) h / heads elements.
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "GroupedAttention"; }

  Linear q_proj;             ///< [h, h / t]
  Linear k_proj, v_proj;     ///< [h, own groups h / heads]
  RowParallelLinear o_proj;  ///< [h / t, h]

 private:
  GroupedShape shape_;
  ProcessGroup* tp_;
  ProcessGroup* sharers_;
};

}  // namespace shardbook::tensor_parallel
