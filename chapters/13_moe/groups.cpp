#include "chapters/13_moe/groups.h"

#include <fmt/format.h>

#include "core/check.h"

namespace shardbook::moe {
namespace {

/// "0 4 8"
std::string ranks_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : " ") + std::to_string(rank);
  }
  return text;
}

const std::vector<int>& group_of(const std::vector<std::vector<int>>& groups,
                                 int rank) {
  for (const std::vector<int>& group : groups) {
    for (const int each : group) {
      if (each == rank) return group;
    }
  }
  SB_FAIL("moe: rank ", rank, " is in no group");
}

}  // namespace

Topology expert_topology(const GroupSizes& sizes) {
  const int model = sizes.tp * sizes.pp;
  SB_CHECK(sizes.world % model == 0, "--tp ", sizes.tp, ": ", sizes.world,
           " ranks do not divide into groups of ", model,
           "; give a divisor of --world-size");
  const int dp = sizes.world / model;
  SB_CHECK(dp % sizes.ep == 0, "--ep ", sizes.ep, ": the ", dp,
           " data-parallel ranks do not divide by it; give a divisor of ", dp);
  const int edp = dp / sizes.ep;
  if (sizes.data_before_expert) {
    return Topology({"pp", "ep", "edp", "tp"},
                    {sizes.pp, sizes.ep, edp, sizes.tp});
  }
  return Topology({"pp", "edp", "ep", "tp"},
                  {sizes.pp, edp, sizes.ep, sizes.tp});
}

ExpertGroups expert_groups(const GroupSizes& sizes) {
  const Topology grid = expert_topology(sizes);
  ExpertGroups groups;
  groups.ep = grid.groups({"ep"});
  groups.edp = grid.groups({"edp"});
  groups.dp = grid.groups({"edp", "ep"});
  groups.tp = grid.groups({"tp"});
  groups.replicas = grid.groups({"edp", "tp"});
  return groups;
}

std::string draw_groups(const GroupSizes& sizes, int num_experts) {
  SB_CHECK(num_experts % sizes.ep == 0, "--ep ", sizes.ep, ": ", num_experts,
           " experts do not divide by it; every rank has equally many");
  const Topology grid = expert_topology(sizes);
  const ExpertGroups groups = expert_groups(sizes);
  const int local = num_experts / sizes.ep;
  std::string text = fmt::format("{:>4}  {:<10} {:<16} {:<16} {:<10} {}\n",
                                 "rank", "experts", "EP", "EDP", "TP", "DP");
  for (int rank = 0; rank < sizes.world; ++rank) {
    const int first = grid.coordinate(rank, "ep") * local;
    const std::string experts =
        local == 1 ? fmt::format("{}", first)
                   : fmt::format("{}-{}", first, first + local - 1);
    text += fmt::format("{:>4}  {:<10} {:<16} {:<16} {:<10} {}\n", rank,
                        experts, ranks_text(group_of(groups.ep, rank)),
                        ranks_text(group_of(groups.edp, rank)),
                        ranks_text(group_of(groups.tp, rank)),
                        ranks_text(group_of(groups.dp, rank)));
  }
  return text;
}

}  // namespace shardbook::moe
