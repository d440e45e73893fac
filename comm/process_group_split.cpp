// Groups made from a group: by color, by their members, by parts.

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>
#include <sstream>

#include "comm/process_group.h"
#include "core/check.h"

namespace shardbook {

namespace {

std::string list_text(const std::vector<int>& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}

}  // namespace

// Subgroups write into this group's ledger, and its observer sees them.
std::shared_ptr<ProcessGroup> ProcessGroup::subgroup_of(
    const std::vector<int>& members, const std::string& name, bool all_call) {
  std::shared_ptr<ProcessGroup> group =
      all_call ? do_split(members, name) : do_subgroup(members, name);
  group->log_ = log_;
  group->observer_ = observer_;
  return group;
}

std::shared_ptr<ProcessGroup> ProcessGroup::split(int color, int key,
                                                  const std::string& name) {
  SB_CHECK(color >= -1, "split ", where(), " for '", name, "': color ", color,
           "; give -1 for no group, or 0 and more");
  const std::vector<std::string> all =
      exchange(fmt::format("{} {} {}", color, key, name));

  // Members of my color, by (key, rank).
  std::vector<std::pair<int, int>> order;
  bool all_have_groups = true;
  for (int r = 0; r < size(); ++r) {
    std::istringstream text(all[static_cast<std::size_t>(r)]);
    int their_color = -1;
    int their_key = 0;
    text >> their_color >> their_key;
    all_have_groups = all_have_groups && their_color >= 0;
    if (their_color == color) order.emplace_back(their_key, r);
  }
  if (color == -1) return nullptr;
  std::sort(order.begin(), order.end());
  std::vector<int> members;
  for (const auto& entry : order) members.push_back(entry.second);
  return subgroup_of(members, name, all_have_groups);
}

std::shared_ptr<ProcessGroup> ProcessGroup::subgroup(
    const std::vector<int>& members, const std::string& name) {
  SB_CHECK(!members.empty(), "subgroup '", name, "' ", where(),
           ": give at least one rank");
  const std::set<int> distinct(members.begin(), members.end());
  SB_CHECK(distinct.size() == members.size(), "subgroup '", name, "' ", where(),
           ": a rank is named twice in ", list_text(members));
  SB_CHECK(*distinct.begin() >= 0 && *distinct.rbegin() < size(), "subgroup '",
           name, "' ", where(), ": ", list_text(members),
           " names a rank outside of 0 to ", size() - 1);

  // All ranks must name the same group: a difference would hang much later.
  const std::string mine = list_text(members) + " '" + name + "'";
  const std::vector<std::string> all = exchange(mine);
  for (int r = 0; r < size(); ++r) {
    SB_CHECK(all[static_cast<std::size_t>(r)] == mine, "subgroup ", where(),
             ": rank ", rank_, " makes ", mine, ", rank ", r, " makes ",
             all[static_cast<std::size_t>(r)],
             "; all ranks make the same groups in the same order");
  }
  if (distinct.count(rank_) == 0) return nullptr;
  return subgroup_of(members, name, static_cast<int>(members.size()) == size());
}

std::shared_ptr<ProcessGroup> ProcessGroup::partition(
    const std::vector<std::vector<int>>& parts, const std::string& name) {
  std::vector<bool> is_seen(static_cast<std::size_t>(size()));
  std::string mine = "'" + name + "'";
  const std::vector<int>* my_part = nullptr;
  for (const std::vector<int>& part : parts) {
    mine += " " + list_text(part);
    for (const int member : part) {
      SB_CHECK(member >= 0 && member < size(), "partition '", name, "' ",
               where(), ": ", list_text(part), " names a rank outside of 0 to ",
               size() - 1);
      const auto at = static_cast<std::size_t>(member);
      SB_CHECK(!is_seen[at], "partition '", name, "' ", where(), ": rank ",
               member, " is named twice");
      is_seen[at] = true;
      if (member == rank_) my_part = &part;
    }
  }
  const std::string digest = std::to_string(std::hash<std::string>()(mine));
  const std::vector<std::string> all = exchange(digest);
  for (int r = 0; r < size(); ++r) {
    SB_CHECK(all[static_cast<std::size_t>(r)] == digest, "partition '", name,
             "' ", where(), ": ranks ", rank_, " and ", r,
             " pass different parts; all ranks make the same groups in the "
             "same order");
  }
  if (my_part == nullptr) return nullptr;
  const bool all_call =
      std::find(is_seen.begin(), is_seen.end(), false) == is_seen.end();
  return subgroup_of(*my_part, name, all_call);
}

}  // namespace shardbook
