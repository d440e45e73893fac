#pragma once

// Groups of experts' ranks.
//
//   W = 8, t = 1, ep = 4            EP group: one set of all experts
//
//   rank      0    1    2    3        4    5    6    7
//   experts  e0   e1   e2   e3       e0   e1   e2   e3
//            +-- EP group ---+       +-- EP group ---+
//   EDP groups: {0,4} {1,5} {2,6} {3,7}, ranks that hold the same experts
//   DP group: all 8, ranks that hold the same dense parameters
//
// An EP group is a run of `ep` ranks of a data-parallel group, so its ranks hold
// different tokens. With use_data_before_expert_parallel the strides of EP and EDP
// are exchanged. Tensor-parallel ranks are neighbours; each group has ranks of
// one TP rank, as in DeepSpeed with enable_expert_tensor_parallelism. (Its
// other experts use EP groups of consecutive ranks, TP peers included; the
// divisor of gradients is the same.)
//
// DeepSpeed, deepspeed/utils/groups.py.

#include <string>

#include "comm/device_mesh.h"

namespace shardbook::moe {

struct GroupSizes {
  int world = 1;
  int tp = 1;
  int pp = 1;
  int ep = 1;
  bool data_before_expert = false;
};

/// Axes pp, edp, ep and tp (the last varies fastest). Ranks that differ in ep share
/// a set of all experts; in edp, they hold the same experts; in edp and ep, the same
/// dense parameters; in edp and tp, the same experts where TP does not cut them.
/// Throws Error, with sizes that work, where the sizes do not divide.
Topology expert_topology(const GroupSizes& sizes);

/// A table: a row per rank with its experts and its groups.
std::string draw_groups(const GroupSizes& sizes, int num_experts);

}  // namespace shardbook::moe
