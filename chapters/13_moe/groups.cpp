#include "chapters/13_moe/groups.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::moe {
namespace {

/// The ranks of the group over these axes that contains `rank`.
std::string group_text(const Topology& grid, int rank,
                       const std::vector<std::string>& axes) {
  for (const std::vector<int>& group : grid.groups(axes)) {
    if (std::count(group.begin(), group.end(), rank) > 0) {
      return fmt::format("{}", fmt::join(group, " "));
    }
  }
  return "";
}

}  // namespace

Topology expert_topology(const GroupSizes& sizes) {
  const int model = sizes.tp * sizes.pp;
  SB_CHECK(sizes.world % model == 0, "--tp ", sizes.tp, ": ",
           how_many(sizes.world, "rank"), " cannot form groups of ", model,
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

std::string draw_groups(const GroupSizes& sizes, int num_experts) {
  SB_CHECK(num_experts % sizes.ep == 0, "--ep ", sizes.ep, ": ",
           how_many(num_experts, "expert"),
           " cannot be divided by it; every rank has equally many");
  const Topology grid = expert_topology(sizes);
  const int local = num_experts / sizes.ep;
  std::string text = fmt::format("{:>4}  {:<10} {:<16} {:<16} {:<10} {}\n",
                                 "rank", "experts", "EP", "EDP", "TP", "DP");
  for (int rank = 0; rank < sizes.world; ++rank) {
    const int first = grid.coordinate(rank, "ep") * local;
    const std::string experts =
        local == 1 ? fmt::format("{}", first)
                   : fmt::format("{}-{}", first, first + local - 1);
    text += fmt::format(
        "{:>4}  {:<10} {:<16} {:<16} {:<10} {}\n", rank, experts,
        group_text(grid, rank, {"ep"}), group_text(grid, rank, {"edp"}),
        group_text(grid, rank, {"tp"}), group_text(grid, rank, {"edp", "ep"}));
  }
  return text;
}

}  // namespace shardbook::moe
